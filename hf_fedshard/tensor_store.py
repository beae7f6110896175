"""
Tensors and DTensors on disk through `torch.distributed.checkpoint`, with its pickled index replaced by JSON: nothing
is unpickled when a checkpoint is read, but tensors with `weights_only=True`.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import IOBase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from .manifest import CheckpointError, read_json


INDEX_NAME = "index.json"


@dataclass(frozen=True)
class StoredTensor:
    """
    A tensor in a store.

    Args:
        dtype (`torch.dtype`):
            Its type.
        shape (`torch.Size`):
            Its whole shape.
    """

    dtype: torch.dtype
    shape: torch.Size


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, group: dist.ProcessGroup | None) -> dict[str, int]:
    """
    Writes tensors that the ranks of a group hold together, each rank its share. Collective over the group.

    What several ranks hold (replicas, plain tensors) is written once, by whichever rank has the least to write so far.

    Args:
        tensors (`Mapping[str, torch.Tensor]`):
            By name; DTensors on a mesh of the group's ranks, or plain tensors that are equal on all of them. The same
            names on all ranks.
        folder (`Path`):
            Where; made, and empty so far.
        group (`ProcessGroup`, *optional*):
            The ranks; `None` for the world.

    Returns:
        `dict[str, int]`: crc32 of the files that this rank has written, by name in `folder`.

    Raises:
        CheckpointError: On every rank of the group, if any cannot write; the message has the reason.
    """
    writer = _Writer(folder)
    try:
        # Not `dcp.save(..., no_dist)`: the plan is made over the group, so that nothing is written twice.
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    except dcp.api.CheckpointException as error:
        reasons = "; ".join(f"rank {rank} of the group: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{folder} cannot be written: {reasons}") from error
    return writer.fs.checksums  # type: ignore[attr-defined]


def load_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """
    Reads tensors in place, whatever shards they were written in. Without communication: each rank reads what it needs.

    Args:
        tensors (`Mapping[str, torch.Tensor]`):
            Where to read to, by name: DTensors of any mesh, or plain tensors. Other dtypes are converted.
        folder (`Path`):
            From [`save_tensors`].

    Raises:
        CheckpointError: If a name is missing, has another shape, or a file cannot be read; the message names it.
    """
    stored = stored_tensors(folder)
    for name, tensor in tensors.items():
        if name not in stored:
            raise CheckpointError(f"{folder} holds no {name}.")
        if stored[name].shape != tensor.shape:
            raise CheckpointError(
                f"{folder}: {name} has the shape {tuple(stored[name].shape)}, not {tuple(tensor.shape)}."
            )
    if not tensors:
        return
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=True)
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """
    What a store holds.

    Args:
        folder (`Path`):
            From [`save_tensors`].

    Returns:
        `dict[str, StoredTensor]`: By name, in the order in which they were saved.
    """
    index = read_json(folder / INDEX_NAME)
    return {
        name: StoredTensor(getattr(torch, entry["dtype"]), torch.Size(entry["shape"])) for name, entry in index.items()
    }


class _CountingStream(IOBase):
    """A file opened for writing that keeps the crc32 of what goes through it."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return int(self.file.write(data))

    def tell(self) -> int:
        return int(self.file.tell())

    def fileno(self) -> int:
        return int(self.file.fileno())

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def close(self) -> None:
        self.file.close()


class _CountingFileSystem(FileSystem):
    """torch's file system, plus the checksums of the files it has written."""

    def __init__(self) -> None:
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as file:
            stream = _CountingStream(file)
            yield stream
            self.checksums[Path(path).name] = stream.crc32


class _Writer(FileSystemWriter):
    """torch's writer with an index in JSON."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _CountingFileSystem()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for rank in results for result in rank}
        index = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{name} is no tensor.")
            chunks = []
            for chunk in entry.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                chunks.append(
                    [list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length]
                )
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        with self.fs.create_stream(self.fs.concat_path(self.path, INDEX_NAME), "wb") as stream:
            stream.write(json.dumps(index, separators=(",", ":")).encode())


class _Reader(FileSystemReader):
    """torch's reader of that index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, entry in read_json(Path(self.path) / INDEX_NAME).items():
            chunks = []
            for offsets, sizes, file, offset, length in entry["chunks"]:
                if Path(file).name != file:
                    raise CheckpointError(f"{INDEX_NAME} names a file outside of its folder: {file}")
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(name, offsets)] = _StorageInfo(file, offset, length)
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(tensors, storage_data=places)

"""What a checkpoint consists of, file by file: how a truncated, missing or foreign file is found and named."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


FEDERATION_FOLDER = "federation"
MANIFEST_NAME = f"{FEDERATION_FOLDER}/manifest.json"
_CHUNK_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit the run that is to resume from it."""


def write_json(path: Path, content: Any) -> None:
    """
    Writes a JSON file that is on the disk when this returns.

    Args:
        path (`Path`):
            The file; its folder is made.
        content (`Any`):
            What `json` can write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """
    Reads a JSON file.

    Args:
        path (`Path`):
            The file.

    Raises:
        CheckpointError: If it is missing or is no JSON; the message names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def checksum(path: Path) -> int:
    """
    crc32 of a file's content.

    Args:
        path (`Path`):
            The file.
    """
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def write_manifest(folder: Path, known: Mapping[str, int]) -> None:
    """
    Describes every file of a checkpoint. Written last, by one rank: a folder with a manifest is complete.

    Args:
        folder (`Path`):
            The checkpoint.
        known (`Mapping[str, int]`):
            crc32 of files, by their path in the checkpoint, which their writers computed on the way; the others are
            read.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != MANIFEST_NAME:
            files[name] = [path.stat().st_size, known[name] if name in known else checksum(path)]
    missing = sorted(set(known) - set(files))
    if missing:
        raise CheckpointError(
            f"{folder}: other ranks have written {', '.join(missing[:3])}, but rank 0 does not see it. The output "
            "directory must lie on a file system that all nodes share."
        )
    write_json(folder / MANIFEST_NAME, {"crc32": _checksum_of(files), "files": files})


def find_damage(folder: Path, part: int = 0, num_parts: int = 1) -> list[str]:
    """
    Compares a checkpoint with its manifest.

    Args:
        folder (`Path`):
            The checkpoint.
        part (`int`, defaults to `0`):
            Which share of the files' contents to check: the ranks of a run share the reading. Presence and sizes are
            checked for all.
        num_parts (`int`, defaults to `1`):
            Number of shares; `0` checks no contents.

    Returns:
        `list[str]`: One line for each file that is missing, has another size or content, or does not belong into the
        `federation` folder. Files beside that folder may be added freely: model cards, say.
    """
    try:
        manifest = read_json(folder / MANIFEST_NAME)
        files = manifest["files"]
        if manifest["crc32"] != _checksum_of(files):
            return [f"{MANIFEST_NAME} was changed"]
    except (CheckpointError, KeyError, TypeError) as error:
        return [f"{MANIFEST_NAME} is damaged ({error})"]
    damage = []
    for index, (name, (size, crc32)) in enumerate(files.items()):
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                damage.append(f"{name} has {found:,} bytes, not {size:,}")
            elif num_parts and index % num_parts == part and checksum(path) != crc32:
                damage.append(f"{name} has another content (crc32)")
        except OSError as error:
            damage.append(f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error}")
    for path in sorted((folder / FEDERATION_FOLDER).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files and name != MANIFEST_NAME:
            damage.append(f"{name} does not belong to the checkpoint")
    return damage


def has_manifest(folder: Path) -> bool:
    """
    Whether a folder was written by this package.

    Args:
        folder (`Path`):
            The folder.
    """
    return (folder / FEDERATION_FOLDER).is_dir()


def _checksum_of(files: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())

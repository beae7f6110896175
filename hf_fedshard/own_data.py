"""How the ranks of a group share the group's own data, in as many steps as every other group makes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import is_datasets_available
from torch.utils.data import IterableDataset, Subset, get_worker_info

from .group_data import GroupData, GroupStreams, wrong_number
from .handshake import agree


logger = logging.getLogger(__name__)


class EndlessStream(IterableDataset[Any]):
    """
    Repeats a stream: groups whose streams are of unequal length would end an epoch at different steps.

    Args:
        dataset (`Iterable`):
            A streaming dataset that can be read again, or is longer than it is read.
        begun (`Iterator`, *optional*):
            A reading of it that stands at its first sample, to go on with in place of the first one.
    """

    def __init__(self, dataset: Any, begun: Iterator[Any] | None = None) -> None:
        self.dataset = dataset
        self._begun = begun

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_begun": None}  # an open reading cannot be sent to a worker

    def __iter__(self) -> Iterator[Any]:
        in_worker = get_worker_info() is not None
        # A stream may give each worker another part, which it decides where its reading begins: that was outside.
        begun, self._begun = (None if in_worker else self._begun), None
        first = True
        while True:
            empty = True
            for sample in self.dataset if begun is None else begun:
                empty = False
                yield sample
            if empty and first and in_worker:
                return  # fewer files than workers: this one has nothing to read
            begun, first = None, False
            if empty:
                raise RuntimeError(
                    "A stream of training data cannot be read a second time. Give each group a dataset that can be, or as "
                    "many samples as its steps need and a batch of each rank more, which is read ahead."
                )

    def set_epoch(self, epoch: int) -> None:
        """Hands the epoch on, on which a shuffled stream's order depends."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


@dataclass(frozen=True)
class OwnData:
    """
    What a rank draws from.

    Args:
        dataset (`Any`):
            Of this rank's group, or of this rank alone.
        num_ranks (`int`):
            How many ranks share it.
        rank (`int`):
            Which of them this one is.
        unique_share (`float`, defaults to `1.0`):
            How much of an epoch is no repetition: 0.25 if each sample is drawn four times. 1 for a stream, whose length is
            not known.
    """

    dataset: Any
    num_ranks: int
    rank: int
    unique_share: float = 1.0


def own_data(data: GroupData, group: int, num_groups: int, num_ranks: int, rank: int) -> OwnData:
    """
    The dataset of this rank's group, such that all groups make the same number of steps. Collective over the world.

    A group with less data than the largest one repeats its own, so an epoch is one pass over the largest group's. Leaving
    such a group idle would not help the others: a round ends when all groups have made its steps. Streams repeat without
    end.

    Args:
        data ([`GroupData`]):
            All groups' data.
        group (`int`):
            This rank's group.
        num_groups (`int`):
            Groups of the federation.
        num_ranks (`int`):
            Ranks of a group that draw different data.
        rank (`int`):
            Which of them this one is.

    Returns:
        [`OwnData`]: What this rank draws from, and with how many others.

    Raises:
        ValueError: On every rank, if the numbers of groups differ, or a group's data cannot be read or is empty.
    """
    error: str | None = None
    own: Any = None
    begun: Iterator[Any] | None = None
    length: int | None = None
    try:
        if data.num_groups != num_groups:
            raise ValueError(wrong_number(data, num_groups))
        own = data.of_group(group)
        streaming = isinstance(own, IterableDataset)
        if streaming != isinstance(data, GroupStreams):
            raise ValueError(
                f"The dataset of group {group} is {'a' if streaming else 'no'} streaming dataset: say so with "
                "group_dataset(..., streaming=...)."
            )
        if streaming:
            if not data.take_turns:
                own, num_ranks, rank = _own_files(own, num_ranks, rank)
            by_files = own is not data.of_group(group)
            begun = _look_ahead(own)
            empty = begun is None
            # One whose order depends on the epoch is opened when that is known, and can be opened again.
            begun = None if hasattr(own, "set_epoch") else begun
        else:
            length = len(own)
            empty = length == 0
        if empty and streaming and by_files:
            raise ValueError(
                f"The stream of group {group} has files for each of its ranks, but those of this one hold no sample. Leave empty "
                "files out, give fewer files than ranks, so that each rank reads the whole stream and takes its turn, or "
                "split by a column with split_by_column, which does so."
            )
        if empty:
            raise ValueError(f"The dataset of group {group} is empty. Every group needs data of its own.")
    except Exception as problem:  # whatever it is, the other ranks must not be left waiting
        error = str(problem) if isinstance(problem, ValueError) else f"The data of group {group}: {problem!r}"
    agree("the groups' data", {"number of groups": data.num_groups}, error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (group, length))
    sizes = [{size for member, size in everyone if member == index} for index in range(num_groups)]
    unequal = [f"group {index}: {sorted(found)}" for index, found in enumerate(sizes) if len(found) > 1]
    if unequal:
        raise ValueError(
            f"The ranks of one group hold datasets of different lengths ({'; '.join(unequal)}). All ranks of a group must be "
            "given the same dataset; it is shared among them."
        )
    if length is None:
        return OwnData(EndlessStream(own, begun), num_ranks, rank)
    lengths = [next(iter(found)) for found in sizes]
    longest = max(lengths)
    if dist.get_rank() == 0 and min(lengths) < longest:
        repeated = [
            f"group {index}: {size:,} samples, {longest / size:.3g} times" for index, size in enumerate(lengths)
        ]
        logger.warning(
            "The groups have unequal amounts of data. An epoch is one pass over the largest; in it the others draw theirs "
            "repeatedly. %s.",
            "; ".join(repeated),
        )
    return OwnData(_repeat_to(own, longest), num_ranks, rank, length / longest)


def share_inside_group(dataloader: Any, own: OwnData) -> None:
    """
    Has the ranks of a group alone share what a prepared data loader draws, where Accelerate has all ranks share it.

    Args:
        dataloader (`DataLoader`):
            Over the data of the group, prepared by Accelerate.
        own ([`OwnData`]):
            That data.

    Raises:
        ValueError: If the loader is not shared out in a way that is known.
    """
    shards = [
        shard
        for shard in (getattr(dataloader, "dataset", None), getattr(dataloader, "batch_sampler", None))
        if isinstance(shard, (BatchSamplerShard, IterableDatasetShard))
    ]
    if len(shards) != 1 or shards[0].split_batches:
        raise ValueError(
            "Data of a group's own needs a data loader that Accelerate shares out by batches. Leave split_batches and "
            "dispatch_batches off, and do not use train_sampling_strategy='batch_rebalance'."
        )
    shards[0].num_processes, shards[0].process_index = own.num_ranks, own.rank


def _look_ahead(stream: Any) -> Iterator[Any] | None:
    """A reading of a stream, of which no sample is lost, or `None` if it is empty: not every stream can be read again."""
    reading = iter(stream)
    for sample in reading:
        return chain([sample], reading)
    return None


def _own_files(dataset: Any, num_ranks: int, rank: int) -> tuple[Any, int, int]:
    """Whole files for each rank where there are enough of them: the stream, how many share it, and this rank among them."""
    if is_datasets_available():
        from datasets import IterableDataset as FileDataset

        if isinstance(dataset, FileDataset) and dataset.num_shards >= num_ranks:
            return dataset.shard(num_shards=num_ranks, index=rank), 1, 0
    return dataset, num_ranks, rank


def _repeat_to(dataset: Any, length: int) -> Any:
    if len(dataset) == length:
        return dataset
    indices = [index % len(dataset) for index in range(length)]
    return dataset.select(indices) if hasattr(dataset, "select") else Subset(dataset, indices)

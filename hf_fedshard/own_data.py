"""How the ranks of a group share the group's own data, in as many steps as every other group makes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import is_datasets_available
from torch.utils.data import IterableDataset, Subset

from .endless_stream import EndlessStream
from .group_data import GroupData, GroupStreams, wrong_number
from .handshake import agree


logger = logging.getLogger(__name__)

_EMPTY = "The dataset of group {group} is empty. Every group needs data of its own."


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
    opened: _Opened | None = None
    try:
        if data.num_groups != num_groups:
            raise ValueError(wrong_number(data, num_groups))
        opened = _open(data, group, num_ranks, rank)
    except Exception as problem:  # whatever it is, the other ranks must not be left waiting
        error = str(problem) if isinstance(problem, ValueError) else f"The data of group {group}: {problem!r}"
    agree("the groups' data", {"number of groups": data.num_groups}, error)
    assert opened is not None  # an error of any rank was raised by all
    lengths = _exchange_lengths(group, opened.length, num_groups)
    if opened.length is None:
        return OwnData(EndlessStream(opened.dataset, opened.begun), opened.num_ranks, opened.rank)
    longest = max(lengths)
    _warn_of_repetition(lengths, longest)
    return OwnData(_repeat_to(opened.dataset, longest), num_ranks, rank, opened.length / longest)


@dataclass(frozen=True)
class _Opened:
    """A group's dataset as this rank has found it: a stream with a reading that has begun, or one that has a length."""

    dataset: Any
    num_ranks: int
    rank: int
    begun: Iterator[Any] | None = None
    length: int | None = None


def _open(data: GroupData, group: int, num_ranks: int, rank: int) -> _Opened:
    """Opens the dataset of a group, without communication, and refuses an empty one."""
    own = data.of_group(group)
    streaming = isinstance(own, IterableDataset)
    if streaming != isinstance(data, GroupStreams):
        raise ValueError(
            f"The dataset of group {group} is {'a' if streaming else 'no'} streaming dataset: say so with "
            "group_dataset(..., streaming=...)."
        )
    if streaming:
        return _open_stream(data, own, group, num_ranks, rank)
    length = len(own)
    if length == 0:
        raise ValueError(_EMPTY.format(group=group))
    return _Opened(own, num_ranks, rank, length=length)


def _open_stream(data: GroupData, stream: Any, group: int, num_ranks: int, rank: int) -> _Opened:
    own = stream
    if not data.take_turns:
        own, num_ranks, rank = _own_files(own, num_ranks, rank)
    by_files = own is not stream
    begun = _look_ahead(own)
    if begun is None and by_files:
        raise ValueError(
            f"The stream of group {group} has files for each of its ranks, but those of this one hold no sample. Leave empty "
            "files out, give fewer files than ranks, so that each rank reads the whole stream and takes its turn, or "
            "split by a column with split_by_column, which does so."
        )
    if begun is None:
        raise ValueError(_EMPTY.format(group=group))
    # One whose order depends on the epoch is opened when that is known, and can be opened again.
    return _Opened(own, num_ranks, rank, begun=None if hasattr(own, "set_epoch") else begun)


def _exchange_lengths(group: int, length: int | None, num_groups: int) -> list[int]:
    """
    The lengths of all groups' datasets; of streams there are none. Collective over the world.

    Raises:
        ValueError: On every rank, if the ranks of a group hold different ones.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (group, length))
    sizes = [{size for member, size in everyone if member == index} for index in range(num_groups)]
    unequal = [f"group {index}: {sorted(found)}" for index, found in enumerate(sizes) if len(found) > 1]
    if unequal:
        raise ValueError(
            f"The ranks of one group hold datasets of different lengths ({'; '.join(unequal)}). All ranks of a group must be "
            "given the same dataset; it is shared among them."
        )
    return [next(iter(found)) for found in sizes]


def _warn_of_repetition(lengths: Sequence[int], longest: int) -> None:
    if dist.get_rank() == 0 and min(lengths) < longest:
        repeated = [
            f"group {index}: {size:,} samples, {longest / size:.3g} times" for index, size in enumerate(lengths)
        ]
        logger.warning(
            "The groups have unequal amounts of data. An epoch is one pass over the largest; in it the others draw theirs "
            "repeatedly. %s.",
            "; ".join(repeated),
        )


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

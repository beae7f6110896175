"""Training data: every rank draws its own, without a collective that crosses groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from accelerate.utils import is_datasets_available, synchronize_rng_states

from .handshake import agree


def refuse_dispatched_batches(dataloader: Any) -> None:
    """
    Refuses a loader whose rank 0 reads for everybody and sends each batch over the world, every step.

    Args:
        dataloader (`DataLoader`):
            A prepared data loader.

    Raises:
        ValueError: If it dispatches.
    """
    if isinstance(dataloader, DataLoaderDispatcher):
        raise ValueError(
            "dispatch_batches=True lets rank 0 read for all ranks and send every batch across the federation groups. Set "
            "dispatch_batches=False (DataLoaderConfiguration, or accelerator_config in TrainingArguments): each rank "
            "then reads its own part."
        )


def shared_seed(device: torch.device) -> int:
    """
    Rank 0's seed. Collective over the world.

    Args:
        device (`torch.device`):
            Where the collective runs.
    """
    seed = torch.tensor(torch.initial_seed() % 2**63, dtype=torch.int64, device=device)
    dist.broadcast(seed, src=0)
    return int(seed)


@contextlib.contextmanager
def one_seed(seed: int) -> Iterator[None]:
    """
    Lets what is made inside draw from one seed on all ranks, and leaves torch's random state as it was.

    Args:
        seed (`int`):
            From [`shared_seed`].
    """
    state = torch.random.get_rng_state()
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def draw_in_one_order(dataloader: Any, seed: int) -> torch.Generator | None:
    """
    Makes all ranks shuffle alike, whatever their own seeds are: each takes every so many batches of one order, and of
    different orders these would overlap.

    Args:
        dataloader (`DataLoader`):
            A prepared data loader.
        seed (`int`):
            From [`shared_seed`].

    Returns:
        `torch.Generator` or `None`: What the sampler draws from, where its orders do not depend on the epoch by
        themselves: seeded by `seed` and the epoch before each, a resumed run has the orders of an uninterrupted one.
    """
    sampler: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    sampler = getattr(sampler, "sampler", None)
    if isinstance(sampler, SeedableRandomSampler):
        # Equal already where the loader was made under `one_seed`, or with a `data_seed`. Adds the epoch by itself.
        sampler.initial_seed = seed
        return None
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler.generator


def keep_generators_in_step(dataloader: Any) -> None:
    """
    Replaces Accelerate's synchronisation of the sampler's generator at each epoch by a single one, now.

    With `use_seedable_sampler=False` the generator's state is broadcast over the world at each start of an epoch,
    which lies inside a round. Every rank draws the whole permutation from it, so generators that are equal once stay
    equal.

    Args:
        dataloader (`DataLoader`):
            A prepared data loader. Collective over the world where it has something to synchronise.

    Raises:
        ValueError: If the random states of torch or a device are to be synchronised too, since these do not stay equal
            by themselves.
    """
    kinds = [str(getattr(kind, "value", kind)) for kind in getattr(dataloader, "rng_types", None) or []]
    if not kinds:
        return
    if kinds != ["generator"]:
        raise ValueError(
            f"rng_types={kinds} would be synchronised over all federation groups at each start of an epoch, inside a "
            "round. Leave rng_types at its default."
        )
    synchronize_rng_states(dataloader.rng_types, dataloader.synchronized_generator)
    dataloader.rng_types = []


def endless_if_sharded_by_files(dataset: Any, num_processes: int, process_index: int) -> Any:
    """
    Makes a streaming dataset that Accelerate splits by files repeat without end.

    With at least as many files as ranks, `datasets.IterableDataset.shard` gives every rank whole files, and so unequal
    numbers of batches: a rank that ran out in the middle of an accumulation window would leave its group hanging.
    Repeating its own files, no rank runs out; a streaming run ends by `max_steps`. Other streams need nothing: each
    rank reads the whole stream and takes its turn, and all end together.

    Args:
        dataset (`Any`):
            A training dataset.
        num_processes (`int`):
            Number of ranks that draw different data.
        process_index (`int`):
            Which of them this one is.

    Returns:
        `Any`: The dataset, repeated or as it was. Collective over the world if repeated.

    Raises:
        ValueError: On every rank, if the files of one hold no example: it would look for one for ever.
    """
    if not is_datasets_available():
        return dataset
    from datasets import IterableDataset

    if not isinstance(dataset, IterableDataset) or dataset.num_shards < num_processes:
        return dataset
    own = dataset.shard(num_shards=num_processes, index=process_index)
    error = None
    try:
        empty = next(iter(own), None) is None
    except Exception as problem:  # whatever it is, the other ranks must not be left waiting
        empty, error = False, f"The stream of training data cannot be read: {problem!r}"
    if empty:
        error = (
            f"The stream's files for data rank {process_index} of {num_processes} hold no example. Leave empty files "
            "out, or give fewer files than ranks, so that each rank reads the whole stream and takes its turn."
        )
    agree("the stream of training data", {}, error)
    return dataset.repeat(None)

"""Training data: every rank draws its own, without a collective that crosses groups."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
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
    if next(iter(own), None) is None:
        error = (
            f"The stream's files for data rank {process_index} of {num_processes} hold no example. Leave empty files "
            "out, or give fewer files than ranks, so that each rank reads the whole stream and takes its turn."
        )
    agree("the stream of training data", {}, error)
    return dataset.repeat(None)

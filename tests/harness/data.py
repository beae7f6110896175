"""Deterministic tiny data sets, and the recording of which batches a rank really trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from .models import NUM_CLASSES, NUM_FEATURES, VOCAB_SIZE


IGNORED_LABEL = -100
Batch = dict[str, torch.Tensor]


def token_samples(
    num_samples: int, length: int = 12, uneven: bool = True, seed: int = 0
) -> list[dict[str, list[int]]]:
    """
    Token sequences with labels.

    Args:
        num_samples (`int`):
            Number of sequences.
        length (`int`, *optional*, defaults to 12):
            Tokens in a sequence.
        uneven (`bool`, *optional*, defaults to `True`):
            Whether the number of labels differs: from 1 to `length - 1` predicted tokens in a sequence. An average of
            means is then far from the mean over all tokens.
        seed (`int`, *optional*, defaults to 0):
            Seed.

    Returns:
        `list[dict[str, list[int]]]`: `input_ids` and `labels`.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (num_samples, length), generator=generator)
    first = torch.randint(1, length, (num_samples,), generator=generator) if uneven else torch.zeros(num_samples).int()
    samples = []
    for row, begin in zip(ids.tolist(), first.tolist(), strict=True):
        samples.append({"input_ids": row, "labels": [IGNORED_LABEL] * begin + row[begin:]})
    return samples


def feature_samples(num_samples: int, seed: int = 0) -> list[dict[str, Any]]:
    """
    Samples for [`TinyBatchNorm`].

    Args:
        num_samples (`int`):
            Number of samples.
        seed (`int`, *optional*, defaults to 0):
            Seed.

    Returns:
        `list[dict[str, Any]]`: `inputs` and `labels`.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
    return [{"inputs": row.tolist(), "labels": int(label)} for row, label in zip(inputs, labels, strict=True)]


def collate(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """
    Stacks samples of equal length.

    Args:
        samples (`Sequence[Mapping[str, Any]]`):
            Samples with the same keys.

    Returns:
        `dict[str, torch.Tensor]`: Tensors with a first dimension of `len(samples)`.
    """
    return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}


class ListDataset(Dataset[Mapping[str, Any]]):
    """
    A map-style data set.

    Args:
        samples (`Sequence[Mapping[str, Any]]`):
            The samples.
    """

    def __init__(self, samples: Sequence[Mapping[str, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.samples[index]


class StreamDataset(IterableDataset[Mapping[str, Any]]):
    """
    A streaming data set of torch, without a length.

    Args:
        samples (`Sequence[Mapping[str, Any]]`):
            The samples, in order.
    """

    def __init__(self, samples: Sequence[Mapping[str, Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.samples)


def hf_stream(samples: Sequence[Mapping[str, Any]], num_shards: int = 1) -> Any:
    """
    A streaming data set of `datasets`.

    Args:
        samples (`Sequence[Mapping[str, Any]]`):
            The samples, in order.
        num_shards (`int`, *optional*, defaults to 1):
            Shards that can be given to different ranks.

    Returns:
        `datasets.IterableDataset`: The data set.
    """
    from datasets import Dataset as TableDataset

    return TableDataset.from_list([dict(sample) for sample in samples]).to_iterable_dataset(num_shards=num_shards)


class BatchRecorder:
    """
    Keeps every batch that a model is trained on: what really arrived, whatever sampler, sharding or prefetching did.

    Args:
        model (`torch.nn.Module`):
            The model, before or after sharding. Calls in evaluation mode are not kept.
        keys (`Sequence[str]`, *optional*):
            Arguments to keep, passed by keyword.
    """

    def __init__(
        self, model: torch.nn.Module, keys: Sequence[str] = ("input_ids", "attention_mask", "inputs", "labels")
    ) -> None:
        self.batches: list[Batch] = []
        self._keys = frozenset(keys)
        self._handle = model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training:
            self.batches.append({key: kwargs[key].detach().cpu().clone() for key in kwargs if key in self._keys})

    def remove(self) -> None:
        """Ends the recording."""
        self._handle.remove()


def batches_by_step(
    recorded: Sequence[Sequence[Batch]], num_groups: int, accumulation_steps: int = 1
) -> list[list[list[list[Batch]]]]:
    """
    Arranges the batches of all ranks as [`train_reference`] takes them.

    Args:
        recorded (`Sequence[Sequence[Batch]]`):
            Batches of each rank in the order in which it drew them.
        num_groups (`int`):
            Federation groups, of contiguous ranks.
        accumulation_steps (`int`, *optional*, defaults to 1):
            Micro-batches in an optimizer step. The last step may have fewer.

    Returns:
        `list`: `[step][group][rank inside the group][micro-batch]`.
    """
    lengths = {len(batches) for batches in recorded}
    if len(lengths) != 1:
        raise ValueError(f"All ranks must have drawn equally often, got {[len(batches) for batches in recorded]}.")
    size, rest = divmod(len(recorded), num_groups)
    if rest:
        raise ValueError(f"{len(recorded)} ranks cannot be split into {num_groups} groups.")
    groups = [recorded[group * size : (group + 1) * size] for group in range(num_groups)]
    steps = range(0, lengths.pop(), accumulation_steps)
    return [[[list(rank[at : at + accumulation_steps]) for rank in group] for group in groups] for at in steps]

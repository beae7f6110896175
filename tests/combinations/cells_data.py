"""Cells: data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer

from tests.harness.data import IGNORED_LABEL, Batch, ListDataset, StreamDataset, hf_stream, token_samples

from .cell import Cell


def padded(samples: Sequence[Any]) -> Batch:
    length = max(len(sample["input_ids"]) for sample in samples)

    def rows(key: str, filling: int) -> torch.Tensor:
        return torch.tensor([[*sample[key], *[filling] * (length - len(sample[key]))] for sample in samples])

    ids = rows("input_ids", 0)
    return {"input_ids": ids, "labels": rows("labels", IGNORED_LABEL), "attention_mask": (ids != 0).long()}


def samples_of_many_lengths() -> Any:
    samples = [token_samples(1, length=4 + seed % 13, seed=seed)[0] for seed in range(120)]
    return ListDataset(samples)


def stream() -> Any:
    return StreamDataset(token_samples(240))


class SizedStream(StreamDataset):
    def __len__(self) -> int:
        return len(self.samples)


def sized_stream() -> Any:
    return SizedStream(token_samples(40))


def stream_of_datasets() -> Any:
    return hf_stream(token_samples(240), num_shards=2)


def table() -> Any:
    from datasets import Dataset

    return Dataset.from_list(token_samples(240))


class OwnLoader(Trainer):
    """Builds its loader by itself, as in Transformers' documentation."""

    def get_train_dataloader(self) -> Any:
        from torch.utils.data import DataLoader

        loader = DataLoader(self.train_dataset, batch_size=self._train_batch_size, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def own_loader() -> dict[str, Any]:
    return {"trainer_class": OwnLoader}


DATA_CELLS = [
    Cell(
        "group_by_length",
        "`train_sampling_strategy='group_by_length'`",
        {"train_sampling_strategy": "group_by_length"},
        data=samples_of_many_lengths,
        options=lambda: {"data_collator": padded},
        reference_args={"train_sampling_strategy": "sequential"},
    ),
    Cell("iterable dataset without length", "a torch `IterableDataset`", data=stream, fast=True),
    Cell("iterable dataset with length", "one with `__len__`", data=sized_stream),
    Cell("streaming dataset of datasets", "`to_iterable_dataset()`", data=stream_of_datasets),
    Cell("dataset of datasets", "`datasets.Dataset`", data=table),
    Cell("dataloader_num_workers", "`dataloader_num_workers=2`", {"dataloader_num_workers": 2}),
    Cell("a data loader of one's own", "overrides `get_train_dataloader`", options=own_loader),
]

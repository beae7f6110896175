"""Rows of a data set: loading and holding out."""

import re
from pathlib import Path
from typing import TypeAlias

from datasets import Dataset, IterableDataset, load_dataset

from recipe_arguments import SourceArguments


AnyDataset: TypeAlias = Dataset | IterableDataset

_LOADERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
_COMPRESSIONS = {".bz2", ".gz", ".xz", ".zst"}


def _load_file(path: str, streaming: bool) -> AnyDataset:
    """Loads one local file with the loader that its name asks for, whatever it is compressed with."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in _COMPRESSIONS]
    loader = _LOADERS.get(suffixes[-1]) if suffixes else None
    if loader is None:
        raise ValueError(f"{path} should end in one of {', '.join(_LOADERS)}, alone or compressed.")
    return load_dataset(loader, data_files={"train": path}, split="train", streaming=streaming)


def load_rows(args: SourceArguments, seed: int) -> tuple[AnyDataset, AnyDataset | None]:
    """
    Loads the rows to train on and those to evaluate on.

    Args:
        args (`SourceArguments`):
            Where the rows come from and which are held out.
        seed (`int`):
            Seed of a hold-out at random.

    Returns:
        `tuple[AnyDataset, AnyDataset | None]`: Training and evaluation rows; no evaluation rows if none are asked for.
    """

    def load_split(split: str) -> AnyDataset:
        return load_dataset(args.dataset_name, args.dataset_config_name, split=split, streaming=args.streaming)

    rows = load_split(args.train_split) if args.train_file is None else _load_file(args.train_file, args.streaming)
    if args.validation_file is not None:
        return rows, _load_file(args.validation_file, args.streaming)
    if args.validation_split is not None:
        return rows, load_split(args.validation_split)
    if args.validation_fraction is not None:
        assert isinstance(rows, Dataset), "SourceArguments refuses a fraction of a stream"
        parts = rows.train_test_split(test_size=args.validation_fraction, seed=seed)
        return parts["train"], parts["test"]
    if args.holdout_column is not None and args.holdout_pattern is not None:
        column, pattern = args.holdout_column, re.compile(args.holdout_pattern)
        held_out = rows.filter(lambda row: pattern.search(str(row[column])) is not None)
        kept = rows.filter(lambda row: pattern.search(str(row[column])) is None)
        return kept, held_out
    return rows, None

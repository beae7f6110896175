"""Texts to blocks of tokens: loading, holding out, tokenising and packing."""

import re
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from datasets import Dataset, IterableDataset, load_dataset
from transformers import PreTrainedTokenizerBase

from clm_arguments import DataArguments


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


def load_texts(args: DataArguments, seed: int) -> tuple[AnyDataset, AnyDataset | None]:
    """
    Loads the texts to train on and those to evaluate on.

    Args:
        args (`DataArguments`):
            Where the texts come from and which are held out.
        seed (`int`):
            Seed of a hold-out at random.

    Returns:
        `tuple[AnyDataset, AnyDataset | None]`: Training and evaluation texts; no evaluation texts if none are asked for.
    """

    def load_split(split: str) -> AnyDataset:
        return load_dataset(args.dataset_name, args.dataset_config_name, split=split, streaming=args.streaming)

    texts = load_split(args.train_split) if args.train_file is None else _load_file(args.train_file, args.streaming)
    if args.validation_file is not None:
        return texts, _load_file(args.validation_file, args.streaming)
    if args.validation_split is not None:
        return texts, load_split(args.validation_split)
    if args.validation_fraction is not None:
        assert isinstance(texts, Dataset), "DataArguments refuses a fraction of a stream"
        parts = texts.train_test_split(test_size=args.validation_fraction, seed=seed)
        return parts["train"], parts["test"]
    if args.holdout_column is not None and args.holdout_pattern is not None:
        column, pattern = args.holdout_column, re.compile(args.holdout_pattern)
        held_out = texts.filter(lambda row: pattern.search(str(row[column])) is not None)
        kept = texts.filter(lambda row: pattern.search(str(row[column])) is None)
        return kept, held_out
    return texts, None


def pack(texts: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, limit: int | None) -> AnyDataset:
    """
    Tokenises texts, joins them with the end-of-text token, and cuts them into blocks of equal length.

    What is left at the end of a batch of 1,000 texts and fills no block is dropped.

    Args:
        texts (`AnyDataset`):
            Texts, of any length.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer with an end-of-text token.
        args (`DataArguments`):
            Text column, block size and number of worker processes.
        limit (`int`, *optional*):
            Keep at most this many blocks.

    Returns:
        `AnyDataset`: Rows with one column, `input_ids`, of `block_size` tokens each.
    """
    block_size, text_column, end_of_text = args.block_size, args.text_column, tokenizer.eos_token_id

    def pack_batch(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # Not verbose, because a text may well be longer than the model's context: it is cut below.
        encoded = tokenizer(batch[text_column], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = list(chain.from_iterable((*ids, end_of_text) for ids in encoded))
        num_blocks = len(tokens) // block_size
        return {"input_ids": [tokens[i * block_size : (i + 1) * block_size] for i in range(num_blocks)]}

    # The only column, because a stream may not know the names of the others.
    texts = texts.select_columns(text_column)
    options: dict[str, Any] = {"batched": True, "remove_columns": [text_column]}
    if isinstance(texts, Dataset):
        options |= {"num_proc": args.preprocessing_num_workers, "desc": f"Packing blocks of {block_size} tokens"}
    blocks = texts.map(pack_batch, **options)
    if isinstance(blocks, Dataset) and len(blocks) == 0:
        raise ValueError(
            f"{len(texts)} texts fill no block of {block_size} tokens: check the hold-out and --block_size."
        )
    if limit is None or (isinstance(blocks, Dataset) and len(blocks) <= limit):
        return blocks
    return blocks.take(limit)


def collate_blocks(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """
    Makes a batch of blocks. Packed blocks hold no padding, so every token is a label.

    Args:
        rows (`list[dict[str, list[int]]]`):
            Rows of [`pack`].

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `labels`, both of shape (batch, block).
    """
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": input_ids, "labels": input_ids.clone()}

"""Texts to blocks of tokens: tokenising and packing."""

from itertools import chain
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from clm_arguments import DataArguments
from recipe_data import AnyDataset


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

"""The blocks of text that all runs of a study share."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from clm_arguments import DataArguments, ModelArguments
from clm_data import pack
from clm_tokenizer import load_tokenizer
from recipe_data import load_rows


@dataclass
class StudyData:
    """
    The blocks of all runs, prepared once.

    Args:
        train (`torch.Tensor`):
            Tokens of shape (blocks, block), int64.
        evaluation (`torch.Tensor`):
            Held-out tokens of the same shape.
        vocab_size (`int`):
            Tokens of the tokenizer.
    """

    train: torch.Tensor
    evaluation: torch.Tensor
    vocab_size: int


def prepare(model: ModelArguments, data: DataArguments, seed: int) -> StudyData:
    """
    Loads, tokenises and packs the texts as `pretrain_clm.py` does. Of the held-out blocks `--max_eval_blocks` are taken at
    equal distances, so that all held-out texts are among them, and every run is evaluated on the same ones.

    Args:
        model (`ModelArguments`):
            The tokenizer.
        data (`DataArguments`):
            The texts.
        seed (`int`):
            Of a hold-out at random.

    Raises:
        ValueError: If there is nothing to evaluate on.
    """
    train_texts, eval_texts = load_rows(data, seed)
    if eval_texts is None:
        raise ValueError("A study compares losses on held-out texts: give --holdout_column or --validation_file.")
    tokenizer = load_tokenizer(model, train_texts, data.text_column, data.block_size)
    train, held_out = (
        pack(texts, tokenizer, data, limit=None).with_format("torch")[:]["input_ids"]
        for texts in (train_texts, eval_texts)
    )
    number = min(data.max_eval_blocks or len(held_out), len(held_out))
    chosen = torch.arange(number) * len(held_out) // number
    return StudyData(train, held_out[chosen], len(tokenizer))


def batches(blocks: torch.Tensor, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """
    Blocks in random order, epoch after epoch without end.

    Args:
        blocks (`torch.Tensor`):
            Of shape (blocks, block).
        batch_size (`int`):
            Blocks in a batch.
        seed (`int`):
            Of the order.

    Returns:
        `Iterator[torch.Tensor]`: Batches of shape (batch, block). What is left of an epoch and fills none is dropped.
    """
    if len(blocks) < batch_size:
        raise ValueError(f"{len(blocks)} blocks are fewer than the {batch_size} of one step.")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        for start in range(0, len(blocks) - batch_size + 1, batch_size):
            yield blocks[order[start : start + batch_size]]

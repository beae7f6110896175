"""What is trained in every measurement: a Llama-style model of 5.3M parameters on real text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn


if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "recipes" / "data" / "sotu.jsonl.xz"


@dataclass(frozen=True)
class Workload:
    """
    Model and batch of a measurement.

    Args:
        hidden_size (`int`, defaults to `256`):
            Width of the model.
        num_layers (`int`, defaults to `6`):
            Its layers.
        intermediate_size (`int`, defaults to `672`):
            Width of its MLPs.
        num_heads (`int`, defaults to `8`):
            Query heads; half as many key-value heads.
        vocab_size (`int`, defaults to `2048`):
            Tokens in the vocabulary.
        batch_size (`int`, defaults to `2`):
            Sequences of a rank in a step.
        block_size (`int`, defaults to `128`):
            Tokens in a sequence.
        sync_every (`int`, defaults to `8`):
            H, steps in a round.
        learning_rate (`float`, defaults to `1e-3`):
            Of AdamW.
        num_eval_blocks (`int`, defaults to `64`):
            Held-out sequences.
        seed (`int`, defaults to `0`):
            Of the weights and the order of the data.
    """

    hidden_size: int = 256
    num_layers: int = 6
    intermediate_size: int = 672
    num_heads: int = 8
    vocab_size: int = 2048
    batch_size: int = 2
    block_size: int = 128
    sync_every: int = 8
    learning_rate: float = 1e-3
    num_eval_blocks: int = 64
    seed: int = 0

    @property
    def step_tokens(self) -> int:
        """Tokens of one rank in one step."""
        return self.batch_size * self.block_size


@dataclass(frozen=True)
class Blocks:
    """
    The corpus as token numbers.

    Args:
        train (`torch.Tensor`):
            int32, of shape (sequences, block).
        evaluation (`torch.Tensor`):
            int32, of shape (sequences, block): years that end in 7.
    """

    train: torch.Tensor
    evaluation: torch.Tensor


def make_model(workload: Workload) -> PreTrainedModel:
    """
    Makes the model, with the same weights at every call.

    Args:
        workload ([`Workload`]):
            Its sizes.

    Returns:
        `PreTrainedModel`: A `LlamaForCausalLM` in fp32.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        intermediate_size=workload.intermediate_size,
        num_hidden_layers=workload.num_layers,
        num_attention_heads=workload.num_heads,
        num_key_value_heads=max(workload.num_heads // 2, 1),
        max_position_embeddings=workload.block_size,
        tie_word_embeddings=False,
        use_cache=False,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(workload.seed)
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.random.set_rng_state(state)


def make_optimizer(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """
    Makes the inner optimizer, the same for all variants.

    Args:
        model (`nn.Module`):
            The model, sharded if it is to be.
        workload ([`Workload`]):
            The learning rate.

    Returns:
        `torch.optim.Optimizer`: AdamW.
    """
    return torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def prepare_blocks(workload: Workload, file: Path) -> None:
    """
    Tokenises the corpus with the recipes' code, once; later calls find the file.

    Args:
        workload ([`Workload`]):
            Vocabulary and block.
        file (`Path`):
            Where the blocks go.
    """
    if file.exists():
        return
    from clm_arguments import DataArguments, ModelArguments
    from clm_data import pack
    from clm_tokenizer import load_tokenizer
    from recipe_data import load_rows

    data = DataArguments(
        train_file=str(CORPUS), holdout_column="year", holdout_pattern="7$", block_size=workload.block_size
    )
    train, evaluation = load_rows(data, seed=workload.seed)
    assert evaluation is not None, "a hold-out was asked for"
    model = ModelArguments(config_name="unused", train_tokenizer=True, vocab_size=workload.vocab_size)
    tokenizer = load_tokenizer(model, train, data.text_column, workload.block_size)
    blocks: dict[str, Any] = {
        name: torch.tensor(list(pack(rows, tokenizer, data, limit=None)["input_ids"]), dtype=torch.int32)
        for name, rows in (("train", train), ("evaluation", evaluation))
    }
    order = torch.Generator().manual_seed(workload.seed)
    blocks["train"] = blocks["train"][torch.randperm(len(blocks["train"]), generator=order)]
    aside = file.with_suffix(".tmp")
    torch.save(blocks, aside)
    aside.rename(file)


def load_blocks(file: Path, workload: Workload) -> Blocks:
    """
    Args:
        file (`Path`):
            From [`prepare_blocks`].
        workload ([`Workload`]):
            How much is held out.

    Returns:
        [`Blocks`]: The corpus.
    """
    blocks = torch.load(file)
    return Blocks(blocks["train"], blocks["evaluation"][: workload.num_eval_blocks])


class Batches:
    """
    The batches of one rank: every rank of the world reads other sequences, as in a prepared data loader.

    Args:
        blocks (`torch.Tensor`):
            Sequences of the world, of shape (sequences, block).
        workload ([`Workload`]):
            Size of a batch.
        rank (`int`):
            This rank.
        world_size (`int`):
            All ranks.
    """

    def __init__(self, blocks: torch.Tensor, workload: Workload, rank: int, world_size: int) -> None:
        self.blocks = blocks
        self.batch_size = workload.batch_size
        self.rank = rank
        self.world_size = world_size
        self.step = 0

    def next(self) -> torch.Tensor:
        """
        Returns:
            `torch.Tensor`: int64, of shape (batch, block). Goes round at the end of the corpus.
        """
        first = (self.step * self.world_size + self.rank) * self.batch_size
        self.step += 1
        rows = torch.arange(first, first + self.batch_size) % len(self.blocks)
        return self.blocks[rows].long()

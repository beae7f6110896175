"""What one cell of the matrix of combinations is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tests.harness.data import ListDataset, token_samples
from tests.harness.models import tiny_llama


NUM_GROUPS = 2
Arguments = Mapping[str, Any]


def even_samples() -> Any:
    return ListDataset(token_samples(240, uneven=False))


def uneven_samples() -> Any:
    return ListDataset(token_samples(240))


@dataclass(frozen=True)
class Cell:
    """
    Something that users combine with a federation, as a change of a tiny Trainer run.

    Args:
        name (`str`):
            Name of the row in `docs/combinations.md`, and of the test.
        how (`str`):
            What a user writes, for the table.
        args (`dict`, *optional*):
            Arguments of `TrainingArguments`.
        launch (`dict`, *optional*):
            Arguments of [`fsdp_launch_env`].
        inner (`dict[str, int]`, *optional*):
            Sizes of further axes inside a replica: `tp`, `cp`. `dp_shard` may be overridden too.
        model (`Callable`, *optional*):
            Makes the model, always with the same weights.
        data (`Callable`, *optional*):
            Makes the training data. The reference is given the batches that were drawn from it.
        options (`Callable[[], dict]`, *optional*):
            Makes further arguments of Trainer; `trainer_class` and `callbacks` among them.
        check (`Callable[[Trainer], None]`, *optional*):
            Asserts on the trained, federated Trainer that the option is in force.
        train (`Callable[[Trainer], Any]`, *optional*):
            In place of `trainer.train()`, for both sides.
        reference_args (`dict`, *optional*):
            Arguments of `TrainingArguments` that differ for the reference.
        after (`Callable[[Trainer], dict]`, *optional*):
            Called after training. A single process that holds the final weights must get the same numbers.
        mend (`Callable[[Trainer], None]`, *optional*):
            Puts right for the reference what this package does differently from a stock launch of a group.
        steps (`int`, defaults to `5`):
            Optimizer steps.
        sync_every (`int`, defaults to `2`):
            Steps in a round.
        tolerance (`float`, defaults to `0.0`):
            Largest difference of a weight. Zero: the same bits.
        needs (`tuple[str, ...]`, *optional*):
            Packages without which the cell is skipped.
        error (`str`, *optional*):
            Part of the message with which the federated run stops at start.
        stock_error (`str`, *optional*):
            Part of the message with which the same script stops without the callback.
        limit (`str`, *optional*):
            For the table: why it is an error, or what has to be known.
        fast (`bool`, defaults to `False`):
            Whether it belongs to the tests that take seconds, with FL+FSDP.
        sizes (`tuple[int, ...]`, defaults to `(4, 8)`):
            Ranks of FL+FSDP and of FL+HSDP.
    """

    name: str
    how: str
    args: Arguments = field(default_factory=dict)
    launch: Arguments = field(default_factory=dict)
    inner: Mapping[str, int] = field(default_factory=dict)
    model: Callable[[], nn.Module] = tiny_llama
    data: Callable[[], Any] = uneven_samples
    options: Callable[[], dict[str, Any]] = dict
    check: Callable[[Any], None] | None = None
    train: Callable[[Any], Any] | None = None
    reference_args: Arguments = field(default_factory=dict)
    after: Callable[[Any], dict[str, Any]] | None = None
    mend: Callable[[Any], None] | None = None
    steps: int = 5
    sync_every: int = 2
    tolerance: float = 0.0
    needs: tuple[str, ...] = ()
    error: str | None = None
    stock_error: str | None = None
    limit: str = ""
    fast: bool = False
    sizes: tuple[int, ...] = (4, 8)

"""Curves of the loss on held-out text, and what is read off them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .statistics import Mean, mean


@dataclass(frozen=True)
class Curve:
    """
    Loss on held-out text of one variant.

    Args:
        variant (`str`):
            Name.
        steps (`list[int]`):
            Optimizer steps, from 0.
        tokens (`list[int]`):
            Of all ranks together.
        losses (`list[float]`):
            In nats a token, the mean over the runs.
        seeds (`list[int]`):
            Of each run.
        runs (`list[list[float]]`):
            Losses of each.
        num_averagings (`int`, *optional*):
            Rounds whose average was in the last model.
    """

    variant: str
    steps: list[int]
    tokens: list[int]
    losses: list[float]
    seeds: list[int]
    runs: list[list[float]]
    num_averagings: int | None

    def after(self, tokens: float) -> Mean | None:
        """
        Args:
            tokens (`float`):
                Of all ranks together.

        Returns:
            [`Mean`] or `None`: The loss there; `None` outside of the curve.
        """
        found = [interpolate(self.tokens, run, tokens) for run in self.runs]
        return None if None in found else mean([loss for loss in found if loss is not None])

    def last(self) -> Mean:
        """The loss after all steps."""
        return mean([run[-1] for run in self.runs])


def curve_of(variant: str, records: Sequence[Mapping[str, Any]]) -> Curve:
    """
    Args:
        variant (`str`):
            Name.
        records (`Sequence[Mapping[str, Any]]`):
            Its runs, the newest last; of those that were evaluated after other steps none is taken, and of a seed the newest.

    Returns:
        [`Curve`]: Of all seeds.
    """
    newest = records[-1]
    runs = {record["seed"]: record["losses"] for record in records if record["steps"] == newest["steps"]}
    seeds = sorted(runs)
    return Curve(
        variant,
        newest["steps"],
        [step * newest["step_tokens"] for step in newest["steps"]],
        [mean(losses).value for losses in zip(*runs.values(), strict=True)],
        seeds,
        [runs[seed] for seed in seeds],
        newest["num_averagings"],
    )


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """
    Args:
        xs (`Sequence[float]`):
            Rising.
        ys (`Sequence[float]`):
            As many.
        x (`float`):
            Where.

    Returns:
        `float` or `None`: On the line through the points around `x`; `None` outside of them.
    """
    for index in range(len(xs) - 1):
        if xs[index] <= x <= xs[index + 1]:
            part = (x - xs[index]) / (xs[index + 1] - xs[index])
            return ys[index] + part * (ys[index + 1] - ys[index])
    return None


def first_reached(xs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """
    Args:
        xs (`Sequence[float]`):
            Rising: steps, seconds or tokens.
        losses (`Sequence[float]`):
            As many.
        target (`float`):
            A loss.

    Returns:
        `float` or `None`: Where the curve first comes down to the target; `None` if it does not.
    """
    for index, loss in enumerate(losses):
        if loss <= target:
            if index == 0:
                return xs[0]
            part = (losses[index - 1] - target) / (losses[index - 1] - loss)
            return xs[index - 1] + part * (xs[index] - xs[index - 1])
    return None

"""Medians, quartiles, ratios inside one run, and what theory allows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .variants import CEILING


FP32_BYTES = 4


@dataclass(frozen=True)
class Spread:
    """
    A median and its quartiles.

    Args:
        median (`float`):
            Median.
        low (`float`):
            First quartile.
        high (`float`):
            Third quartile.
        count (`int`):
            How many values there are.
    """

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """
    Args:
        values (`Iterable[float]`):
            Any number.

    Returns:
        [`Spread`] or `None`: `None` without values.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    if len(ordered) == 1:
        return Spread(ordered[0], ordered[0], ordered[0], 1)
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(median, low, high, len(ordered))


@dataclass(frozen=True)
class Mean:
    """
    A mean over runs with other seeds.

    Args:
        value (`float`):
            Mean.
        error (`float`, *optional*):
            Its standard error; `None` of a single run, which tells nothing of it.
        count (`int`):
            How many runs.
    """

    value: float
    error: float | None
    count: int


def mean(values: Sequence[float]) -> Mean:
    """
    Args:
        values (`Sequence[float]`):
            At least one.

    Returns:
        [`Mean`]: With the standard error from the sample's standard deviation.
    """
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Mean(statistics.mean(values), error, len(values))


def select(turns: Iterable[Mapping[str, Any]], shape: str, rate: int, variant: str) -> list[Mapping[str, Any]]:
    """
    Args:
        turns (`Iterable[Mapping[str, Any]]`):
            Records of turns.
        shape (`str`):
            Shape of the world.
        rate (`int`):
            Mbit/s.
        variant (`str`):
            Name.

    Returns:
        `list[Mapping[str, Any]]`: The turns of one variant in one block.
    """
    wanted = (shape, rate, variant)
    return [turn for turn in turns if (turn["shape"], turn["rate"], turn["variant"]) == wanted]


def speed(turn: Mapping[str, Any]) -> float:
    """Tokens a second in a turn: all of its rounds together, which have equally many tokens each."""
    return statistics.harmonic_mean(turn["tokens_per_second"])


def shares_of_ceiling(turns: Sequence[Mapping[str, Any]], ceilings: Sequence[Mapping[str, Any]]) -> list[float]:
    """
    What a variant reaches of the ceiling, turn by turn. Each turn is compared with the ceiling's turns before and after it
    in the same session, because the machine drifts.

    Args:
        turns (`Sequence[Mapping[str, Any]]`):
            Of the variant.
        ceilings (`Sequence[Mapping[str, Any]]`):
            Of the ceiling in the same block.

    Returns:
        `list[float]`: For each turn that has a ceiling.
    """
    shares = []
    for turn in turns:
        near = [
            speed(ceiling)
            for ceiling in ceilings
            if ceiling["session"] == turn["session"] and ceiling["cycle"] - turn["cycle"] in (0, 1)
        ]
        if near:
            shares.append(speed(turn) / statistics.mean(near))
    return shares


def ratios(turns: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[float]:
    """
    How many times as fast one variant is as another: cycle by cycle of one session.

    Args:
        turns (`Sequence[Mapping[str, Any]]`):
            Of the one.
        others (`Sequence[Mapping[str, Any]]`):
            Of the other.

    Returns:
        `list[float]`: For each cycle in which both had a turn.
    """
    by_cycle = {(turn["session"], turn["cycle"]): speed(turn) for turn in others}
    return [
        speed(turn) / by_cycle[turn["session"], turn["cycle"]]
        for turn in turns
        if (turn["session"], turn["cycle"]) in by_cycle
    ]


def bytes_of_round(turns: Sequence[Mapping[str, Any]]) -> float | None:
    """Bytes over the link in its busier direction in one round; `None` where nothing was counted."""
    rounds = sum(turn["num_link_rounds"] for turn in turns)
    total = sum(turn["link_bytes"] for turn in turns)
    return total / rounds if total else None


def ring_bound_bytes(num_parameters: int, num_groups: int = 2) -> float:
    """
    The least that one node sends over the link for an average of the whole model in fp32: a ring all-reduce of N bytes among
    P peers sends 2 N (P - 1) / P from each.

    Args:
        num_parameters (`int`):
            Of the model.
        num_groups (`int`, *optional*, defaults to 2):
            Groups, one a node.
    """
    return 2 * FP32_BYTES * num_parameters * (num_groups - 1) / num_groups


def wire_seconds(num_bytes: float, rate: int) -> float:
    """
    Args:
        num_bytes (`float`):
            Bytes in one direction.
        rate (`int`):
            Mbit/s.

    Returns:
        `float`: How long they take at least.
    """
    return num_bytes * 8 / (rate * 1e6)


def blocking_bound(ceiling: float, round_tokens: float, num_bytes: float, rate: int) -> float:
    """
    Tokens a second of a round that computes at the ceiling's speed, then waits for the wire.

    Args:
        ceiling (`float`):
            Tokens a second of the ceiling.
        round_tokens (`float`):
            Tokens of all ranks in a round.
        num_bytes (`float`):
            Bytes of an averaging in one direction.
        rate (`int`):
            Mbit/s.
    """
    return ceiling / (1 + wire_seconds(num_bytes, rate) * ceiling / round_tokens)


def blocks_of(turns: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """The shapes and rates of which a ceiling was measured, in order."""
    return sorted({(turn["shape"], turn["rate"]) for turn in turns if turn["variant"] == CEILING})

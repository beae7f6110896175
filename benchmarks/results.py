"""What the records of an output folder say, summed up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .records import EVALUATED, Records
from .statistics import (
    Mean,
    Spread,
    blocking_bound,
    blocks_of,
    bytes_of_round,
    first_reached,
    interpolate,
    mean,
    ratios,
    ring_bound_bytes,
    select,
    shares_of_ceiling,
    spread,
    wire_seconds,
)
from .variants import CEILING, SHAPES, VARIANTS
from .workload import Workload


NUM_NODES = 2


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


class Results:
    """
    Everything that was measured for an output folder.

    Args:
        folder (`Path`):
            The folder.
    """

    def __init__(self, folder: Path) -> None:
        records = Records(folder)
        self.workload = Workload(**json.loads((folder / "workload.json").read_text()))
        self.num_parameters: int = json.loads((folder / "model.json").read_text())["num_parameters"]
        self.turns = records.read("turns")
        self.sessions = records.read("sessions")
        self.memory = {(row["shape"], row["variant"]): row["peak_bytes"] for row in records.read("memory")}
        self.own_time = {row["way"]: row["shares"] for row in records.read("own_time")}
        self.failures = {row["variant"]: row["problem"].strip().splitlines()[-1] for row in records.read("failures")}
        self.unavailable = {row["variant"]: row["reason"] for row in records.read("unavailable")}
        measured = {turn["variant"] for turn in self.turns}
        self.unavailable = {name: reason for name, reason in self.unavailable.items() if name not in measured}
        learned: dict[str, list[dict[str, Any]]] = {}
        for row in records.learning_runs():
            learned.setdefault(row["variant"], []).append(row)
        self.curves = {name: curve_of(name, rows) for name, rows in learned.items()}

    @property
    def bound_bytes(self) -> float:
        """The least that an averaging in fp32 sends in one direction."""
        return ring_bound_bytes(self.num_parameters, NUM_NODES)

    def step_tokens(self, shape: str) -> int:
        """Tokens of all ranks in one step."""
        return NUM_NODES * SHAPES[shape] * self.workload.step_tokens

    def of(self, shape: str, rate: int, variant: str) -> list[Mapping[str, Any]]:
        """The turns of one variant in one block."""
        return select(self.turns, shape, rate, variant)

    def speed(self, shape: str, rate: int, variant: str) -> Spread | None:
        """Tokens a second of all ranks together, over rounds."""
        return spread(value for turn in self.of(shape, rate, variant) for value in turn["tokens_per_second"])

    def share(self, shape: str, rate: int, variant: str) -> Spread | None:
        """Of the ceiling, over turns."""
        return spread(shares_of_ceiling(self.of(shape, rate, variant), self.of(shape, rate, CEILING)))

    def ratio(self, shape: str, rate: int, variant: str, other: str) -> Spread | None:
        """How many times as fast as another, over turns."""
        return spread(ratios(self.of(shape, rate, variant), self.of(shape, rate, other)))

    def link_bytes(self, shape: str, rate: int, variant: str) -> float | None:
        """Of one round in the busier direction."""
        return bytes_of_round(self.of(shape, rate, variant))

    def border_seconds(self, shape: str, rate: int, variant: str) -> Spread | None:
        """Of one averaging."""
        return spread(value for turn in self.of(shape, rate, variant) for value in turn["border_seconds"])

    def standstill_seconds(self, shape: str, rate: int, variant: str) -> Spread | None:
        """How long the steps of one round stood still for averaging; `None` of turns that were measured before it was noted."""
        turns = self.of(shape, rate, variant)
        return spread(value for turn in turns for value in turn.get("standstill_seconds", ()))

    def blocking_efficiency(self, shape: str, rate: int, variant: str) -> float | None:
        """Tokens a second over those of a round that computes at the ceiling's speed and then waits for the wire."""
        share, sent = self.share(shape, rate, variant), self.link_bytes(shape, rate, variant)
        ceiling = self.speed(shape, rate, CEILING)
        if share is None or sent is None or ceiling is None or rate == 0:
            return None
        round_tokens = self.step_tokens(shape) * self.workload.sync_every
        bound = blocking_bound(ceiling.median, round_tokens, sent, rate)
        return share.median * ceiling.median / bound

    def seconds_to_loss(self, rate: int, variant: str, loss: float, shape: str = "2x2") -> float | None:
        """When a variant comes down to a loss at a rate: steps of its curve, at its measured speed."""
        speed, curve = self.speed(shape, rate, variant), self.curves.get(variant)
        if speed is None or curve is None:
            return None
        tokens = first_reached(curve.tokens, curve.losses, loss)
        return None if tokens is None else tokens / speed.median

    def rows(self, shape: str, rate: int) -> list[dict[str, Any]]:
        """The variants of one block with all figures, fit for JSON."""
        rows = []
        for name, variant in VARIANTS.items():
            speed = self.speed(shape, rate, name)
            if speed is None:
                continue
            sent, border = self.link_bytes(shape, rate, name), self.border_seconds(shape, rate, name)
            averages = not variant.is_synchronous and name != CEILING
            blocking = averages and not variant.overlapped
            stood = self.standstill_seconds(shape, rate, name) if averages else None
            rows.append(
                {
                    "variant": name,
                    "label": variant.label,
                    "num_steps": self.of(shape, rate, name)[-1]["num_steps"],
                    "tokens_per_second": asdict(speed),
                    "share_of_ceiling": _as_dict(self.share(shape, rate, name)) if name != CEILING else None,
                    "link_bytes": sent,
                    "bytes_over_bound": sent / self.bound_bytes if sent and not variant.is_synchronous else None,
                    "border_seconds": _as_dict(border) if blocking else None,
                    "standstill_seconds": _as_dict(stood),
                    "wire_seconds": wire_seconds(sent, rate) if sent and rate and blocking else None,
                    "peak_bytes": self.memory.get((shape, name)),
                }
            )
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Everything, fit for JSON."""
        return {
            "workload": asdict(self.workload),
            "num_parameters": self.num_parameters,
            "ring_bound_bytes": self.bound_bytes,
            "sessions": self.sessions,
            "loads": [turn["load"] for turn in self.turns],
            "blocks": [
                {"shape": shape, "rate": rate, "rows": self.rows(shape, rate)} for shape, rate in blocks_of(self.turns)
            ],
            "evaluated": EVALUATED,
            "learning": learning_rows(self),
            "curves": [asdict(curve) for curve in self.curves.values()],
            "own_time": {way: _as_dict(spread(shares)) for way, shares in self.own_time.items()},
            "unavailable": self.unavailable,
            "failures": self.failures,
        }


def learning_rows(results: Results) -> list[dict[str, Any]]:
    """
    Loss after equal tokens and after equal seconds.

    Args:
        results ([`Results`]):
            What was measured.

    Returns:
        `list[dict[str, Any]]`: For each variant of the learning part; seconds by rate.
    """
    if not results.curves:
        return []
    tokens = min(curve.tokens[-1] for curve in results.curves.values())
    rates = [rate for shape, rate in blocks_of(results.turns) if shape == "2x2"]
    seconds = {rate: _common_seconds(results, rate) for rate in rates}
    rows = []
    for name, curve in results.curves.items():
        after_seconds = {}
        for rate in rates:
            speed, limit = results.speed("2x2", rate, name), seconds[rate]
            if speed is not None and limit is not None:
                after_seconds[str(rate)] = _as_dict(curve.after(limit * speed.median))
        rows.append(
            {
                "variant": name,
                "label": VARIANTS[name].label,
                "tokens": tokens,
                "loss_after_tokens": _as_dict(curve.after(tokens)),
                "seconds": {str(rate): limit for rate, limit in seconds.items()},
                "loss_after_seconds": after_seconds,
                "steps": curve.steps[-1],
                "last_loss": asdict(curve.last()),
                "num_averagings": curve.num_averagings,
                "delayed": VARIANTS[name].overlapped,
            }
        )
    return rows


def _common_seconds(results: Results, rate: int) -> float | None:
    """How long the shortest of the curves lasts at a rate."""
    lengths = [
        curve.tokens[-1] / speed.median
        for name, curve in results.curves.items()
        if (speed := results.speed("2x2", rate, name)) is not None
    ]
    return min(lengths, default=None)


def _as_dict(values: Spread | Mean | None) -> dict[str, float] | None:
    return None if values is None else asdict(values)


def best(results: Results, shape: str, rate: int, names: Sequence[str]) -> str | None:
    """
    Args:
        results ([`Results`]):
            What was measured.
        shape (`str`):
            Shape of the world.
        rate (`int`):
            Mbit/s.
        names (`Sequence[str]`):
            Variants.

    Returns:
        `str` or `None`: The one with the largest share of the ceiling; `None` if none was measured.
    """
    shares = {name: share.median for name in names if (share := results.share(shape, rate, name)) is not None}
    return max(shares, key=shares.__getitem__, default=None)

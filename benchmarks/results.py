"""What the records of an output folder say, summed up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .curves import curve_of, first_reached
from .records import Records
from .statistics import (
    Spread,
    blocking_bound,
    bytes_of_round,
    ratios,
    ring_bound_bytes,
    select,
    shares_of_ceiling,
    spread,
)
from .variants import CEILING, SHAPES
from .workload import Workload


NUM_NODES = 2


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
        self.saving: dict[str, list[list[float]]] = {
            way: [save for row in records.read("saving") for save in row[way]] for way in ("ours", "stock")
        }
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

    def saving_ratio(self) -> Spread | None:
        """Seconds that a byte of our checkpoints takes, over those of the save of Accelerate's right before each."""
        a_byte = {way: [seconds / num_bytes for seconds, num_bytes in saves] for way, saves in self.saving.items()}
        return spread(ours / stock for ours, stock in zip(a_byte["ours"], a_byte["stock"], strict=True))

    def seconds_to_loss(self, rate: int, variant: str, loss: float, shape: str = "2x2") -> float | None:
        """When a variant comes down to a loss at a rate: steps of its curve, at its measured speed."""
        speed, curve = self.speed(shape, rate, variant), self.curves.get(variant)
        if speed is None or curve is None:
            return None
        tokens = first_reached(curve.tokens, curve.losses, loss)
        return None if tokens is None else tokens / speed.median


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

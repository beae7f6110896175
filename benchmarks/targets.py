"""The targets: ratios inside one run, each with what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .results import Results, best
from .statistics import spread
from .variants import VARIANTS


OVERLAPPED = [name for name, variant in VARIANTS.items() if variant.overlapped]
OURS = [name for name, variant in VARIANTS.items() if variant.kind == "ours"]
FP32_OVERLAPPED = [name for name in OVERLAPPED if "wire_format" not in VARIANTS[name].settings]
SLOW = 50
Measured = tuple[float, str] | None
"""A figure and how it came about; `None` where it was not measured."""


@dataclass(frozen=True)
class Target:
    """
    A target.

    Args:
        what (`str`):
            The figure.
        limit (`float`):
            What it has to reach, or must not exceed.
        at_least (`bool`):
            Whether it is a lower limit.
        unit (`str`):
            `"%"`, `"x"` or nothing.
        measure (`Callable[[Results], Measured]`):
            Finds the figure.
        options (`str`):
            Of the command that measures it.
    """

    what: str
    limit: float
    at_least: bool
    unit: str
    measure: Callable[[Results], Measured]
    options: str

    def row(self, results: Results) -> dict[str, Any]:
        """The target with its figure, fit for JSON."""
        measured = self.measure(results)
        value, how = measured if measured is not None else (None, "")
        reached = None if value is None else (value >= self.limit if self.at_least else value <= self.limit)
        return {
            "what": self.what,
            "limit": self.limit,
            "at_least": self.at_least,
            "unit": self.unit,
            "value": value,
            "variant": how,
            "reached": reached,
            "options": self.options,
        }


def _share(rate: int, names: list[str]) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        name = best(results, "2x2", rate, names)
        share = None if name is None else results.share("2x2", rate, name)
        return None if share is None or name is None else (100 * share.median, name)

    return measure


def _ratio(shape: str, other: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        name = best(results, shape, SLOW, OURS)
        ratio = None if name is None else results.ratio(shape, SLOW, name, other)
        return None if ratio is None or name is None else (ratio.median, f"{name} / {other}")

    return measure


def _bytes(shape: str, name: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        sent = results.link_bytes(shape, SLOW, name)
        return None if sent is None else (sent / results.bound_bytes, f"{sent / 1e6:.2f} MB")

    return measure


def _blocking(name: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        value = results.blocking_efficiency("2x2", SLOW, name)
        return None if value is None else (value, name)

    return measure


def _time_to_loss(results: Results) -> Measured:
    baseline = results.curves.get("fsdp")
    speed = results.speed("2x2", SLOW, "fsdp")
    name = best(results, "2x2", SLOW, [name for name in OURS if name in results.curves])
    if baseline is None or speed is None or name is None:
        return None
    ours = results.seconds_to_loss(SLOW, name, baseline.losses[-1])
    theirs = baseline.tokens[-1] / speed.median
    if ours is None:
        return 0.0, f"{name} has not reached {baseline.losses[-1]:.3f}"
    return theirs / ours, f"{name}: {ours:.0f} s, fsdp: {theirs:.0f} s to loss {baseline.losses[-1]:.3f}"


def _excess_loss(name: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        ours, reference = results.curves.get(name), results.curves.get("fp32")
        if ours is None or reference is None or ours.steps != reference.steps:
            return None
        excess = 100 * (ours.losses[-1] / reference.losses[-1] - 1)
        return excess, f"{ours.losses[-1]:.4f} / {reference.losses[-1]:.4f} after {ours.steps[-1]} steps"

    return measure


def _own_time(way: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        shares = spread(results.own_time.get(way, ()))
        return None if shares is None else (100 * shares.median, f"median of {shares.count} steps")

    return measure


_AT_50 = "--parts turns report --shapes 2x2 --rates 50"
_LEARNING = "--parts turns learning report --shapes 2x2 --rates 50"
TARGETS = (
    Target(
        "FL+FSDP, best format, overlapped, 50 Mbit/s: share of the ceiling",
        95,
        True,
        "%",
        _share(50, OVERLAPPED),
        _AT_50,
    ),
    Target(
        "FL+FSDP, fp32, overlapped, 50 Mbit/s: share of the ceiling",
        80,
        True,
        "%",
        _share(50, FP32_OVERLAPPED),
        _AT_50,
    ),
    Target(
        "FL+FSDP, fp32, overlapped, 200 Mbit/s: share of the ceiling",
        95,
        True,
        "%",
        _share(200, FP32_OVERLAPPED),
        "--parts turns report --shapes 2x2 --rates 200",
    ),
    Target("FL+FSDP against FSDP2, 50 Mbit/s", 27, True, "x", _ratio("2x2", "fsdp"), _AT_50),
    Target(
        "FL+HSDP against HSDP, 2 x 4 ranks, 50 Mbit/s",
        8,
        True,
        "x",
        _ratio("2x4", "hsdp"),
        "--parts turns report --shapes 2x4 --rates 50",
    ),
    Target("FL+FSDP: bytes of one fp32 averaging / ring lower bound", 1.02, False, "", _bytes("2x2", "fp32"), _AT_50),
    Target(
        "FL+HSDP, 2 replicas: bytes of one fp32 averaging / ring lower bound",
        1.02,
        False,
        "",
        _bytes("2x4", "fp32"),
        "--parts turns report --shapes 2x4 --rates 50",
    ),
    Target("int8: bytes / fp32 bound", 0.27, False, "", _bytes("2x2", "int8"), _AT_50),
    Target("int4: bytes / fp32 bound", 0.15, False, "", _bytes("2x2", "int4"), _AT_50),
    Target(
        "fp32, blocking: tokens/s / (ceiling and wire one after the other)", 0.97, True, "", _blocking("fp32"), _AT_50
    ),
    Target("int8, blocking: the same", 0.97, True, "", _blocking("int8"), _AT_50),
    Target("time to the loss at which FSDP2 ends, 50 Mbit/s: FSDP2 / FL+FSDP", 5, True, "x", _time_to_loss, _LEARNING),
    Target(
        "int8, overlapped: evaluation loss above fp32, blocking, after equal steps",
        0.2,
        False,
        "%",
        _excess_loss("int8_overlap"),
        "--parts learning report",
    ),
    Target(
        "int4, overlapped: evaluation loss above fp32, blocking, after equal steps",
        0.5,
        False,
        "%",
        _excess_loss("int4_overlap"),
        "--parts learning report",
    ),
    Target("own time inside a round, Trainer", 0.5, False, "%", _own_time("Trainer"), "--parts own_time report"),
    Target("own time inside a round, loop", 0.5, False, "%", _own_time("loop"), "--parts own_time report"),
    Target("against accelerate LocalSGD, 50 Mbit/s", 1, True, "x", _ratio("2x2", "local_sgd"), _AT_50),
    Target("against torchft LocalSGD, 50 Mbit/s", 1, True, "x", _ratio("2x2", "torchft_local_sgd"), _AT_50),
    Target("against torchft DiLoCo, 50 Mbit/s", 1, True, "x", _ratio("2x2", "torchft_diloco"), _AT_50),
)

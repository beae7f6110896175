"""The targets: ratios inside one run, each with what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .results import Results, best
from .statistics import mean, spread
from .variants import VARIANTS


OVERLAPPED = [name for name, variant in VARIANTS.items() if variant.overlapped]
OURS = [name for name, variant in VARIANTS.items() if variant.kind == "ours"]
FP32_OVERLAPPED = [name for name in OVERLAPPED if "wire_format" not in VARIANTS[name].settings]
SLOW = 50


@dataclass(frozen=True)
class Measured:
    """
    A figure and how it came about.

    Args:
        value (`float`):
            The figure.
        how (`str`):
            What it was formed of.
        scatters (`bool`, defaults to `False`):
            Whether it is another one with other seeds.
        error (`float`, *optional*):
            Then its standard error; `None` of a single run, which cannot say on which side of a limit it lies.
    """

    value: float
    how: str
    scatters: bool = False
    error: float | None = None

    def resolves(self, limit: float) -> bool:
        """
        Args:
            limit (`float`):
                Of a target.

        Returns:
            `bool`: Whether the figure is further from it than two standard errors.
        """
        if not self.scatters:
            return True
        return self.error is not None and abs(self.value - limit) > 2 * self.error


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
        measure (`Callable[[Results], Measured | None]`):
            Finds the figure; `None` where it was not measured.
        options (`str`):
            Of the command that measures it: parts, and shape and rate of turns. The report adds those of the runs.
    """

    what: str
    limit: float
    at_least: bool
    unit: str
    measure: Callable[[Results], Measured | None]
    options: str

    def row(self, results: Results) -> dict[str, Any]:
        """The target with its figure, fit for JSON."""
        found = self.measure(results)
        value, resolvable = None if found is None else found.value, found is not None and found.resolves(self.limit)
        reached = (value >= self.limit if self.at_least else value <= self.limit) if value is not None else None
        return {
            "what": self.what,
            "limit": self.limit,
            "at_least": self.at_least,
            "unit": self.unit,
            "value": value,
            "error": None if found is None else found.error,
            "variant": "" if found is None else found.how,
            "reached": reached if resolvable else None,
            "options": self.options,
        }


def _share(rate: int, names: list[str]) -> Callable[[Results], Measured | None]:
    def measure(results: Results) -> Measured | None:
        name = best(results, "2x2", rate, names)
        share = None if name is None else results.share("2x2", rate, name)
        return None if share is None or name is None else Measured(100 * share.median, name)

    return measure


def _ratio(shape: str, other: str) -> Callable[[Results], Measured | None]:
    def measure(results: Results) -> Measured | None:
        name = best(results, shape, SLOW, OURS)
        ratio = None if name is None else results.ratio(shape, SLOW, name, other)
        return None if ratio is None or name is None else Measured(ratio.median, f"{name} / {other}")

    return measure


def _bytes(shape: str, name: str) -> Callable[[Results], Measured | None]:
    def measure(results: Results) -> Measured | None:
        sent = results.link_bytes(shape, SLOW, name)
        return None if sent is None else Measured(sent / results.bound_bytes, f"{sent / 1e6:.2f} MB")

    return measure


def _blocking(name: str) -> Callable[[Results], Measured | None]:
    def measure(results: Results) -> Measured | None:
        value = results.blocking_efficiency("2x2", SLOW, name)
        return None if value is None else Measured(value, name)

    return measure


def _time_to_loss(results: Results) -> Measured | None:
    baseline = results.curves.get("fsdp")
    speed = results.speed("2x2", SLOW, "fsdp")
    name = best(results, "2x2", SLOW, [name for name in OURS if name in results.curves])
    if baseline is None or speed is None or name is None:
        return None
    ours = results.seconds_to_loss(SLOW, name, baseline.losses[-1])
    theirs = baseline.tokens[-1] / speed.median
    if ours is None:
        return Measured(0.0, f"{name} has not reached {baseline.losses[-1]:.3f}")
    how = f"{name}: {ours:.0f} s, fsdp: {theirs:.0f} s to loss {baseline.losses[-1]:.3f}"
    return Measured(theirs / ours, how)


def _excess_loss(name: str) -> Callable[[Results], Measured | None]:
    def measure(results: Results) -> Measured | None:
        ours, reference = results.curves.get(name), results.curves.get("fp32")
        if ours is None or reference is None or ours.steps != reference.steps:
            return None
        # A seed stands for the first weights and the order of the data, which both share.
        runs = dict(zip(ours.seeds, ours.runs, strict=True))
        shared = {seed: run for seed, run in zip(reference.seeds, reference.runs, strict=True) if seed in runs}
        if not shared:
            return None
        excess = mean([100 * (runs[seed][-1] / run[-1] - 1) for seed, run in shared.items()])
        own, other = (mean([run[-1] for run in group]).value for group in ([runs[s] for s in shared], shared.values()))
        seeds = "1 seed" if excess.count == 1 else f"{excess.count} seeds"
        how = f"{own:.4f} / {other:.4f} after {ours.steps[-1]} steps, {seeds}"
        return Measured(excess.value, how, scatters=True, error=excess.error)

    return measure


def _own_time(way: str) -> Callable[[Results], Measured | None]:
    def measure(results: Results) -> Measured | None:
        shares = spread(results.own_time.get(way, ()))
        return None if shares is None else Measured(100 * shares.median, f"median of {shares.count} steps")

    return measure


def _saving(results: Results) -> Measured | None:
    ratio = results.saving_ratio()
    if ratio is None:
        return None
    (seconds, num_bytes), (_, stock_bytes) = (min(results.saving[way]) for way in ("ours", "stock"))
    how = f"{num_bytes / 1e6:.0f} MB in {seconds:.2f} s; Accelerate's {stock_bytes / 1e6:.0f} MB"
    return Measured(ratio.median, how)


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
        "int8, overlapped: evaluation loss of the groups' mean model above fp32, blocking, after equal steps",
        0.2,
        False,
        "%",
        _excess_loss("int8_overlap"),
        "--parts learning report",
    ),
    Target(
        "int4, overlapped: evaluation loss of the groups' mean model above fp32, blocking, after equal steps",
        0.5,
        False,
        "%",
        _excess_loss("int4_overlap"),
        "--parts learning report",
    ),
    Target("own time inside a round, Trainer", 0.5, False, "%", _own_time("Trainer"), "--parts own_time report"),
    Target("own time inside a round, loop", 0.5, False, "%", _own_time("loop"), "--parts own_time report"),
    Target(
        "saving a checkpoint of 2 groups: seconds a byte / those of Accelerate's own saving",
        1.2,
        False,
        "x",
        _saving,
        "--parts saving report",
    ),
    Target("against accelerate LocalSGD, 50 Mbit/s", 1, True, "x", _ratio("2x2", "local_sgd"), _AT_50),
    Target("against torchft LocalSGD, 50 Mbit/s", 1, True, "x", _ratio("2x2", "torchft_local_sgd"), _AT_50),
    Target("against torchft DiLoCo, 50 Mbit/s", 1, True, "x", _ratio("2x2", "torchft_diloco"), _AT_50),
)

"""What `results.json` holds: everything that was measured, fit for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .records import EVALUATED
from .results import Results
from .statistics import Mean, Spread, blocks_of, spread, wire_seconds
from .variants import CEILING, VARIANTS


def content_of(results: Results) -> dict[str, Any]:
    """
    Everything that was measured.

    Args:
        results ([`Results`]):
            What was measured.

    Returns:
        `dict[str, Any]`: Fit for JSON.
    """
    return {
        "workload": asdict(results.workload),
        "num_parameters": results.num_parameters,
        "ring_bound_bytes": results.bound_bytes,
        "sessions": results.sessions,
        "loads": [turn["load"] for turn in results.turns],
        "blocks": [
            {"shape": shape, "rate": rate, "rows": block_rows(results, shape, rate)}
            for shape, rate in blocks_of(results.turns)
        ],
        "evaluated": EVALUATED,
        "learning": learning_rows(results),
        "curves": [asdict(curve) for curve in results.curves.values()],
        "own_time": {way: _as_dict(spread(shares)) for way, shares in results.own_time.items()},
        "saving": results.saving,
        "unavailable": results.unavailable,
        "failures": results.failures,
    }


def block_rows(results: Results, shape: str, rate: int) -> list[dict[str, Any]]:
    """
    The variants of one block with all figures.

    Args:
        results ([`Results`]):
            What was measured.
        shape (`str`):
            Shape of the world.
        rate (`int`):
            Mbit/s.

    Returns:
        `list[dict[str, Any]]`: Of each variant that was measured there, fit for JSON.
    """
    rows = []
    for name, variant in VARIANTS.items():
        speed = results.speed(shape, rate, name)
        if speed is None:
            continue
        sent, border = results.link_bytes(shape, rate, name), results.border_seconds(shape, rate, name)
        averages = not variant.is_synchronous and name != CEILING
        blocking = averages and not variant.overlapped
        stood = results.standstill_seconds(shape, rate, name) if averages else None
        rows.append(
            {
                "variant": name,
                "label": variant.label,
                "num_steps": results.of(shape, rate, name)[-1]["num_steps"],
                "tokens_per_second": asdict(speed),
                "share_of_ceiling": _as_dict(results.share(shape, rate, name)) if name != CEILING else None,
                "link_bytes": sent,
                "bytes_over_bound": sent / results.bound_bytes if sent and not variant.is_synchronous else None,
                "border_seconds": _as_dict(border) if blocking else None,
                "standstill_seconds": _as_dict(stood),
                "wire_seconds": wire_seconds(sent, rate) if sent and rate and blocking else None,
                "peak_bytes": results.memory.get((shape, name)),
            }
        )
    return rows


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

"""Plots: throughput against rate, perplexity against wall time and against tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("agg")

from matplotlib import pyplot  # noqa: E402


SIZE_INCHES = (7.5, 4.5)


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """
    Draws what there is.

    Args:
        content (`Mapping[str, Any]`):
            Of `results.json`.
        folder (`Path`):
            Where the SVG files go.

    Returns:
        `list[Path]`: The files.
    """
    paths = []
    if any(block["shape"] == "2x2" and block["rate"] for block in content["blocks"]):
        paths.append(_save(folder / "throughput.svg", lambda axes: _throughput(axes, content)))
    if content["curves"]:
        paths.append(_save(folder / "perplexity_tokens.svg", lambda axes: _against_tokens(axes, content)))
        slowest = min((block["rate"] for block in content["blocks"] if block["shape"] == "2x2"), default=0)
        if slowest:
            paths.append(_save(folder / "perplexity_seconds.svg", lambda axes: _against_time(axes, content, slowest)))
    return paths


def _save(path: Path, fill: Callable[[Any], None]) -> Path:
    # The same figures give the same file.
    with pyplot.rc_context({"svg.hashsalt": "hf_fedshard"}):
        figure, axes = pyplot.subplots(figsize=SIZE_INCHES, layout="constrained")
        fill(axes)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    return path


def _throughput(axes: Any, content: Mapping[str, Any]) -> None:
    lines: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for block in content["blocks"]:
        if block["shape"] == "2x2" and block["rate"]:
            for row in block["rows"]:
                lines.setdefault(row["label"], []).append((block["rate"], row["tokens_per_second"]))
    for label, points in lines.items():
        points.sort(key=lambda point: point[0])
        medians = [values["median"] for _, values in points]
        errors = [
            [values["median"] - values["low"] for _, values in points],
            [values["high"] - values["median"] for _, values in points],
        ]
        axes.errorbar([rate for rate, _ in points], medians, yerr=errors, marker="o", capsize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s of the link", ylabel="tokens/s of all ranks")


def _labels(content: Mapping[str, Any]) -> dict[str, str]:
    return {row["variant"]: row["label"] for row in content["learning"]}


def _against_tokens(axes: Any, content: Mapping[str, Any]) -> None:
    labels = _labels(content)
    for curve in content["curves"]:
        axes.plot(curve["tokens"], [math.exp(loss) for loss in curve["losses"]], label=labels[curve["variant"]])
    axes.set(yscale="log", xlabel="tokens of all ranks", ylabel="perplexity on held-out text")


def _against_time(axes: Any, content: Mapping[str, Any], rate: int) -> None:
    labels = _labels(content)
    block = next(block for block in content["blocks"] if (block["shape"], block["rate"]) == ("2x2", rate))
    speeds = {row["variant"]: row["tokens_per_second"]["median"] for row in block["rows"]}
    for curve in content["curves"]:
        if curve["variant"] in speeds:
            seconds = [tokens / speeds[curve["variant"]] for tokens in curve["tokens"]]
            axes.plot(seconds, [math.exp(loss) for loss in curve["losses"]], label=labels[curve["variant"]])
    axes.set(
        xscale="symlog",
        yscale="log",
        xlabel=f"seconds of training at {rate} Mbit/s",
        ylabel="perplexity on held-out text",
    )

"""The commands that the report names: with every option that its figures were measured with, but for defaults."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from .arguments import make_parser
from .variants import LEARNING
from .workload import Workload


COMMAND = "python -m benchmarks.two_tier --output_dir runs/benchmark"
TURN_OPTIONS = ("rounds", "rounds_per_turn", "turn_seconds")


def command(content: Mapping[str, Any], options: str) -> str:
    """
    The command that measures a figure of a report again.

    Args:
        content (`Mapping[str, Any]`):
            Of `results.json`: what was measured.
        options (`str`):
            What the figure needs: `--parts` and, of turns, `--shapes` and `--rates` or `--plain`.

    Returns:
        `str`: With the options that the parts were measured with.
    """
    args = make_parser().parse_args(["--output_dir", "x", *shlex.split(options)])
    more = _unlike({item.name: item.default for item in fields(Workload)}, content["workload"])
    if "turns" in args.parts:
        more += _turn_options(content["sessions"], args.shapes, args.rates)
    if "learning" in args.parts:
        more += _learning_options(content["curves"], content["workload"]["seed"])
    if content["sessions"][-1]["plain"] and not args.plain:
        more.append("--plain")
    return " ".join([COMMAND, options, *more])


def _turn_options(sessions: Sequence[Mapping[str, Any]], shapes: Sequence[str], rates: Sequence[int]) -> list[str]:
    """Those of the newest run that measured turns of these shapes and rates: each notes its command."""
    for session in reversed(sessions):
        asked, _ = make_parser().parse_known_args(shlex.split(session["command"])[3:])
        at_rates = asked.plain or set(rates) <= set(asked.rates)
        if "turns" in asked.parts and set(shapes) <= set(asked.shapes) and at_rates:
            return _unlike(_defaults(*TURN_OPTIONS), vars(asked))
    return []


def _learning_options(curves: Sequence[Mapping[str, Any]], first_seed: int) -> list[str]:
    """Those that the curves show: a run may have been broken off before its last seed."""
    if not curves:
        return []
    shown = {
        "learning_steps": max(curve["steps"][-1] // LEARNING[curve["variant"]] for curve in curves),
        "learning_seeds": max(max(curve["seeds"]) for curve in curves) - first_seed + 1,
        "eval_every": curves[0]["steps"][1],
    }
    return _unlike(_defaults(*shown), shown)


def _defaults(*names: str) -> dict[str, Any]:
    parser = make_parser()
    return {name: parser.get_default(name) for name in names}


def _unlike(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    return [f"--{name} {values[name]}" for name, default in defaults.items() if values[name] != default]

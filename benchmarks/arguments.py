"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from .network import unavailable_reason
from .variants import RATES, SHAPES, VARIANTS, choose
from .workload import Workload


PARTS = ("turns", "learning", "memory", "own_time", "saving", "report")
PLAIN_RATE = 0
DESCRIPTION = """
Measures on a two-tier network, and writes tables, JSON and plots:

    python -m benchmarks.two_tier --output_dir runs/benchmark

Root is needed for network namespaces alone; `--plain` does without, and without a slow link. What an output folder holds
already is not measured again.
"""


def make_parser() -> argparse.ArgumentParser:
    """
    Returns:
        `argparse.ArgumentParser`: Of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_tier",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output_dir", type=Path, required=True, help="Folder of the results; goes on with what it holds.")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="What to measure. Default: everything.")
    add("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="Nodes x ranks in a node.")
    add("--rates", nargs="+", type=int, default=list(RATES), help="Mbit/s of the link. Default: %(default)s.")
    add("--variants", nargs="+", metavar="NAME", help=f"Default: those that the table lists. {', '.join(VARIANTS)}.")
    add("--rounds", type=int, default=7, help="Least number of rounds of each variant. Default: %(default)s.")
    add("--rounds_per_turn", type=int, default=2, help="Rounds before the next one's turn. Default: %(default)s.")
    add(
        "--turn_seconds",
        type=float,
        default=4.0,
        help="Length of a turn of DDP, FSDP2 and HSDP. Default: %(default)s.",
    )
    add(
        "--learning_steps",
        type=int,
        default=128,
        help="Steps of FSDP2 in the learning part, a multiple of --eval_every. The groups make twice as many, since a step of "
        "theirs has half of the tokens. Default: %(default)s.",
    )
    add(
        "--learning_seeds",
        type=int,
        default=1,
        help="Repetitions of the learning part, each with other weights and another order of the data. Differences "
        "smaller than two standard errors decide nothing, and one run has none. Default: %(default)s.",
    )
    add("--eval_every", type=int, default=16, help="Steps between two evaluations there. Default: %(default)s.")
    add("--plain", action="store_true", help="Without namespaces, root and slow link.")
    add("--list", action="store_true", help="List the variants and whether they are available, and end.")
    group = parser.add_argument_group("workload", "What is trained.")
    for item in fields(Workload):
        group.add_argument(
            f"--{item.name}", type=type(item.default), default=item.default, help="Default: %(default)s."
        )
    return parser


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """
    Parses and checks the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            In place of that of the process.

    Returns:
        `argparse.Namespace`: The arguments. Ends with a message where one is out of its range.
    """
    parser = make_parser()
    args = parser.parse_args(words)
    for name in ("rounds", "rounds_per_turn", "learning_steps", "learning_seeds", "eval_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is at least 1, got {getattr(args, name)}.")
    if args.turn_seconds <= 0:
        parser.error(f"--turn_seconds is positive, got {args.turn_seconds}.")
    if args.eval_every % args.sync_every:
        parser.error(f"--eval_every={args.eval_every} is no multiple of --sync_every={args.sync_every}: not a border.")
    if args.learning_steps % args.eval_every:
        parser.error(
            f"--learning_steps={args.learning_steps} is no multiple of --eval_every={args.eval_every}: the last steps would "
            "not be evaluated."
        )
    for rate in args.rates:
        if rate < 1:
            parser.error(f"--rates are Mbit/s of at least 1, got {rate}.")
    try:
        choose(args.variants, "2x2", 50)
    except ValueError as error:
        parser.error(f"--variants: {error}")
    if not args.plain and set(args.parts) & {"turns", "learning"}:
        reason = unavailable_reason()
        if reason is not None:
            parser.error(f"{reason}. With --plain it runs without a slow link.")
    if args.plain:
        args.rates = [PLAIN_RATE]
    return args

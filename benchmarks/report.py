"""
Tables in Markdown, JSON and plots of an output folder; and the tables of the results page, so that no figure is typed:

    python -m benchmarks.report runs/benchmark --page docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import Results
from .targets import TARGETS


COMMAND = "python -m benchmarks.two_tier --output_dir runs/benchmark"
SKELETON = """# Benchmarks

<!-- begin about -->
<!-- end about -->

## Targets

<!-- begin targets -->
<!-- end targets -->

## Throughput

<!-- begin throughput -->
<!-- end throughput -->

## Quality

<!-- begin learning -->
<!-- end learning -->

## Not measured

<!-- begin missing -->
<!-- end missing -->
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    A table in Markdown.

    Args:
        head (`Sequence[str]`):
            Titles of the columns; the first is left-aligned, and the rest to the right.
        rows (`Sequence[Sequence[str]]`):
            As many cells each.
    """
    lines = [" | ".join(head), " | ".join(["---", *["---:"] * (len(head) - 1)]), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def figure(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    """
    Args:
        value (`float`, *optional*):
            A figure.
        digits (`int`, *optional*, defaults to 0):
            After the point.
        scale (`float`, *optional*, defaults to 1.0):
            What it is multiplied by.

    Returns:
        `str`: `-` where there is none.
    """
    return "-" if value is None else f"{value * scale:.{digits}f}"


def with_spread(values: dict[str, float] | None, digits: int = 0, scale: float = 1.0) -> str:
    """
    Args:
        values (`dict[str, float]`, *optional*):
            Fields of [`Spread`].
        digits (`int`, *optional*, defaults to 0):
            After the point.
        scale (`float`, *optional*, defaults to 1.0):
            What all are multiplied by.

    Returns:
        `str`: Median, and the quartiles in brackets.
    """
    if values is None:
        return "-"
    median, low, high = (figure(values[name], digits, scale) for name in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def with_error(values: dict[str, Any] | None, digits: int = 4) -> str:
    """
    Args:
        values (`dict[str, Any]`, *optional*):
            Fields of [`Mean`].
        digits (`int`, *optional*, defaults to 4):
            After the point.

    Returns:
        `str`: The mean and, of several runs, its standard error.
    """
    if values is None or values["error"] is None:
        return "-" if values is None else figure(values["value"], digits)
    return f"{figure(values['value'], digits)} ± {figure(values['error'], digits)}"


def about(content: dict[str, Any]) -> str:
    """When and on what it was measured."""
    sessions, loads = content["sessions"], sorted(content["loads"])
    versions = ", ".join(f"{name} {version}" for name, version in sessions[-1]["versions"].items())
    dates = sorted({session["session"][:10] for session in sessions})
    lines = [
        f"Measured on {' and '.join(dates)}, on {sessions[-1]['machine']}, {sessions[-1]['num_cores']} cores, with {versions}. "
        f"{content['num_parameters'] / 1e6:.2f}M parameters, {content['workload']['batch_size']} x "
        f"{content['workload']['block_size']} tokens a rank and step, H = {content['workload']['sync_every']}, fp32, AdamW. "
        f"The least that a node sends for one fp32 average is {content['ring_bound_bytes'] / 1e6:.2f} MB."
    ]
    if loads:
        lines.append(
            f"The machine's load average during the turns was {loads[len(loads) // 2]:.1f} in the median, at most "
            f"{loads[-1]:.1f}."
        )
    return " ".join(lines)


def targets_table(rows: Sequence[dict[str, Any]]) -> str:
    """The targets with what was measured."""
    lines = []
    for row in rows:
        sign, unit = (">=" if row["at_least"] else "<="), {"%": " %", "x": "x"}.get(row["unit"], "")
        digits = 3 if row["limit"] < 2 else 1
        reached = {None: "not resolvable with these runs", True: "reached", False: "**missed**"}[row["reached"]]
        command = f"`{COMMAND} {row['options']}`"
        value = "-" if row["value"] is None else f"{row['value']:.{digits}f}{unit}"
        if row["value"] is None:
            reached = "not measured"
        elif row["error"] is not None:
            value = f"{row['value']:.{digits}f} ± {row['error']:.{digits}f}{unit}"
        lines.append([row["what"], f"{sign} {row['limit']:g}{unit}", value, reached, row["variant"] or "-", command])
    return table(["what", "target", "measured", "", "variant", "command"], lines)


def throughput_table(block: dict[str, Any]) -> str:
    """One shape and rate. How long steps stood still is told where it was measured."""
    lines = []
    stood = any(row.get("standstill_seconds") for row in block["rows"])
    for row in block["rows"]:
        rate = f" --rates {block['rate']}" if block["rate"] else " --plain"
        lines.append(
            [
                row["label"],
                with_spread(row["tokens_per_second"]),
                with_spread(row["share_of_ceiling"], 1, 100),
                figure(row["link_bytes"], 2, 1e-6) + f" / {row['num_steps']}",
                figure(row["bytes_over_bound"], 3),
                with_spread(row["border_seconds"], 2),
                *([with_spread(row.get("standstill_seconds"), 3)] if stood else []),
                figure(row["wire_seconds"], 2),
                figure(row["peak_bytes"], 0, 1e-6),
                f"`{COMMAND} --shapes {block['shape']}{rate} --variants {row['variant']}`",
            ]
        )
    head = [
        "variant",
        "tokens/s",
        "% of the ceiling",
        "MB over the link / steps",
        "of the fp32 bound",
        "averaging, s",
        *(["steps stand still, s a round"] if stood else []),
        "bytes / bandwidth, s",
        "peak memory, MB",
        "command",
    ]
    return table(head, lines)


def throughput(content: dict[str, Any]) -> str:
    """All blocks."""
    parts = []
    for block in content["blocks"]:
        ranks = block["shape"].replace("x", " nodes x ") + " ranks"
        parts.append(f"### {ranks}, {block['rate'] or 'no'} Mbit/s\n\n{throughput_table(block)}")
    return "\n\n".join(parts)


def learning(content: dict[str, Any]) -> str:
    """Loss after equal tokens and after equal seconds, and what model it is that of."""
    rows = content["learning"]
    if not rows:
        return "Not measured."
    rates = list(rows[0]["seconds"])
    head = ["variant", f"loss after {rows[0]['tokens']} tokens"]
    head += [f"after {figure(rows[0]['seconds'][rate])} s at {rate} Mbit/s" for rate in rates]
    head += ["after all steps", "steps", "averagings in it", "seeds", "perplexity"]
    lines = [
        [
            row["label"],
            with_error(row["loss_after_tokens"]),
            *(with_error(row["loss_after_seconds"].get(rate)) for rate in rates),
            with_error(row["last_loss"]),
            str(row["steps"]),
            _averagings(row),
            str(row["last_loss"]["count"]),
            figure(math.exp(row["last_loss"]["value"]), 1),
        ]
        for row in rows
    ]
    text = f"Evaluated: {content['evaluated']}; nothing is averaged for it that the run would not average."
    if any(row["last_loss"]["count"] > 1 for row in rows):
        text += " Means over the seeds, with their standard error."
    return f"{text}\n\n{table(head, lines)}"


def _averagings(row: dict[str, Any]) -> str:
    if row["num_averagings"] is None:
        return "-"
    return f"{row['num_averagings']}, delayed" if row["delayed"] else str(row["num_averagings"])


def missing(content: dict[str, Any]) -> str:
    """What was not measured, and why."""
    lines = [f"- `{name}`: {reason}" for name, reason in {**content["unavailable"], **content["failures"]}.items()]
    return "\n".join(lines) or "Everything was measured."


def sections(content: dict[str, Any]) -> dict[str, str]:
    """
    Args:
        content (`dict[str, Any]`):
            Of `results.json`.

    Returns:
        `dict[str, str]`: Markdown of each section by its name.
    """
    return {
        "about": about(content),
        "targets": targets_table(content["targets"]),
        "throughput": throughput(content),
        "learning": learning(content),
        "missing": missing(content),
    }


def fill_page(page: str, content: dict[str, Any]) -> str:
    """
    Replaces what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; prose around it stays.

    Args:
        page (`str`):
            Markdown.
        content (`dict[str, Any]`):
            Of `results.json`.

    Returns:
        `str`: The page with the tables of these results.
    """
    for name, text in sections(content).items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        head, found, rest = page.partition(begin)
        _, ended, tail = rest.partition(end)
        if found and ended:
            page = f"{head}{begin}{text}\n{end}{tail}"
    return page


def write_report(folder: Path) -> dict[str, Any]:
    """
    Writes `results.json`, `results.md` and the plots of an output folder.

    Args:
        folder (`Path`):
            The folder.

    Returns:
        `dict[str, Any]`: Content of `results.json`.
    """
    results = Results(folder)
    content = results.as_dict() | {"targets": [target.row(results) for target in TARGETS]}
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "results.md").write_text(fill_page(SKELETON, content))
    print(f"{folder / 'results.md'}, {folder / 'results.json'}")
    try:
        from .plots import draw
    except ImportError as error:
        print(f"No plots: {error}. Install the extra `benchmarks`.")
    else:
        for path in draw(content, folder):
            print(path)
    return content


def make_parser() -> argparse.ArgumentParser:
    """
    Returns:
        `argparse.ArgumentParser`: Of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Output folder of benchmarks.two_tier.")
    parser.add_argument("--page", type=Path, help="Page to fill; made if it is not there. Its JSON goes beside it.")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """
    Writes the report of a folder and, if asked, the tables of a page.

    Args:
        words (`Sequence[str]`, *optional*):
            Command line in place of that of the process.
    """
    args = make_parser().parse_args(words)
    content = write_report(args.folder)
    if args.page is not None:
        page = args.page.read_text() if args.page.exists() else SKELETON
        args.page.write_text(fill_page(page, content))
        args.page.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

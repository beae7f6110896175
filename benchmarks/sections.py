"""The sections of a report in Markdown, from the content of `results.json`."""

from __future__ import annotations

import math
from typing import Any

from .commands import command
from .tables import figure, table, with_error, with_spread


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


def targets_table(content: dict[str, Any]) -> str:
    """The targets with what was measured."""
    lines = []
    for row in content["targets"]:
        sign, unit = (">=" if row["at_least"] else "<="), {"%": " %", "x": "x"}.get(row["unit"], "")
        digits = 3 if row["limit"] < 2 else 1
        reached = {None: "not resolvable with these runs", True: "reached", False: "**missed**"}[row["reached"]]
        value = "-" if row["value"] is None else f"{row['value']:.{digits}f}{unit}"
        if row["value"] is None:
            reached = "not measured"
        elif row["error"] is not None:
            value = f"{row['value']:.{digits}f} ± {row['error']:.{digits}f}{unit}"
        again = f"`{command(content, row['options'])}`"
        lines.append([row["what"], f"{sign} {row['limit']:g}{unit}", value, reached, row["variant"] or "-", again])
    return table(["what", "target", "measured", "", "variant", "command"], lines)


def throughput_table(content: dict[str, Any], block: dict[str, Any]) -> str:
    """One shape and rate. How long steps stood still is told where it was measured."""
    lines = []
    where = f"--rates {block['rate']}" if block["rate"] else "--plain"
    again = command(content, f"--parts turns memory report --shapes {block['shape']} {where}")
    stood = any(row.get("standstill_seconds") for row in block["rows"])
    for row in block["rows"]:
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
                f"`{again} --variants {row['variant']}`",
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
        parts.append(f"### {ranks}, {block['rate'] or 'no'} Mbit/s\n\n{throughput_table(content, block)}")
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
        "targets": targets_table(content),
        "throughput": throughput(content),
        "learning": learning(content),
        "missing": missing(content),
    }

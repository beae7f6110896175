"""Cells and tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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

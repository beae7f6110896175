"""Checks of single values, with one message for all settings."""

from __future__ import annotations

import math
from typing import Any


def is_number(value: Any) -> bool:
    """Whether a value is a number, of which `True` is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_int(name: str, value: Any, minimum: int) -> None:
    """
    Refuses what is no integer, or below a bound.

    Args:
        name (`str`):
            The setting, for the message.
        value (`Any`):
            Its value.
        minimum (`int`):
            The least that is allowed.

    Raises:
        ValueError: With the setting, what is allowed and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, but got {value!r}.")


def check_seconds(name: str, value: Any) -> None:
    """
    Refuses what is no time that can be waited for.

    Args:
        name (`str`):
            The setting, for the message.
        value (`Any`):
            Its value.

    Raises:
        ValueError: With the setting, what is allowed and the value.
    """
    # What the backends can count, in milliseconds and without an overflow.
    if not (is_number(value) and 1e-3 <= value <= 1e9):
        raise ValueError(f"{name} must be a positive number, 0.001 to 1e9, but got {value!r}.")


def check_number(name: str, value: Any, minimum: float, above: bool) -> None:
    """
    Refuses what is no finite number, or not above a bound.

    Args:
        name (`str`):
            The setting, for the message.
        value (`Any`):
            Its value.
        minimum (`float`):
            The bound.
        above (`bool`):
            Whether it is excluded.

    Raises:
        ValueError: With the setting, what is allowed and the value.
    """
    if not (is_number(value) and value < math.inf and (value > minimum if above else value >= minimum)):
        raise ValueError(
            f"{name} must be a number {'above' if above else 'of at least'} {minimum:g}, but got {value!r}."
        )

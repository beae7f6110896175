"""Agreement over the world at start: a rank that is set up differently fails everywhere, with the numbers, not later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


class FederationMismatchError(RuntimeError):
    """Ranks of one federation were started with different settings, models or versions."""


def agree(what: str, description: Mapping[str, Any], error: str | None = None) -> None:
    """
    Compares a description over all ranks and raises the same error on each of them if it differs anywhere.

    Every rank must call it, a rank on which something went wrong too: it hands over its `error`, and all ranks raise.
    One `all_gather_object` over the world, so no rank can be left waiting.

    Args:
        what (`str`):
            What is compared, for the message.
        description (`Mapping[str, Any]`):
            Names and values; the values must be picklable and comparable.
        error (`str`, *optional*):
            What is wrong on this rank, if anything.

    Raises:
        FederationMismatchError: If a value differs between ranks: the message has each value and its ranks.
        ValueError: If a rank handed over an error.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (dict(description), error))
    errors: dict[str, list[int]] = {}
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            errors.setdefault(message, []).append(rank)
    if errors:
        if len(errors) == 1 and len(next(iter(errors.values()))) == len(everyone):
            raise ValueError(next(iter(errors)))
        raise ValueError("\n".join(f"On {_ranks(ranks)}: {message}" for message, ranks in errors.items()))
    differences = []
    for name in sorted({name for values, _ in everyone for name in values}):
        by_value: dict[str, list[int]] = {}
        for rank, (values, _) in enumerate(everyone):
            by_value.setdefault(repr(values.get(name, "<missing>")), []).append(rank)
        if len(by_value) > 1:
            held = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            differences.append(f"{name}: {held}")
    if differences:
        raise FederationMismatchError(
            f"The ranks disagree about {what}. Start all of them with the same values.\n  " + "\n  ".join(differences)
        )


def _ranks(ranks: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"

"""What a subclass of Trainer adds to its logs: of all groups, where it has measured one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from transformers import Trainer


def adds_to_logs(trainer: Trainer) -> bool:
    """
    Whether a Trainer's own `log` adds metrics, as those of TRL do.

    Args:
        trainer (`Trainer`):
            The Trainer.

    Returns:
        `bool`: The same on all ranks.
    """
    return type(trainer).log is not Trainer.log


def average_over_ranks(logs: Mapping[str, Any], given: Iterable[str]) -> dict[str, float]:
    """
    Averages what was added to the logs. TRL gathers in its loss, and inside a round that stays in the group: a mean comes
    out as the group's, and a count as if all groups had counted as much as this one. The mean over groups is right for
    both, exactly for counts and for means of as many samples. Collective over the world; call it at a border.

    Args:
        logs (`Mapping[str, Any]`):
            The logs, complete.
        given (`Iterable[str]`):
            Those that Trainer itself has measured.

    Returns:
        `dict[str, float]`: What was added, averaged over the ranks that have it.
    """
    added = {name: float(value) for name, value in logs.items() if name not in given and type(value) in (int, float)}
    rows: list[Any] = [None] * dist.get_world_size()
    # As objects, since nothing says that a subclass adds the same on all ranks.
    dist.all_gather_object(rows, added)
    return {name: sum(row[name] for row in rows if name in row) / sum(name in row for row in rows) for name in added}

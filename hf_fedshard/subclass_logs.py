"""What a subclass of Trainer adds to its logs: of all groups, where it has measured one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from transformers import Trainer


class SubclassLogs:
    """
    Makes what a subclass of Trainer adds to a log one of all ranks, where all of them are logging.

    Args:
        trainer (`Trainer`):
            The Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._given_logs: frozenset[str] | None = None
        self._all_ranks_log = False

    @contextlib.contextmanager
    def of_all_ranks(self) -> Iterator[None]:
        """While Trainer logs, evaluates and saves what is due: on all ranks, and inside a round never."""
        self._all_ranks_log = True
        try:
            yield
        finally:
            self._all_ranks_log = False

    @contextlib.contextmanager
    def of_callbacks(self) -> Iterator[None]:
        """While callbacks have an event: what they log themselves may be of one rank alone."""
        held, self._all_ranks_log, self._given_logs = (self._all_ranks_log, self._given_logs), False, None
        try:
            yield
        finally:
            self._all_ranks_log, self._given_logs = held

    @contextlib.contextmanager
    def added_to(self, logs: Mapping[str, Any]) -> Iterator[None]:
        """
        While the subclass logs.

        Args:
            logs (`Mapping[str, Any]`):
                What it is given.
        """
        if self._all_ranks_log and adds_to_logs(self.trainer):
            self._given_logs = frozenset(logs)
        try:
            yield
        finally:
            self._given_logs = None

    def average(self, logs: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """
        To be called before callbacks see a log. Collective over the world where all ranks are logging.

        Args:
            logs (`dict[str, Any]`):
                The log, changed in place.
            history (`list[dict[str, Any]]`):
                Trainer's, which has a copy already.
        """
        if self._given_logs is not None:
            averaged = average_over_ranks(logs, self._given_logs)
            for each in (logs, history[-1]):
                each.update(averaged)


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

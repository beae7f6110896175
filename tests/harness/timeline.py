"""Which collectives of a whole `Trainer.train()` were issued inside a round, and which at a border."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hf_fedshard.rounds import Rounds

from .collectives import Collective, CollectiveRecorder


# A mark is itself a collective, over this rank alone: so it has its place in the record, and costs nothing. The number
# of its elements says what it marks.
ROUND, BORDER = 7001, 7002


class Timeline:
    """
    Context manager around `trainer.train()`. Construct it on every rank.

    A round begins when Trainer asks for the batches of its next step and ends where [`Rounds.close`] is called; what
    follows until the next batches is the border: logging, evaluation, saving.

    Args:
        num_groups (`int`):
            Federation groups, of consecutive ranks.
    """

    def __init__(self, num_groups: int) -> None:
        self.group_of = [rank * num_groups // dist.get_world_size() for rank in range(dist.get_world_size())]
        self.borders: list[int] = []
        self.collectives: list[Collective] = []
        self._own, _ = dist.new_subgroups(group_size=1)

    def mark(self, kind: int) -> None:
        """
        Notes the beginning of a round or a border.

        Args:
            kind (`int`):
                `ROUND` or `BORDER`.
        """
        dist.all_reduce(torch.zeros(kind), group=self._own)

    @contextlib.contextmanager
    def of(self, trainer: Any) -> Iterator[None]:
        """
        Records while the context lasts.

        Args:
            trainer (`Trainer`):
                The Trainer whose `train` is called inside.
        """
        close, get_batches = Rounds.close, trainer.get_batch_samples

        inside = False

        def marked_close(rounds: Rounds, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            inside = False
            self.mark(BORDER)
            self.borders.append(trainer.state.global_step)
            return close(rounds, *args, **kwargs)

        def marked_batches(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            self.mark(ROUND)
            batches, num_items = get_batches(*args, **kwargs)
            at_border = trainer.state.global_step == (self.borders[-1] if self.borders else 0)
            if not batches and (at_border or not inside):
                self.mark(BORDER)  # the data has ended: no round has begun, or none of its steps was made
            inside |= bool(batches)
            return batches, num_items

        recorder = CollectiveRecorder()
        trainer.get_batch_samples = marked_batches
        try:
            with mock.patch.object(Rounds, "close", marked_close), recorder:
                yield
        finally:
            trainer.get_batch_samples = get_batches
        self.collectives = recorder.collectives

    def inside_rounds(self) -> list[Collective]:
        """
        Returns:
            `list[Collective]`: What was issued between two borders, in order.
        """
        return [collective for collectives in self.by_round() for collective in collectives]

    def by_round(self) -> list[list[Collective]]:
        """
        Returns:
            `list[list[Collective]]`: The same, for each round.
        """
        inside = False
        found: list[list[Collective]] = []
        for collective in self.collectives:
            if len(collective.ranks) == 1 and collective.num_elements in (ROUND, BORDER):
                if not inside and collective.num_elements == ROUND:
                    found.append([])
                inside = collective.num_elements == ROUND
            elif inside:
                found[-1].append(collective)
        return found

    def crossing_inside_rounds(self) -> list[str]:
        """
        Returns:
            `list[str]`: Those of them that cross the border of a group, with their stacks.
        """
        return [str(collective) for collective in self.inside_rounds() if collective.crosses(self.group_of)]

"""The reference of runs that average beside their steps: when what is averaged. It shares no code with the package."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .outer_runs import adamw
from .overlap_groups import Averages, Groups
from .overlap_runs import NUM_GROUPS, NUM_STEPS, block_net
from .reference_groups import State


def refer(
    num_ranks: int,
    *,
    periods: Sequence[int],
    delay: int,
    alpha: float = 0.0,
    fragments: Sequence[Collection[str]] | None = None,
    borders: Collection[int] = (),
    weighted: bool = False,
    outer: Callable[[Any], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    average: Callable[[Sequence[State], Sequence[float], State], State] | None = None,
    measured: list[tuple[float, float, float]] | None = None,
    make: Callable[[torch.dtype], nn.Module] = block_net,
) -> list[State]:
    """
    Delayed averaging on whole models in one process, one group after another; shares no code with the package. In a round
    each parameter makes one outer step: a border brings the others together, and leaves their anchors where they are.

    Args:
        num_ranks (`int`):
            Ranks whose batches are taken.
        periods (`Sequence[int]`):
            H of each round, the last for all that follow.
        delay (`int`):
            Steps between a snapshot and its outcome.
        alpha (`float`):
            The share of its own model that a group keeps.
        fragments (`Sequence`, *optional*):
            Names of the parameters of each.
        borders (`Collection[int]`):
            Steps after which a full border is made; the last step is one.
        weighted (`bool`):
            Whether groups count by samples.
        outer (`Callable`, *optional*):
            Makes an outer optimizer.
        dtype (`torch.dtype`):
            Of the model.
        optimizer (`Callable`):
            Makes an inner optimizer.
        average (`Callable`, *optional*):
            Forms the average of a fragment of the groups' models from it, their weights, and what the last outcome of all
            parameters was; at a border of one after the other. By default it is exact.
        measured (`list`, *optional*):
            Takes, for each average in order: the mean over the groups of the squared distance to it, and the squared norms of it
            and of the pseudo-gradient.
        make (`Callable`):
            Makes the model; what does not train stays as it is.

    Returns:
        `list`: The model at each border.
    """
    torch.set_num_threads(1)
    groups = Groups(num_ranks, make(dtype), optimizer)
    parts = [list(part) for part in fragments] if fragments else [groups.names]
    averages = Averages(groups.snapshot(groups.names)[0], parts, outer, average, measured)
    rounds = _Rounds(groups, averages, parts, periods, delay, alpha, weighted)
    found = []
    for number in range(1, NUM_STEPS + 1):
        rounds.count(groups.train(number - 1))
        rounds.advance(number)
        if number in borders or number == NUM_STEPS:
            rounds.close()
            found.append({name: param.detach().clone() for name, param in groups.models[0].named_parameters()})
    return found


class _Flight(NamedTuple):
    """An average that is on its way: after which step it is taken in, and of what."""

    lands_at: int
    snapshots: list[State]
    weights: list[float]


class _Rounds:
    """
    When what is averaged.

    Args:
        groups (`Groups`):
            What trains.
        averages (`Averages`):
            What forms their averages.
        parts (`list[list[str]]`):
            Names of the parameters of each fragment.
        periods (`Sequence[int]`):
            See [`refer`], as for all others.
        delay (`int`):
            The same.
        alpha (`float`):
            The same.
        weighted (`bool`):
            The same.
    """

    def __init__(
        self,
        groups: Groups,
        averages: Averages,
        parts: list[list[str]],
        periods: Sequence[int],
        delay: int,
        alpha: float,
        weighted: bool,
    ) -> None:
        self.groups = groups
        self.averages = averages
        self.parts = parts
        self.periods = periods
        self.delay = delay
        self.alpha = alpha
        self.weighted = weighted
        self.flights: deque[_Flight] = deque()
        self.seen = [[0.0] * NUM_GROUPS for _ in parts]
        self.steps = self.rounds = 0
        self.started = False
        """Whether an average was started after the last step."""
        self.to_come = set(groups.names)
        """What has made no outer step in this round."""

    def count(self, items: Sequence[int]) -> None:
        self.steps += 1
        for counts in self.seen:
            for group, number in enumerate(items):
                counts[group] += number

    def advance(self, number: int) -> None:
        """After so many steps: takes in what is due, and starts what is."""
        period = self.periods[min(self.rounds, len(self.periods) - 1)]
        while self.flights and self.flights[0].lands_at <= number:
            self._land()
        num_parts = len(self.parts)
        due = [index for index in range(num_parts) if (index + 1) * period // num_parts == self.steps]
        self.started = bool(due)
        if due:
            part = self.parts[due[0]]
            self.flights.append(_Flight(number + self.delay, self.groups.snapshot(part), self._shares(due[0])))
            self.to_come -= set(part)
            if self.steps == period:
                self.steps, self.to_come = 0, set(self.groups.names)
                self.rounds += 1

    def close(self) -> None:
        """A full border."""
        if self.started and len(self.parts) == 1:
            while self.flights:
                # Nothing was trained since: the average is the model.
                flight = self.flights.popleft()
                self.groups.take(self.averages.form(flight.snapshots, flight.weights))
        else:
            while self.flights:
                self._land()
            weights = self._shares(len(self.parts) - 1)
            turn = self.to_come if self.steps else ()
            self.groups.take(self.averages.form(self.groups.snapshot(self.groups.names), weights, turn))
            self.rounds += self.steps > 0
        self.seen = [[0.0] * NUM_GROUPS for _ in self.parts]
        self.steps, self.to_come = 0, set(self.groups.names)

    def _land(self) -> None:
        flight = self.flights.popleft()
        self.groups.move(self.averages.form(flight.snapshots, flight.weights), flight.snapshots, 1 - self.alpha)

    def _shares(self, index: int) -> list[float]:
        counts = self.seen[index] if self.weighted and sum(self.seen[index]) else [1.0] * NUM_GROUPS
        self.seen[index] = [0.0] * NUM_GROUPS
        return [count / sum(counts) for count in counts]

"""The references of runs that average beside their steps: whole models in one process. They share no code with the package."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .outer_runs import adamw, num_samples, sum_over
from .overlap_runs import NUM_GROUPS, NUM_STEPS, block_net, draws
from .reference_groups import State, weighted_average


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
            Forms the average of parts of the groups' models from them, their weights, and what the last outcome of all
            parameters was. By default it is exact.
        measured (`list`, *optional*):
            Takes, for each average in order: the mean over the groups of the squared distance to it, and the squared norms of it
            and of the pseudo-gradient.
        make (`Callable`):
            Makes the model; what does not train stays as it is.

    Returns:
        `list`: The model at each border.
    """
    torch.set_num_threads(1)
    groups = _Groups(num_ranks, make(dtype), optimizer)
    averages = _Averages(groups.snapshot(groups.names)[0], outer, average, measured)
    parts = [list(part) for part in fragments] if fragments else [groups.names]
    rounds = _Rounds(groups, averages, parts, periods, delay, alpha, weighted)
    found = []
    for number in range(1, NUM_STEPS + 1):
        rounds.count(groups.train(number - 1))
        rounds.advance(number)
        if number in borders or number == NUM_STEPS:
            rounds.close()
            found.append({name: param.detach().clone() for name, param in groups.models[0].named_parameters()})
    return found


class _Groups:
    """
    The models of all groups, whole, and their inner optimizers.

    Args:
        num_ranks (`int`):
            Ranks whose batches are taken.
        model (`torch.nn.Module`):
            Of the first group; the others begin with copies.
        optimizer (`Callable`):
            Makes an inner optimizer.
    """

    def __init__(self, num_ranks: int, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.size = num_ranks // NUM_GROUPS
        self.batches = [draws(rank, num_ranks) for rank in range(num_ranks)]
        self.models = [model, *(copy.deepcopy(model) for _ in range(NUM_GROUPS - 1))]
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        self.names = [name for name, param in model.named_parameters() if param.requires_grad]

    def train(self, step: int) -> list[int]:
        """One step of each; the samples that each has seen in it."""
        seen = []
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            members = self.batches[group * self.size : (group + 1) * self.size]
            items = sum(num_samples(member[step]) for member in members)
            for member in members:
                sum_over(model, member[step], items).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(items)
        return seen

    def snapshot(self, part: Collection[str]) -> list[State]:
        return [{name: model.get_parameter(name).detach().clone() for name in part} for model in self.models]

    @torch.no_grad()
    def take(self, new: State) -> None:
        for model in self.models:
            for name, value in new.items():
                model.get_parameter(name).copy_(value)

    @torch.no_grad()
    def move(self, new: State, snapshots: Sequence[State], share: float) -> None:
        """By that share of the way from the snapshots: what was trained since stays."""
        for model, snapshot in zip(self.models, snapshots, strict=True):
            for name, value in snapshot.items():
                held = model.get_parameter(name)
                held.add_(share * (new[name] - value).to(held.dtype))


class _Averages:
    """
    Forms averages, and makes outer steps from them.

    Args:
        start (`dict[str, torch.Tensor]`):
            What all groups begin with.
        outer (`Callable`, *optional*):
            See [`refer`], as for all others.
        average (`Callable`, *optional*):
            The same.
        measured (`list`, *optional*):
            The same.
    """

    def __init__(
        self,
        start: State,
        outer: Callable[[Any], torch.optim.Optimizer] | None,
        average: Callable[[Sequence[State], Sequence[float], State], State] | None,
        measured: list[tuple[float, float, float]] | None,
    ) -> None:
        self.anchors = start
        self.outer = Outer(start, outer)
        self.average = average
        self.measured = measured

    def form(self, states: Sequence[State], weights: Sequence[float], turn: Collection[str] | None = None) -> State:
        """The model after an average; where there is an outer optimizer only what is in its turn makes a step."""
        mean = self.average(states, weights, self.anchors) if self.average else weighted_average(states, weights)
        chosen = mean if turn is None or self.outer.optimizer is None else turn
        stepped = {name: tensor for name, tensor in mean.items() if name in chosen}
        if self.measured is not None:
            self.measured.append(self._measure(states, mean, stepped))
        new = self.outer(stepped)
        self.anchors.update({name: tensor.clone() for name, tensor in new.items()})
        return {**mean, **new}

    def _measure(self, states: Sequence[State], mean: State, stepped: State) -> tuple[float, float, float]:
        drifts = [sum((state[name] - mean[name]).square().sum().item() for name in mean) for state in states]
        norm = sum(tensor.square().sum().item() for tensor in mean.values())
        moved = sum((self.anchors[name] - tensor).square().sum().item() for name, tensor in stepped.items())
        return sum(drifts) / len(drifts), norm, moved


class _Flight(NamedTuple):
    """An average that is on its way: after which step it is taken in, and of what."""

    lands_at: int
    snapshots: list[State]
    weights: list[float]


class _Rounds:
    """
    When what is averaged.

    Args:
        groups (`_Groups`):
            What trains.
        averages (`_Averages`):
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
        groups: _Groups,
        averages: _Averages,
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
            self.rounds += 1
        self.seen = [[0.0] * NUM_GROUPS for _ in self.parts]
        self.steps, self.to_come = 0, set(self.groups.names)

    def _land(self) -> None:
        flight = self.flights.popleft()
        self.groups.move(self.averages.form(flight.snapshots, flight.weights), flight.snapshots, 1 - self.alpha)

    def _shares(self, index: int) -> list[float]:
        counts = self.seen[index] if self.weighted and sum(self.seen[index]) else [1.0] * NUM_GROUPS
        self.seen[index] = [0.0] * NUM_GROUPS
        return [count / sum(counts) for count in counts]


class Outer:
    """An outer optimizer on whole tensors, stepped for some of them at a time."""

    def __init__(self, start: State, make: Callable[[Any], torch.optim.Optimizer] | None) -> None:
        self.anchors = {name: tensor.clone() for name, tensor in start.items()}
        self.optimizer = make(list(self.anchors.values())) if make else None

    def __call__(self, average: State) -> State:
        if self.optimizer is None:
            return average
        for name, anchor in self.anchors.items():
            anchor.grad = anchor - average[name] if name in average else None
        self.optimizer.step()
        return {name: self.anchors[name].detach().clone() for name in average}


class Delayed:
    """
    Uniform averaging with a delay in [`train_reference`], whose borders are the full ones.

    Args:
        period (`int`):
            H.
        delay (`int`):
            Steps between a snapshot and its outcome.
        borders (`Collection[int]`):
            Steps after which a full border follows.
    """

    def __init__(self, period: int, delay: int, borders: Collection[int]) -> None:
        self.period = period
        self.delay = delay
        self.borders = borders
        self.steps = 0
        self.flights: list[tuple[int, list[State]]] = []
        self.landed: list[int] = []

    @torch.no_grad()
    def __call__(self, number: int, models: list[nn.Module]) -> None:
        self.steps += 1
        while self.flights and (self.flights[0][0] <= number or number in self.borders):
            _, states = self.flights.pop(0)
            mean = weighted_average(states, [1 / len(states)] * len(states))
            for model, state in zip(models, states, strict=True):
                for name, value in state.items():
                    model.get_parameter(name).add_((mean[name] - value).to(value.dtype))
            self.landed.append(number)
        if number in self.borders:
            self.steps = 0
        elif self.steps == self.period:
            self.steps = 0
            states = [{name: param.detach().clone() for name, param in model.named_parameters()} for model in models]
            self.flights.append((number + self.delay, states))

"""The groups of the reference of delayed averaging, whole models in one process, and averages of them. No code of the package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from .outer_runs import num_samples, sum_over
from .overlap_runs import NUM_GROUPS, draws
from .reference_groups import State, weighted_average


class Groups:
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


class Averages:
    """
    Forms averages, and makes outer steps from them.

    Args:
        start (`dict[str, torch.Tensor]`):
            What all groups begin with.
        parts (`Sequence`):
            Names of the parameters of each fragment.
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
        parts: Sequence[Collection[str]],
        outer: Callable[[Any], torch.optim.Optimizer] | None,
        average: Callable[[Sequence[State], Sequence[float], State], State] | None,
        measured: list[tuple[float, float, float]] | None,
    ) -> None:
        self.anchors = start
        self.outer = Outer(start, outer)
        self.parts = parts
        self.average = average
        self.measured = measured

    def form(self, states: Sequence[State], weights: Sequence[float], turn: Collection[str] | None = None) -> State:
        """The model after an average; where there is an outer optimizer only what is in its turn makes a step."""
        mean = self._average(states, weights)
        chosen = mean if turn is None or self.outer.optimizer is None else turn
        stepped = {name: tensor for name, tensor in mean.items() if name in chosen}
        if self.measured is not None:
            self.measured.append(self._measure(states, mean, stepped))
        new = self.outer(stepped)
        self.anchors.update({name: tensor.clone() for name, tensor in new.items()})
        return {**mean, **new}

    def _average(self, states: Sequence[State], weights: Sequence[float]) -> State:
        if self.average is None:
            return weighted_average(states, weights)
        mean: State = {}
        for part in self.parts:
            own = [{name: state[name] for name in part if name in state} for state in states]
            mean |= self.average(own, weights, self.anchors) if own[0] else {}
        return mean

    def _measure(self, states: Sequence[State], mean: State, stepped: State) -> tuple[float, float, float]:
        drifts = [sum((state[name] - mean[name]).square().sum().item() for name in mean) for state in states]
        norm = sum(tensor.square().sum().item() for tensor in mean.values())
        moved = sum((self.anchors[name] - tensor).square().sum().item() for name, tensor in stepped.items())
        return sum(drifts) / len(drifts), norm, moved


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

"""The groups of the reference: full models, their optimizers and buffers, and averages of them. No code of the package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from .data import Batch


State = dict[str, torch.Tensor]


class Group:
    """
    One group. Parameters belong to it, buffers to a rank: nothing inside a group keeps those of its ranks equal.

    Args:
        model (`torch.nn.Module`):
            Its model.
        optimizer (`torch.optim.Optimizer`):
            Its optimizer.
        num_ranks (`int`):
            Its ranks.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_ranks: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.buffers = [clone(dict(model.named_buffers())) for _ in range(num_ranks)]

    def set_learning_rate(self, rate: float) -> None:
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate

    def backward(
        self,
        batches: Sequence[Sequence[Batch]],
        loss: Callable[[nn.Module, Batch, int], torch.Tensor],
        num_items: int,
    ) -> float:
        """The gradient of all of its ranks' micro-batches, and their loss; a synchronous step has those of all groups."""
        self.model.train()
        total = 0.0
        for rank, micro_batches in enumerate(batches):
            own = rank % len(self.buffers)
            load(dict(self.model.named_buffers()), self.buffers[own])
            for batch in micro_batches:
                value = loss(self.model, batch, num_items)
                value.backward()
                total += value.item()
            self.buffers[own] = clone(dict(self.model.named_buffers()))
        return total

    def clip(self, max_grad_norm: float | None) -> float:
        """The norm of the gradient before."""
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_groups(
    model_factory: Callable[[], nn.Module],
    optimizer_factory: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    num_groups: int,
    num_ranks: int,
) -> list[Group]:
    models = [model_factory()]
    models += [copy.deepcopy(models[0]) for _ in range(num_groups - 1)]
    optimizers = [optimizer_factory([p for p in model.parameters() if p.requires_grad]) for model in models]
    return [Group(model, optimizer, num_ranks) for model, optimizer in zip(models, optimizers, strict=True)]


def take(groups: Sequence[Group], parameters: State) -> None:
    """Gives all groups the same parameters, and all ranks the mean of their buffers."""
    of_all_ranks = [rank for group in groups for rank in group.buffers]
    buffers = weighted_average(of_all_ranks, [1.0 / len(of_all_ranks)] * len(of_all_ranks))
    for group in groups:
        load(trainable(group.model), parameters)
        for of_rank in group.buffers:
            load(of_rank, buffers)
        load(dict(group.model.named_buffers()), group.buffers[0])


def weighted_average(states: Sequence[State], weights: Sequence[float]) -> State:
    """
    The weighted sum of states, in fp32, or in fp64 for double tensors.

    Args:
        states (`Sequence[dict[str, torch.Tensor]]`):
            States with the same keys.
        weights (`Sequence[float]`):
            One weight per state.

    Returns:
        `dict[str, torch.Tensor]`: The average of the floating-point entries, in the precision of the sum.
    """
    average: State = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            dtype = torch.promote_types(first.dtype, torch.float32)
            average[name] = sum(  # type: ignore[assignment]
                state[name].detach().to(dtype) * weight for state, weight in zip(states, weights, strict=True)
            )
    return average


@torch.no_grad()
def average_moments(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for states in zip(*(list(optimizer.state.values()) for optimizer in optimizers), strict=True):
        for name, value in states[0].items():
            if value.ndim:
                mean = sum(state[name] for state in states) / len(states)
                for state in states:
                    state[name].copy_(mean)


def trainable(model: nn.Module) -> State:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def clone(state: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@torch.no_grad()
def load(target: State, source: State) -> None:
    for name in target.keys() & source.keys():
        target[name].copy_(source[name])

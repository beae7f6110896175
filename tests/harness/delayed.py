"""Averaging with a delay, in the reference of FedAvg. It shares no code with the package."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from .reference_groups import State, weighted_average


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

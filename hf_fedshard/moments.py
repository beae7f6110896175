"""What becomes of the inner optimizers' state at a border: kept, reset, or averaged over the groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor


MOMENT_RULES = ("keep", "reset", "average")


def moments_of(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """
    The moments that can be averaged: floating-point state of the shape of its parameter, such as Adam's two.

    Counters are left alone: they are single numbers and count the same steps in all groups.

    Args:
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        names (`Mapping[int, str]`):
            Names of the averaged parameters, by `id`.

    Returns:
        `tuple[dict[str, torch.Tensor], list[str]]`: This rank's shards by `<optimizer>/<parameter>/<state>`, aliasing the
        state; and what cannot be averaged, quantised state for example.
    """
    found: dict[str, torch.Tensor] = {}
    refused: list[str] = []
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = names.get(id(param))
                for key, value in optimizer.state.get(param, {}).items() if name is not None else ():
                    if not isinstance(value, torch.Tensor) or (value.ndim == 0 and param.ndim > 0):
                        continue
                    if value.shape == param.shape and value.is_floating_point():
                        held = value.detach()
                        found[f"{index}/{name}/{key}"] = held.to_local() if isinstance(held, DTensor) else held
                    else:
                        refused.append(f"{type(optimizer).__name__}: {key} of {name}")
    return found, refused


def reset_moments(optimizer: torch.optim.Optimizer, chosen: Callable[[Any], bool] = lambda param: True) -> None:
    """
    Lets an optimizer begin anew, as if it had made no step.

    Args:
        optimizer (`torch.optim.Optimizer`):
            An inner optimizer.
        chosen (`Callable[[torch.Tensor], bool]`, *optional*):
            For which of its parameters; by default for all.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in optimizer.state or not chosen(param):
                continue
            state = optimizer.state[param]
            if isinstance(optimizer, torch.optim.Adagrad):
                # Made at construction, not in the first step: without it there would be no next one.
                with torch.no_grad():
                    state["step"].zero_()
                    state["sum"].fill_(group["initial_accumulator_value"])
            else:
                del optimizer.state[param]

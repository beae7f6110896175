"""The moments in an optimizer's state: which there are, and how an optimizer begins anew without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .shards import local_part


MOMENT_RULES = ("keep", "reset", "average")


def moments_of(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """
    The moments that can be averaged: floating-point state of the shape of its parameter, such as Adam's two.

    Counters are no moments: what becomes of them where the groups count unlike says [`settle_counters`].

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
                    held = local_part(value)
                    # A subclass may say that it is floating-point and keep bytes, as torchao's optimizers do.
                    plain = type(held) is torch.Tensor and held.is_floating_point()
                    if value.shape == param.shape and plain:
                        found[f"{index}/{name}/{key}"] = held
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
            if not chosen(param):
                continue
            if isinstance(optimizer, torch.optim.Adagrad):
                # Made at construction, not in the first step: without it there would be no next one.
                state = optimizer.state[param]
                state["step"] = torch.zeros((), device=param.device if group.get("fused") else "cpu")
                state["sum"] = torch.full_like(param.detach(), group["initial_accumulator_value"])
            else:
                optimizer.state.pop(param, None)


def drop_stale_state(optimizer: torch.optim.Optimizer) -> None:
    """
    Frees what an optimizer keeps of parameters that it no longer steps: Adagrad makes its state when it is constructed,
    for whole parameters, before FSDP2 exchanges them for sharded ones.

    Args:
        optimizer (`torch.optim.Optimizer`):
            A prepared optimizer.
    """
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for param in [param for param in optimizer.state if id(param) not in stepped]:
        del optimizer.state[param]

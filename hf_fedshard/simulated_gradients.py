"""Synchronous steps of groups that one process holds: what FSDP2's hook does between processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .synchronous import SynchronousGradients


class SimulatedGradients(SynchronousGradients):
    """
    A group's part in synchronous steps. Its gradients become the mean over the groups by [`average_gradients`], between the
    backward passes of all groups and the optimizer step of any.

    Attributes:
        on (`bool`): Whether the steps of this round are synchronous.
        averaged (`bool`): Whether the gradients of the step that is being made have become the mean.
    """

    def __init__(self) -> None:
        self.on = False
        self.averaged = False

    def switch(self, on: bool) -> None:
        """See [`SynchronousGradients`]."""
        self.on = on
        self.averaged = False

    def check_step(self) -> None:
        """
        To be called ahead of an optimizer step of this group.

        Raises:
            RuntimeError: If the step is synchronous and the gradients are the group's own.
        """
        if self.on and not self.averaged:
            raise RuntimeError(
                "This step is synchronous (sync_steps_at_start, sync_steps_at_end), but its gradients are those of one "
                "group. Call `simulation.average_gradients()` when all groups have done their backward passes, and step "
                "the optimizers after it."
            )
        self.averaged = False


@torch.no_grad()
def average_gradients(models: Sequence[nn.Module], parts: Sequence[SimulatedGradients]) -> None:
    """
    Replaces the gradients of all groups by their mean, the same bits in each, as HSDP over all of them has it.

    Args:
        models (`Sequence[nn.Module]`):
            The model of each group, after its backward passes.
        parts (`Sequence[SimulatedGradients]`):
            The part of each, which counts what a group would have sent.

    Raises:
        ValueError: If some groups have a gradient of a parameter and others have none.
    """
    num_groups, num_bytes = len(models), 0
    for named in zip(*(model.named_parameters() for model in models), strict=True):
        gradients = [param.grad for _, param in named if param.grad is not None]
        if not gradients:
            continue
        if len(gradients) < num_groups:
            raise ValueError(
                f"{num_groups - len(gradients)} of {num_groups} groups have no gradient of {named[0][0]} in a synchronous "
                "step. All groups have to use the same layers in it, and none may step or clear its gradients before."
            )
        total = gradients[0].clone()
        half = total.dtype == torch.float16
        if half:
            total.div_(num_groups)  # ahead of the sum, which could overflow
        for gradient in gradients[1:]:
            total.add_(gradient, alpha=1 / num_groups if half else 1)
        if not half:
            total.div_(num_groups)
        for gradient in gradients:
            gradient.copy_(total)
        num_bytes += total.numel() * total.element_size()
    for part in parts:
        part.bytes_sent += 2 * num_bytes * (num_groups - 1) // num_groups
        part.averaged = True

"""Steps synchronised over all groups, at the start or the end of a federated run: one global batch, one update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .mesh import FederationMesh
from .tensors import note_reader


@dataclass(frozen=True)
class Phases:
    """
    Which steps of a run are synchronous.

    Args:
        at_start (`int`):
            Synchronous steps before the groups are federated.
        at_end (`int`):
            Synchronous steps at the end.
        num_training_steps (`int`, *optional*):
            Steps of the whole run; needed for those at the end.

    Raises:
        ValueError: If it is needed and missing.
    """

    at_start: int
    at_end: int
    num_training_steps: int | None

    def __post_init__(self) -> None:
        if self.at_end and self.num_training_steps is None:
            raise ValueError(
                f"sync_steps_at_end={self.at_end} needs the length of the run: call `plugin.federate(..., "
                "num_training_steps=...)` with the number of optimizer steps."
            )

    def is_synchronous(self, step: int) -> bool:
        """
        Whether a step is.

        Args:
            step (`int`):
                Steps behind it.
        """
        return step < self.at_start or step >= self._end

    def steps_left(self, step: int) -> float:
        """
        Steps to the next change, at which a round has to end; `inf` without one.

        Args:
            step (`int`):
                Steps behind.
        """
        changes = [change for change in (self.at_start, self._end) if change > step]
        return min(changes, default=float("inf")) - step

    @property
    def _end(self) -> float:
        if not self.at_end or self.num_training_steps is None:
            return float("inf")
        return max(0, self.num_training_steps - self.at_end)


class SynchronousGradients(ABC):
    """How the gradients of synchronous steps become the mean over the groups, and what that has sent."""

    bytes_sent: int = 0
    """What this rank has sent to other groups since it was last read: a ring sends 2N(P-1)/P of N bytes among P."""

    @abstractmethod
    def switch(self, on: bool) -> None:
        """
        Told at a border whether the next steps are synchronous.

        Args:
            on (`bool`):
                Whether. The same on all ranks.
        """

    def take_bytes(self) -> int:
        """Reads the count of bytes and begins a new one."""
        sent, self.bytes_sent = self.bytes_sent, 0
        return sent


class GradientSync(SynchronousGradients):
    """
    Averages gradients over the groups, in FSDP2's own seam for it.

    `FSDPModule.set_all_reduce_hook` runs a function on what FSDP2 has reduced inside the group, in the last micro-step of an
    accumulation window and ahead of clipping. The mean over the group's ranks becomes the mean over the world's, as under
    HSDP. Every group then holds the same gradient, bit for bit, so its norm, the update and the optimizer state are equal
    too.

    FSDP2 reduces only what a group has a gradient of, one behind the other. A head that one group uses and another does not
    would put the gradient of one parameter in the place of another's. So meanwhile it is told to reduce zeros for parameters
    without one (`FSDPModule.set_reduce_scatter_unused_params`).

    Args:
        model (`nn.Module`):
            The prepared model.
        mesh ([`FederationMesh`]):
            The federation.

    Raises:
        ValueError: If a module has a hook of somebody else's.
    """

    def __init__(self, model: nn.Module, mesh: FederationMesh) -> None:
        self.mesh = mesh
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._installed = False
        self._reduces_unused = [False for _ in self.modules]
        """What each module did about parameters without a gradient before the hook was put in."""
        for module in self.modules:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if group._all_reduce_hook is not None:
                    raise ValueError(
                        "A module has an all-reduce hook already (FSDPModule.set_all_reduce_hook), and synchronous steps "
                        "(sync_steps_at_start, sync_steps_at_end) need this place. Remove it, or set both to 0."
                    )

    def switch(self, on: bool) -> None:
        """
        Puts the hook in place or takes it out.

        Args:
            on (`bool`):
                Which. The same on all ranks.
        """
        if on == self._installed:
            return
        if on:
            self._reduces_unused = [_reduces_unused(module) for module in self.modules]
        for module, before in zip(self.modules, self._reduces_unused, strict=True):
            module.set_all_reduce_hook(self._average if on else None)  # type: ignore[arg-type]
            module.set_reduce_scatter_unused_params(on or before, recurse=False)
        self._installed = on

    @torch.no_grad()
    def _average(self, gradient: torch.Tensor) -> None:
        """
        Collective over the slow group, then over the replicas of the group. Every rank runs it for the same modules, those that
        its forward pass has used, in the order of the backward pass, and in this order inside. Which modules a step uses, and in
        which order, has to be the same in all groups; which of their parameters does not, see above.

        Each replica averages its slice and the replicas exchange them, so that the slow tier carries a gradient once for
        each group and not once for each replica.
        """
        # FSDP2 has allocated it on another stream, and may free it when it has cast a copy.
        note_reader([gradient])
        num_groups, replicas = self.mesh.layout.num_groups, self.mesh.layout.replicate_size
        if gradient.dtype == torch.float16:
            gradient.div_(num_groups)  # ahead of the sum, which could overflow
        if replicas == 1:
            part = gradient
            dist.all_reduce(part, group=self.mesh.fed)
        else:
            padding = -gradient.numel() % replicas
            whole = nn.functional.pad(gradient, (0, padding)) if padding else gradient
            part = whole.view(replicas, -1)[self.mesh.replicate_index].clone()
            dist.all_reduce(part, group=self.mesh.fed)
            dist.all_gather_single(whole, part, group=self.mesh.replicate)
            if padding:
                gradient.copy_(whole[: gradient.numel()])
        if gradient.dtype != torch.float16:
            gradient.div_(num_groups)
        self.bytes_sent += 2 * part.numel() * part.element_size() * (num_groups - 1) // num_groups


def _reduces_unused(module: FSDPModule) -> bool:
    """There is no public getter."""
    return any(group.reduce_scatter_unused_params for group in module._get_fsdp_state()._fsdp_param_groups)

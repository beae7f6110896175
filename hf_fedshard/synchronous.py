"""Steps synchronised over all groups, at the start or the end of a federated run: one global batch, one update."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .collectives import all_reduce
from .counters import counters_of, exchange_counts, settle_counters
from .exchange import run_exchange
from .exchange_plan import plan_exchange
from .initial import hold_the_same_bits
from .mesh import FederationMesh, Peers
from .metrics import exchange_rows
from .moments import reset_moments
from .shards import all_finite


logger = logging.getLogger(__name__)


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
        if on != self._installed:
            for module in self.modules:
                module.set_all_reduce_hook(self._average if on else None)  # type: ignore[arg-type]
            self._installed = on

    @torch.no_grad()
    def _average(self, gradient: torch.Tensor) -> None:
        """
        Collective over the slow group, then over the replicas of the group. Every rank runs it for the same modules in the
        order of the backward pass, which is the same on all ranks, and in this order inside.

        Each replica averages its slice and the replicas exchange them, so that the slow tier carries a gradient once for
        each group and not once for each replica.
        """
        if gradient.device.type != "cpu":
            # FSDP2 has allocated it on another stream, and may free it when it has cast a copy.
            gradient.record_stream(torch.accelerator.current_stream())
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


@torch.no_grad()
def unify_moments(
    optimizers: Sequence[torch.optim.Optimizer], mesh: Peers, bucket_size_bytes: int
) -> tuple[int, bool]:
    """
    Brings the groups' optimizer moments together, so that equal gradients give equal updates. Collective over the world, at
    a border.

    Order on every rank: the small exchange of what each holds, the comparison of bits, and if they differ the exchange of
    the step counters and that of the moments. What is done depends on exchanged values alone.

    Args:
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        mesh ([`Peers`]):
            The federation.
        bucket_size_bytes (`int`):
            Upper bound of an exchange buffer.

    Returns:
        `tuple[int, bool]`: Bytes that this rank has sent to other groups, and whether the moments had to be dropped, since
        some groups have none after a fault, or quantised ones, or no group's are finite. Groups whose moments are not
        finite take the average of the others'.
    """
    moments: dict[str, torch.Tensor] = {}
    counters: dict[str, torch.Tensor] = {}
    quantised = False
    for index, optimizer in enumerate(optimizers):
        for place, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
            for name, value in optimizer.state.get(param, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                local = value.to_local() if isinstance(value, DTensor) else value
                if value.ndim and not (local.is_floating_point() and type(local.detach()) is torch.Tensor):
                    quantised = True
                target = moments if value.ndim else counters
                target[f"{index}/{place}/{name}"] = local
    row = {
        "moments": len(moments),
        "quantised": quantised,
        "elements": sum(local.numel() for local in moments.values()),
        "not_finite": not all_finite(moments.values()),
    }
    rows, _ = exchange_rows({name: float(value) for name, value in row.items()}, mesh)
    equal = hold_the_same_bits([moments, counters], mesh) if _all_equal(rows) else False
    bad = [bool(count) for count in rows["not_finite"]]
    if equal and not any(bad):
        return 0, False
    why = "a group has lost its own" if not _all_equal(rows) else "no group's are finite" if all(bad) else ""
    why = "they are quantised" if any(rows["quantised"]) else why
    if why:
        for optimizer in optimizers:
            reset_moments(optimizer)
        if mesh.is_main:
            logger.warning(
                "The optimizer moments of the groups cannot be averaged before the synchronous steps at the end (%s): all "
                "groups begin them with fresh moments.",
                why,
            )
        return 0, True
    steps = counters_of(optimizers)
    counts = exchange_counts(steps, mesh)
    plan = plan_exchange(moments, mesh, bucket_size_bytes)
    weights = [float(not group) for group in bad]
    if any(bad) and dist.get_rank() == 0:
        logger.warning(
            "The optimizer moments of federation group %s are not finite. It takes the average of the others' for the "
            "synchronous steps at the end.",
            ", ".join(str(group) for group, found in enumerate(bad) if found),
        )
    run_exchange(plan, moments, mesh.device, weights[mesh.group_index], sum(weights))
    # Counters that differ, after a fault say: the largest, as when groups are merged. Other single numbers likewise.
    settle_counters(steps, counts, weights)
    for counter in counters.values():
        held = counter.to(mesh.device, copy=True)
        for group in (mesh.fed, mesh.group):
            all_reduce(held, group, "max")
        counter.copy_(held)
    return plan.slow_bytes(), False


def _all_equal(rows: dict[str, list[float]]) -> bool:
    return all(len(set(rows[name])) == 1 for name in ("moments", "elements"))

"""
A federated mesh that nobody averages is the worst silent fault: every group trains a model of its own and the run
looks fine. This module makes it raise.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .mesh import FederationMesh


if TYPE_CHECKING:
    from .rounds import Rounds

_group_ranks: list[frozenset[int]] = []
_rounds: weakref.WeakSet[Rounds] = weakref.WeakSet()
_mesh_ranks: weakref.WeakKeyDictionary[torch.optim.Optimizer, frozenset[int]] = weakref.WeakKeyDictionary()
_handle: Any = None


def watch(mesh: FederationMesh) -> None:
    """
    Watches every optimizer step of this process for parameters sharded inside one group of `mesh`.

    Uses torch's hook for all optimizers; after a step on such parameters it raises unless a [`Rounds`] is attached and
    not overdue by more than a round.

    Args:
        mesh ([`FederationMesh`]):
            The mesh that was handed to FSDP2. With one group there is nothing to average and nothing to watch.
    """
    global _handle
    if mesh.layout.num_groups == 1:
        return
    _group_ranks.append(mesh.group_ranks)
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_check)


def attach(rounds: Rounds) -> None:
    """Names the [`Rounds`] that averages the parameters it holds."""
    _rounds.add(rounds)


def detach(rounds: Rounds) -> None:
    """Forgets a [`Rounds`]: its parameters are averaged by nobody from here on."""
    _rounds.discard(rounds)


def is_watching() -> bool:
    """Whether optimizer steps are told to the [`Rounds`] that owns their parameters."""
    return _handle is not None


def reset() -> None:
    """Forgets all meshes and takes the hook out, for a process that starts over with new process groups."""
    global _handle
    _group_ranks.clear()
    _rounds.clear()
    if _handle is not None:
        _handle.remove()
        _handle = None


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    ranks = _mesh_ranks.get(optimizer)
    if ranks is None:
        ranks = _mesh_ranks[optimizer] = _ranks_of_sharded_parameters(optimizer)
    if not ranks or not any(ranks <= group for group in _group_ranks):
        return
    for rounds in _rounds:
        if rounds.owns(optimizer):
            # A fused optimizer is called by a gradient scaler even where it skips, and does so itself: on the device.
            rounds.note_optimizer_step(getattr(optimizer, "found_inf", None))
            return
    raise RuntimeError(
        "This optimizer steps parameters that are sharded inside a federation group, but nothing averages the groups: "
        "each would train a model of its own. With Trainer, give it callbacks=[FedAvgCallback(...)]; a second Trainer "
        "on the same model needs it too. In a loop of your own, call `fedavg = plugin.federate(accelerator, model, "
        "optimizer)` after `prepare`, `fedavg.step()` after each optimizer step and `fedavg.finish()` at the end."
    )


def _ranks_of_sharded_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, DTensor):
                return frozenset(param.device_mesh.mesh.flatten().tolist())
    return frozenset()

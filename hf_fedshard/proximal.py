"""The proximal term of FedProx: pulls every group towards the model with which the round began."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .shards import local_part


class ProximalTerm:
    """
    Adds the gradient of `mu / 2 * |w - anchor|^2` (FedProx, arXiv 1812.06127) to that of the loss, once for each step of
    an inner optimizer.

    It is added right before the step: after accumulation, so that it counts once whatever the number of micro-batches,
    after gradients were unscaled, and **after clipping**. Clipping bounds the noise of batches. The term has none, and
    clipped together a large pull would shrink the gradient of the data, and a large gradient the pull, just where the
    group runs away. The norm in the logs stays that of the loss.

    No communication: each rank adds to its shards.

    Args:
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        names (`Mapping[int, str]`):
            Names of the model's parameters, by `id`.
        anchors (`Mapping[str, torch.Tensor]`):
            The anchor's shards by name, looked up in each step. What has none is not pulled.
        mu (`float`):
            The paper's mu.
        pulls (`Callable[[], bool]`, *optional*):
            Whether the term is added in the step that is made; by default always.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[int, str],
        anchors: Mapping[str, torch.Tensor],
        mu: float,
        pulls: Callable[[], bool] = lambda: True,
    ) -> None:
        self.names = names
        self.anchors = anchors
        self.mu = mu
        self.pulls = pulls
        self._handles = [optimizer.register_step_pre_hook(self._add) for optimizer in optimizers]

    def remove(self) -> None:
        """Takes the term out."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _add(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.pulls():
            return
        # A fused optimizer unscales the gradients itself; where that is still to come, the term is scaled like them.
        scale = getattr(optimizer, "grad_scale", None)
        for group in optimizer.param_groups:
            for param in group["params"]:
                anchor = self.anchors.get(self.names.get(id(param), ""))
                if anchor is None or param.grad is None:
                    continue
                shard = local_part(param)
                # The anchor may live in host memory.
                term = shard.to(anchor.dtype) - anchor.to(shard.device)
                if scale is not None:
                    term.mul_(scale)
                local_part(param.grad).add_(term, alpha=self.mu)

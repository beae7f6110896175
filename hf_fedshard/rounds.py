"""The outer loop of one model: what a loop calls, how it begins and how it ends."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from . import guard
from .anchors import SharedAnchors
from .averaging import ModelAverager
from .closing_rounds import ClosingRounds
from .config import FederationConfig
from .course import Course
from .initial import agree_on_model, broadcast_initial_state
from .lora import freeze_first_factors
from .mesh import FederationMesh
from .metrics import RoundMetrics
from .moments import drop_stale_state
from .overlap import OverlappedAveraging
from .peers import OverlapPeers, Peers
from .proximal import ProximalTerm
from .shards import reshard
from .wire_bytes import warn_of_padding


logger = logging.getLogger(__name__)


class Rounds(ClosingRounds):
    """
    Federated averaging of one model (FL+FSDP and FL+HSDP, arXiv 2609.20359, with FedAvg of arXiv 1602.05629).

    In a loop of your own it is made by [`FederatedFSDPPlugin.federate`]; call [`~Rounds.step`] after each optimizer
    step and [`~Rounds.finish`] once at the end. [`FedAvgCallback`] drives one under Trainer.

    Args:
        model (`nn.Module`):
            The prepared FSDP2 model, sharded over the axes inside a group of `mesh`.
        mesh ([`FederationMesh`]):
            The federation.
        config ([`FederationConfig`]):
            Its settings.
        optimizers (`Iterable[torch.optim.Optimizer]`, *optional*):
            The inner optimizers. Their state stays with each group, unless `inner_moments` says otherwise; a group that
            was left out of an average because its parameters were not finite starts with fresh moments.
        one_model (`bool`, defaults to `True`):
            Whether all groups are to start with group 0's weights and buffers. Not where they resume inside a round.
        num_training_steps (`int`, *optional*):
            Optimizer steps of the whole run. Needed with `sync_steps_at_end`.

    Construction is collective over the world: it compares parameters between ranks, broadcasts group 0's weights and
    buffers, and verifies them.

    Raises:
        FederationMismatchError: If ranks hold different parameters or settings.
        ValueError: If the model cannot be federated, see [`check_trainable_parameters`], or the mesh has no communicators for
            `overlap_steps` or `slow_backend`.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: FederationMesh,
        config: FederationConfig,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        one_model: bool = True,
        num_training_steps: int | None = None,
    ) -> None:
        super().__init__(mesh, config, list(optimizers))
        # Only its number: an exception holds the frames that it has come through.
        self._begun_under = _describe(sys.exception())
        self.model = model
        for optimizer in self.optimizers:
            drop_stale_state(optimizer)
        reshard(model)
        self._when_finished: list[Callable[[], None]] = []
        if config.lora_average == "freeze_a" and mesh.layout.num_groups > 1:  # one group is plain training
            self.when_finished(freeze_first_factors(model, self.optimizers))
        tier = self._slow_tier(mesh)
        self.peers: Peers = mesh if tier is None else tier
        self._begin(mesh, one_model)
        self.averager = ModelAverager(model, self.peers, config, self.optimizers)
        self._anchors = SharedAnchors(self.averager)
        self._parameter_ids = {id(param) for param in model.parameters()}
        self.course = Course(model, mesh, config, self.optimizers, num_training_steps)
        self.course.begin()
        self.overlap = None
        if config.overlap_steps and tier is not None:
            self.overlap = OverlappedAveraging(self.averager, tier, config)
        warn_of_padding(self.averager, self.fragments)
        if config.proximal_mu and mesh.layout.num_groups > 1:
            names = {id(param): name for name, param in model.named_parameters()}
            anchors = self.averager.outer.anchors
            # Synchronous steps are those of one model: there is nothing to keep together.
            term = ProximalTerm(
                self.optimizers, names, anchors, config.proximal_mu, pulls=lambda: not self.synchronous
            )
            self.when_finished(term.remove)
        guard.attach(self)

    def _slow_tier(self, mesh: FederationMesh) -> OverlapPeers | None:
        """The communicators that the settings ask for: a mesh may have some that were made for another federation."""
        overlap_steps, slow_backend = self.config.overlap_steps, self.config.slow_backend
        if mesh.layout.num_groups == 1 or (not overlap_steps and slow_backend is None):
            return None
        tier = mesh.find_slow_tier(slow_backend)
        if tier is None:
            raise ValueError(
                f"overlap_steps={overlap_steps} and slow_backend={slow_backend!r} average on communicators of their own, which "
                "this mesh was built without. Build it with build_federation_mesh(..., with_slow_tier=True, slow_backend="
                f"{slow_backend!r}), or give it to add_slow_tier."
            )
        return tier

    def _begin(self, mesh: FederationMesh, one_model: bool) -> None:
        """Makes sure that all groups plan the same and, if they are to, hold one model. Collective over the world."""
        agree_on_model(self.model, self.optimizers, mesh, self.config)
        if mesh.layout.num_groups > 1 and one_model:
            started = time.perf_counter()
            broadcast_initial_state(self.model, mesh)
            # The model has crossed the slow link once, and the proof that it arrived has waited for the device. An averaging
            # sends up to twice as much, with both moments of the optimizer three times that.
            factor = 2 if self.config.inner_moments == "keep" else 6
            self.border_seconds = factor * (time.perf_counter() - started)

    def step(self, loss: torch.Tensor | float | None = None, tokens: int = 0, samples: int = 0) -> RoundMetrics | None:
        """
        To be called after every optimizer step: counts it, and averages the groups when the round is over.

        Call it once for each optimizer step that the loop attempts, also where a gradient scaler skipped it, since one
        group may skip and another not; with accumulation, only where `accelerator.sync_gradients` is true.

        Args:
            loss (`torch.Tensor` or `float`, *optional*):
                The step's training loss on this rank, for the metrics.
            tokens (`int`, defaults to `0`):
                Tokens that this rank trained on in the step, for the metrics and for `group_weights="tokens"`.
            samples (`int`, defaults to `0`):
                Samples that this rank trained on in the step, for `group_weights="samples"`.

        Returns:
            [`RoundMetrics`] or `None`: The metrics where a round ended, else `None`. With `overlap_steps` those of the last
            round, where its outcome was taken in; where a border takes in several, the others are their `earlier`.
        """
        if self.count_step(loss, tokens, samples) and self.needs_border:
            return self.close().report()
        border = self.advance()
        return None if border is None else border.metrics

    def finish(self) -> RoundMetrics | None:
        """
        Ends the federation: averages the last round even if it is short. Collective; call it on every rank, before the
        model is evaluated for the last time or saved.

        While an exception is on its way or being handled, in a `finally` or an `except` say, it averages nothing and waits for
        nobody: the other ranks may never come. A line in the log says so, and the federation goes on: behind the block it can be
        ended. An exception that was being handled when the federation began does not count.

        Returns:
            [`RoundMetrics`] or `None`: The metrics of the last round, in their `earlier` those of a round that was in flight;
            `None` if the model was at a border already.
        """
        metrics, error = None, sys.exception()
        if error is not None and _describe(error) != self._begun_under and not self.at_border:
            logger.error(
                "fedavg.finish() was called while %s is on its way or being handled, %d steps into a round: the groups were not "
                "averaged, and the federation has not ended. If all ranks have come here, call it behind the `except` block.",
                type(error).__name__,
                self.steps,
            )
            return None
        if not self.at_border:
            metrics = self.close().report()
        self.release()
        return metrics

    def release(self) -> None:
        """
        Gives the model up without averaging it: it may be evaluated and saved, and an optimizer step on it is refused.
        """
        guard.detach(self)
        self.course.release()
        if self.overlap is not None:
            self.overlap.abandon()
        for undo in self._when_finished:
            undo()
        self._when_finished.clear()

    def when_finished(self, undo: Callable[[], None]) -> None:
        """
        Has something done by [`~Rounds.finish`].

        Args:
            undo (`Callable`):
                Takes back what an adapter has set up for the time of the federation.
        """
        self._when_finished.append(undo)

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps parameters that this object averages."""
        return any(id(param) in self._parameter_ids for group in optimizer.param_groups for param in group["params"])

    def is_about(self, model: nn.Module) -> bool:
        """Whether this object averages a model: it, a part of it, or what is wrapped around it."""
        own = set(self.model.modules())
        return any(module in own for module in model.modules())


def _describe(error: BaseException | None) -> tuple[int, type[BaseException], str] | None:
    """An exception, without keeping alive what it refers to. An address alone may be that of a later one."""
    return None if error is None else (id(error), type(error), str(error))

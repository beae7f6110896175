"""One group of a simulation: a whole model, its inner optimizer, and rounds that need nothing agreed upon."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import FederationConfig
from .peers import OverlapPeers
from .rounds import Rounds
from .simulated_gradients import SimulatedGradients
from .simulated_peers import SimulatedPeers


class _SimulatedRounds(Rounds):
    """Rounds of a group that was copied from the others, so that nothing has to be agreed upon."""

    def _begin(self, mesh: Any, one_model: bool) -> None:
        pass

    def _slow_tier(self, mesh: Any) -> OverlapPeers:
        peers: OverlapPeers = mesh
        return peers


class SimulatedGroup:
    """
    One federation group, whose optimizer tells its rounds of every step.

    Args:
        index (`int`):
            g, its number.
        model (`nn.Module`):
            Its model, whole.
        optimizer (`torch.optim.Optimizer`):
            Its inner optimizer.
        peers ([`SimulatedPeers`]):
            Where it stands among the groups.
        config ([`FederationConfig`]):
            The settings.
        num_training_steps (`int`, *optional*):
            Optimizer steps of the whole run.
    """

    def __init__(
        self,
        index: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        peers: SimulatedPeers,
        config: FederationConfig,
        num_training_steps: int | None = None,
    ) -> None:
        self.index = index
        self.model = model
        self.optimizer = optimizer
        mesh: Any = peers
        self.rounds: Rounds = _SimulatedRounds(model, mesh, config, [optimizer], num_training_steps=num_training_steps)
        """What counts its steps."""
        self.rounds.counts_updates = True
        for handle in (optimizer.register_step_pre_hook(self._check), optimizer.register_step_post_hook(self._note)):
            self.rounds.when_finished(handle.remove)

    def count_step(self, loss: torch.Tensor | float | None = None, tokens: float = 0, samples: float = 0) -> None:
        """
        Counts a step of this group, as [`Rounds.count_step`].

        Args:
            loss (`torch.Tensor` or `float`, *optional*):
                Its training loss.
            tokens (`int`, defaults to `0`):
                Its tokens.
            samples (`int`, defaults to `0`):
                Its samples.
        """
        self.rounds.count_step(loss, tokens, samples)

    @property
    def gradients(self) -> SimulatedGradients | None:
        """What holds its part in synchronous steps, if there are any."""
        gradients = self.rounds.course.gradients
        assert gradients is None or isinstance(gradients, SimulatedGradients)
        return gradients

    def _check(self, *args: Any) -> None:
        if self.gradients is not None:
            self.gradients.check_step()

    def _note(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self.rounds.note_optimizer_step(getattr(optimizer, "found_inf", None))

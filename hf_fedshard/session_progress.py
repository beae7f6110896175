"""How far a Trainer's run has come inside a round: what a group that saves alone writes of it, and how it goes on from there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from .config import FederationConfig
from .held_requests import HeldRequests
from .manifest import CheckpointError
from .rounds import Rounds
from .session_reports import RoundReports
from .shared_errors import together


# Of Trainer, counted from the last log: exact logs need them where a run resumes inside a round.
TRAINER_COUNTERS = ("_tr_loss", "_globalstep_last_logged", "current_flos")


class SessionProgress:
    """
    Where this rank stands between two steps of a round.

    Args:
        trainer (`Trainer`):
            The Trainer.
        config ([`FederationConfig`]):
            The settings.
        rounds ([`Rounds`]):
            What counts the steps.
        requests ([`HeldRequests`]):
            What callbacks have asked for in the round.
        reports ([`RoundReports`]):
            The round's losses and tokens.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: FederationConfig,
        rounds: Rounds,
        requests: HeldRequests,
        reports: RoundReports,
    ) -> None:
        self.trainer = trainer
        self.config = config
        self.rounds = rounds
        self.requests = requests
        self.reports = reports

    @property
    def steps_left(self) -> int:
        """Steps to the end of the round, or of the training."""
        state = self.trainer.state
        return int(min(self.rounds.steps_left, state.max_steps - state.global_step))

    def state(self) -> dict[str, Any]:
        """Where this rank stands: what Trainer's own state does not hold. Plain values and tensors."""
        return {
            "rounds": self.rounds.state_inside(),
            "pending_flags": self.requests.names,
            **self.reports.state_inside(),
            "trainer": {name: getattr(self.trainer, name) for name in TRAINER_COUNTERS},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """
        Goes on inside a round. Collective over the world.

        Args:
            state (`dict[str, Any]`):
                From [`~SessionProgress.state`].

        Raises:
            CheckpointError: On every rank, if a group would have no step left to make.
        """
        trainer: Any = self.trainer
        self.rounds.restore_inside(state["rounds"])
        error = None
        if self.steps_left < 1:
            error = CheckpointError(
                f"This group stands at step {trainer.state.global_step}, {self.rounds.steps} steps into a round, and the "
                f"run ends at step {trainer.state.max_steps}, with sync_every={self.config.sync_every}. Resume with the "
                "max_steps or num_train_epochs, and the periods, of the run that was ended."
            )
        together("Resuming", error)
        self.requests.restore(state["pending_flags"])
        self.reports.restore_inside(state)
        for name, value in state["trainer"].items():
            held = getattr(trainer, name)
            setattr(trainer, name, value.to(held.device) if isinstance(held, torch.Tensor) else value)
        # The losses that are held are those since the last log, so Trainer's mean at the end is over the steps since then.
        trainer._initial_global_step = trainer._globalstep_last_logged

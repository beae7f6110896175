"""What the checkpoints of a Trainer know of the run that is saved or resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer

from .averaging import ModelAverager
from .checkpoint_state import GroupState, Place
from .config import FederationConfig
from .seams import check_attribute


class CheckpointedRun:
    """
    The run of one Trainer, between its training session and its checkpoints.

    Args:
        trainer (`Trainer`):
            The instance.
        place ([`Place`]):
            This rank's place in the federation.
        config ([`FederationConfig`]):
            Its settings.

    Raises:
        UpstreamChangedError: If the Trainer has not what is read of it.
    """

    def __init__(self, trainer: Trainer, place: Place, config: FederationConfig) -> None:
        for attribute in ("lr_scheduler", "hp_search_backend"):
            check_attribute(trainer, attribute)
        self.trainer: Any = trainer
        self.place = place
        self.config = config
        self.progress: dict[str, Any] = {}
        """From [`Rounds.state_dict`]: to be kept up to date by whoever has the rounds, and restored by a resume."""
        self.averager: ModelAverager | None = None
        """What holds the state of the outer loop, while training."""
        self.inside: dict[str, Any] | None = None
        """Where this rank stood, if the run resumes inside a round."""
        self.resumed_from: Path | None = None
        """The checkpoint, or this group's part of one, that training goes on from."""
        self.pending_evaluation = False
        """Whether the checkpoint that is saved next leaves an evaluation out, and later whether it is to be made up for."""

    def group_state(self) -> GroupState:
        """What belongs to this rank's group alone."""
        trainer = self.trainer
        others: dict[str, Any] = {"schedule": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            others["gradient scaler"] = trainer.accelerator.scaler
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return GroupState([optimizer], others)

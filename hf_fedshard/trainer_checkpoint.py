"""The checkpoints of a Trainer: how it saves and how it resumes, over one run."""

from __future__ import annotations

from transformers import Trainer

from .checkpoint_state import Place
from .checkpointed_run import CheckpointedRun
from .config import FederationConfig
from .trainer_resuming import TrainerResuming
from .trainer_saving import TrainerSaving


class TrainerCheckpoints:
    """
    Group-correct checkpoints of one Trainer, by replacing bound methods on this instance: [`TrainerSaving`] and
    [`TrainerResuming`].

    Args:
        trainer (`Trainer`):
            The instance.
        place ([`Place`]):
            This rank's place in the federation.
        config ([`FederationConfig`]):
            Its settings.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    def __init__(self, trainer: Trainer, place: Place, config: FederationConfig) -> None:
        self.run = CheckpointedRun(trainer, place, config)
        """What both know of the run, and whoever trains it tells them."""
        self._saving = TrainerSaving(self.run)
        self._resuming = TrainerResuming(self.run)

    def install(self) -> None:
        """Replaces the methods. Call once."""
        self._saving.install()
        self._resuming.install()

    def remove(self) -> None:
        """Puts every method back."""
        self._resuming.remove()
        self._saving.remove()

"""The checkpoints of a Trainer: how it saves, how it resumes, and how it ends before its time, over one run."""

from __future__ import annotations

from .checkpointed_run import CheckpointedRun
from .trainer_preemption import TrainerPreemption
from .trainer_resuming import TrainerResuming
from .trainer_saving import TrainerSaving
from .trainer_seams import TrainerSeams


class TrainerCheckpoints:
    """
    Group-correct checkpoints of one Trainer, by replacing bound methods on this instance: [`TrainerSaving`],
    [`TrainerResuming`] and, with `enable_jit_checkpoint`, [`TrainerPreemption`].

    Args:
        run ([`CheckpointedRun`]):
            What all of them know of the run, and whoever trains it tells them.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    def __init__(self, run: CheckpointedRun) -> None:
        self.run = run
        self.preemption: TrainerPreemption | None = None
        """Ends the run before its time, if the run allows that."""
        # The last one wraps what the others have put in place.
        self._parts: list[TrainerSeams] = [TrainerSaving(run), TrainerResuming(run)]
        if run.trainer.args.enable_jit_checkpoint:
            self.preemption = TrainerPreemption(run)
            self._parts.append(self.preemption)

    def install(self) -> None:
        """Replaces the methods. Call once."""
        for part in self._parts:
            part.install()

    def remove(self) -> None:
        """Puts every method back."""
        for part in reversed(self._parts):
            part.remove()

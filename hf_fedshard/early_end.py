"""Where a Trainer's run may end before its time: what its session asks of pre-emption at steps, epochs and borders."""

from __future__ import annotations

from transformers import Trainer, TrainerControl, TrainerState

from .mesh import FederationMesh
from .metrics import exchange_rows
from .preemption import TrainingPreempted
from .rounds import Rounds
from .scheduled_requests import epoch_is_whole
from .session_progress import SessionProgress
from .trainer_preemption import TrainerPreemption


TO_END = "to end"


class EarlyEnd:
    """
    Chooses the moment at which a run that was told to end saves and leaves. Without pre-emption nothing here communicates or
    has an effect.

    Args:
        preemption ([`TrainerPreemption`], *optional*):
            Ends the run, if the run allows that.
        trainer (`Trainer`):
            The Trainer.
        mesh ([`FederationMesh`]):
            The federation.
        rounds ([`Rounds`]):
            What counts the steps.
        progress ([`SessionProgress`]):
            Where this rank stands inside a round, for what each group saves alone.
    """

    def __init__(
        self,
        preemption: TrainerPreemption | None,
        trainer: Trainer,
        mesh: FederationMesh,
        rounds: Rounds,
        progress: SessionProgress,
    ) -> None:
        self.preemption = preemption
        self.trainer = trainer
        self.mesh = mesh
        self.rounds = rounds
        self.progress = progress
        self.still_to_arrive = False
        """Whether the run was resumed one step before its border: the others are told before that step."""
        self._alone_at_epoch_end = False
        self._epoch_has_ended = False
        # Until the step that was begun there is counted, weights and counters may be one apart.
        self._begun_at: int | None = None

    @property
    def leaving(self) -> bool:
        """Whether everything is saved and the run is being left."""
        return self.preemption is not None and self.preemption.leaving

    def requests(self) -> dict[str, bool]:
        """This rank's vote to end, under [`TO_END`]; empty without pre-emption."""
        return {} if self.preemption is None else {TO_END: self.preemption.protocol.requested()}

    def begin_epoch(self) -> None:
        """Told that an epoch begins."""
        self._epoch_has_ended = False

    def begin_step(self) -> None:
        """Told that a step begins; with pre-emption another group may have left before the one that ends the round."""
        self._begun_at = self.trainer.state.global_step
        if self.still_to_arrive:
            self.still_to_arrive = False
            self.wait_for_border(untouched=True)

    def give_up_step(self) -> None:
        """Told that the step that was begun will not be made."""
        self._begun_at = None

    def after_step(self, state: TrainerState) -> bool:
        """
        To be called at the end of a step that ends no round. Collective over the group with pre-emption, in synchronous steps
        over the world.

        Args:
            state (`TrainerState`):
                Trainer's.

        Returns:
            `bool`: Whether the round is to be closed here, for the run to end at that border. The same on all ranks.

        Raises:
            TrainingPreempted: If the group had to save by itself.
        """
        if self.preemption is None:
            return False
        if self.rounds.synchronous:
            # The groups make these steps together, so they end together, and here.
            asked = {name: float(value) for name, value in self.requests().items()}
            return any(exchange_rows(asked, self.mesh)[0][TO_END])
        if self.preemption.after_step(self.rounds, self.progress.steps_left, self.rounds.border_seconds):
            # An epoch that ends with this step has callbacks to be called, whose requests belong to what is saved.
            self._alone_at_epoch_end = epoch_is_whole(state)
            if not self._alone_at_epoch_end:
                self.preemption.leave_alone(self.rounds, self.progress.state())
        return False

    def end_epoch(self) -> None:
        """Told that the callbacks at the end of an epoch have been called."""
        self._epoch_has_ended = True

    def leave_at_epoch_end(self) -> None:
        """Leaves alone if that has waited for the end of the epoch. Collective over the group."""
        if self._alone_at_epoch_end:
            assert self.preemption is not None
            self.preemption.leave_alone(self.rounds, self.progress.state())

    def wait_for_border(self, untouched: bool = False) -> None:
        """
        Before a border that was not announced at the end of a step: with pre-emption another group may have left.

        Args:
            untouched (`bool`, defaults to `False`):
                Whether no step was made since the run was resumed.

        Raises:
            TrainingPreempted: If the border will not come, and the group has saved by itself.
        """
        if self.preemption is None or self.rounds.synchronous:
            return
        if not self.preemption.protocol.wait_for_border(self.rounds.round, self.rounds.border_seconds):
            self.preemption.leave_alone(self.rounds, self.progress.state(), untouched)

    def check_border_on_demand(self, in_round: bool) -> None:
        """
        Refuses a border on demand where the run could not be ended.

        Args:
            in_round (`bool`):
                Whether a round is running.

        Raises:
            TrainingPreempted: If the run has saved already, to end before its time.
            ValueError: On every rank, in the middle of a step.
        """
        if self.preemption is not None and self.preemption.leaving:
            raise TrainingPreempted(self.preemption.checkpoint, self.trainer.state.global_step)
        if in_round and self.preemption is not None and self._begun_at == self.trainer.state.global_step:
            raise ValueError(
                "evaluate(), predict(), save_model() or saving a checkpoint was called in the middle of optimizer step "
                f"{self._begun_at + 1}, where the run cannot be ended: a callback's on_pre_optimizer_step, on_optimizer_step "
                "and on_substep_end, or the loss. With enable_jit_checkpoint=True call it in on_step_end, or set that to "
                "False."
            )

    def end_if_asked(self, control: TrainerControl, asked: bool) -> None:
        """
        At a border, with what any rank has asked. A training that ends here anyway comes to its end.

        Args:
            control (`TrainerControl`):
                Trainer's, the same on all ranks.
            asked (`bool`):
                Whether any rank was told to end, the same on all ranks.
        """
        state = self.trainer.state
        ends = control.should_training_stop or state.global_step >= state.max_steps
        # An epoch that ends with this step has callbacks to be called, which may ask for an evaluation: it ends after them.
        comes_again = epoch_is_whole(state) and not self._epoch_has_ended
        if self.preemption is not None and asked and not ends and not comes_again and not self.preemption.due:
            self.preemption.end_at_border(control)

    def leave_if_due(self) -> None:
        """
        At a border, when Trainer has logged and saved: leaves if all ranks know that the run ends here. Collective over the
        world.

        Raises:
            TrainingPreempted: If it does.
        """
        if self.preemption is not None and self.preemption.due:
            self.preemption.leave_border()

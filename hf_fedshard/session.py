"""One `Trainer.train()`: its events -> rounds. Decides which step ends a round and holds every request until then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState

from .agreement import agree_on_training
from .batch_counts import BatchCounts
from .config import FederationConfig
from .early_end import EarlyEnd
from .held_requests import HeldRequests
from .mesh import FederationMesh
from .rounds import Rounds
from .scheduled_requests import ScheduledRequests
from .seams import check_attribute
from .session_borders import SessionBorders
from .session_progress import TRAINER_COUNTERS, SessionProgress
from .session_reports import RoundReports, announce_run
from .trainer_preemption import TrainerPreemption


class TrainingSession:
    """
    Drives the rounds of one training run. Made when training begins: construction is collective over the world.

    Args:
        trainer (`Trainer`):
            The Trainer, its model and optimizer prepared.
        mesh ([`FederationMesh`]):
            The federation.
        config ([`FederationConfig`]):
            Its settings.
        preemption ([`TrainerPreemption`], *optional*):
            Ends the run before its time, if the run allows that.
        inside (`dict[str, Any]`, *optional*):
            Where this rank stood inside a round, to go on from there: [`SessionProgress.state`].

    Raises:
        FederationMismatchError: On every rank, if the ranks plan different schedules or hold different models.
        ValueError: On every rank, if the model cannot be federated.
    """

    def __init__(
        self,
        trainer: Trainer,
        mesh: FederationMesh,
        config: FederationConfig,
        preemption: TrainerPreemption | None = None,
        inside: dict[str, Any] | None = None,
    ) -> None:
        self.trainer = trainer
        for attribute in (*TRAINER_COUNTERS, "_initial_global_step"):
            check_attribute(trainer, attribute)
        agree_on_training(trainer, at_border=inside is None)
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        model: Any = trainer.model
        self.rounds = Rounds(
            model,
            mesh,
            config,
            [optimizer],
            one_model=inside is None,
            num_training_steps=trainer.state.max_steps,
        )
        # Epochs begun, those of the run that is resumed included: a fraction is exact only to rounding.
        self.epoch = int((trainer.state.epoch or 0) + 1e-6)
        self._epoch_is_empty = True
        self.counts = BatchCounts(trainer, mesh, config)
        self.reports = RoundReports(trainer, mesh.layout.world_size, config.log_every_rounds)
        self._held_requests = HeldRequests()
        self._scheduled = ScheduledRequests(trainer)
        self._progress = SessionProgress(trainer, config, self.rounds, self._held_requests, self.reports)
        self._early_end = EarlyEnd(preemption, trainer, mesh, self.rounds, self._progress)
        self._borders = SessionBorders(
            trainer, mesh, self.rounds, self._held_requests, self._scheduled, self.reports, self._early_end
        )
        if inside is not None:
            self._progress.restore(inside)
            self._borders.in_round = True
            # Its last step is the next one, and the others are told before it.
            self._early_end.still_to_arrive = self._progress.steps_left == 1
        announce_run(trainer, config, mesh.layout.num_groups, self.rounds.course.period)

    def end(self) -> None:
        """Gives the rounds up: from here on the guard refuses steps on this model."""
        self._borders.in_round = False
        self.rounds.release()

    @property
    def in_round(self) -> bool:
        """Whether a round is running."""
        return self._borders.in_round

    @property
    def inside_groups(self) -> bool:
        """Whether collectives have to stay in the group: a round is running, and not one of synchronous steps."""
        return self.in_round and not self.rounds.synchronous

    def resume(self, state: Mapping[str, Any]) -> None:
        """
        Goes on where a checkpoint was made. Collective over the world.

        Args:
            state (`Mapping[str, Any]`):
                From [`Rounds.state_dict`]; empty at the beginning of a run, or if there were no groups.
        """
        # Steps are Trainer's, also where the checkpoint is of a run without groups.
        self.rounds.restore({"round": 0, **state, "steps": self.trainer.state.global_step})

    def before_event(self, event: str, control: TrainerControl) -> None:
        """
        To be called ahead of all callbacks.

        Args:
            event (`str`):
                Name of the event.
            control (`TrainerControl`):
                What the event comes with.
        """
        self._borders.show_withheld(event, control)
        if event == "on_epoch_end":
            # A stream may end inside an accumulation window: the step that was begun will not be made.
            self._early_end.give_up_step()

    def after_event(self, event: str, state: TrainerState, control: TrainerControl) -> None:
        """
        To be called after all callbacks have had an event, so that no request can slip by.

        Args:
            event (`str`):
                Name of the event, `"on_step_end"` for example.
            state (`TrainerState`):
                What the event came with.
            control (`TrainerControl`):
                What the event came with; requests in it are held back inside a round.
        """
        self._scheduled.note(event, state)
        self._borders.hold_withheld(control)
        if event == "on_epoch_begin":
            self.epoch += 1
            self._epoch_is_empty = True
            self._early_end.begin_epoch()
            self._held_requests.drop("should_epoch_stop")  # the epoch that was to be stopped is over
        elif event == "on_step_begin":
            self._begin_step()
        elif event == "on_pre_optimizer_step":
            self.rounds.note_begun()
        elif event == "on_substep_end":
            self._held_requests.hold_back(control)
        elif event == "on_step_end":
            self._end_step(state, control)
        elif event == "on_epoch_end":
            self._end_epoch(state, control)
        elif event == "on_train_end" and self.in_round and not self.rounds.at_border and not self._early_end.leaving:
            self._early_end.wait_for_border()
            self._borders.close(state, control, log_follows=False)

    def act(self, act: Callable[[], None]) -> None:
        """
        Where no round is running: has Trainer log, evaluate and save what is due, see [`SessionBorders.act`], and leaves if
        the run ends here. Collective over the world.

        Args:
            act (`Callable[[], None]`):
                Trainer's part.

        Raises:
            TrainingPreempted: If the run was told to end before its time.
        """
        self._borders.act(act)
        self._early_end.leave_if_due()

    @contextlib.contextmanager
    def border_on_demand(self) -> Iterator[None]:
        """
        A border for what is called directly inside a round, `trainer.evaluate()` in a callback for example: the round
        is closed first. Like the call itself, this needs every rank to make it at the same step.

        With pre-emption not in the middle of one: the border may never come, and what is saved instead would be trained
        weights of a step that counts as not made.

        Raises:
            TrainingPreempted: If the run has saved already, to end before its time.
            ValueError: On every rank, in the middle of a step, with pre-emption.
        """
        inside = self.in_round
        self._early_end.check_border_on_demand(inside)
        if inside:
            state = self.trainer.state
            self.counts.count_steps(self.rounds, state)
            if not self.rounds.at_border:
                self._borders.close_on_demand(state, self.trainer.control)
            self._borders.in_round = False
        try:
            yield
        finally:
            self._borders.in_round = inside
            if inside:
                # The step that was interrupted belongs to the next round.
                self.reports.begin_losses()

    def _begin_step(self) -> None:
        self._epoch_is_empty = False
        self._borders.at_border = False
        self._borders.in_round = True
        self._early_end.begin_step()
        self.rounds.begin_step()
        self.reports.begin_step()

    def _end_step(self, state: TrainerState, control: TrainerControl) -> None:
        self.counts.count_steps(self.rounds, state)
        if not self.rounds.at_border:
            self._held_requests.hold_back(control)
            if self._progress.steps_left <= 0 and self._borders.is_needed(state):
                # With pre-emption, all groups have said one step ago that they would come.
                self._borders.close(state, control)
                return
            if self.rounds.overlap is not None and not self.rounds.synchronous:
                self._borders.advance(state)
            elif self._early_end.after_step(state):
                self._borders.close(state, control)
                return
        if self.rounds.at_border:
            # Closed on demand in this very step, perhaps by a callback that was given the log of an earlier round: this is the
            # border that the requests wait for.
            self._borders.stay(control)
        else:
            # What was asked for with that log waits as well.
            self._held_requests.hold_back(control)

    def _end_epoch(self, state: TrainerState, control: TrainerControl) -> None:
        self._early_end.end_epoch()
        if self._epoch_is_empty and state.global_step == 0:
            # Only now is it known of a stream: looking ahead would lose the first example of one that can be read once.
            raise ValueError("The train_dataset is empty: its stream gave no batch. Give it at least one example.")
        if not self.in_round:
            return
        if self.rounds.at_border:
            # A callback has made it in this event, or a stream has ended inside an accumulation window: no step was made since
            # the last border, and it is the same on all ranks.
            self._borders.stay(control)
            return
        # A stream that gave nothing stops the training, and the last epoch ends it: no other border will come.
        ends_here = self._epoch_is_empty or self.epoch >= state.num_train_epochs
        self._held_requests.hold_back(control)
        self._early_end.leave_at_epoch_end()
        if ends_here:
            self._early_end.wait_for_border()
            self._borders.close(state, control)

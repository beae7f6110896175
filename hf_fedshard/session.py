"""One `Trainer.train()`: its events -> rounds. Decides which step ends a round and holds every request until then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerControl, TrainerState
from transformers.utils import logging

from .agreement import agree_on_training
from .checkpoint import together
from .config import FederationConfig
from .manifest import CheckpointError
from .mesh import FederationMesh
from .metrics import RoundMetrics, exchange_rows
from .preemption import TrainingPreempted
from .rounds import Rounds
from .scheduled import ScheduledRequests
from .seams import check_attribute
from .session_reports import RoundReports
from .trainer_preemption import TrainerPreemption, epoch_is_whole
from .weights import count_batch


logger = logging.get_logger(__name__)

# Of Trainer, counted from the last log: exact logs need them where a run resumes inside a round.
TRAINER_COUNTERS = ("_tr_loss", "_globalstep_last_logged", "current_flos")
TO_END = "to end"
FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")


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
            Where this rank stood inside a round, to go on from there: [`~TrainingSession.progress`].

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
        self.mesh = mesh
        self.config = config
        self.preemption = preemption
        self.in_round = False
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
        # Between the end of a round and the next step. Unlike `not in_round`, not before the first step.
        self._at_border = False
        # Whole epochs behind a resumed run; a fraction is exact only to rounding.
        # Epochs begun, those of the run that is resumed included.
        self.epoch = int((trainer.state.epoch or 0) + 1e-6)
        self._epoch_is_empty = True
        self._tokens = self._samples = self._labels = 0.0
        inner = mesh.layout.inner
        self._num_copies = inner.get("tp", 1) * inner.get("cp", 1)
        self._counted = trainer.state.global_step
        self._reports = RoundReports(trainer, mesh.layout.world_size, config.log_every_rounds)
        self._pending_flags: set[str] = set()
        self._scheduled = ScheduledRequests(trainer)
        self._alone_at_epoch_end = False
        self._epoch_has_ended = False
        # Until the step that was begun there is counted, weights and counters may be one apart.
        self._begun_at: int | None = None
        self._still_to_arrive = False
        if inside is not None:
            self._go_on_inside(inside)
        self._warn_of_few_borders()
        samples = trainer.get_total_train_batch_size(trainer.args) // mesh.layout.num_groups
        logger.info("  Train batch size of one weight update (a federation group's) = %d", samples)

    def progress(self) -> dict[str, Any]:
        """Where this rank stands between two steps of a round: what Trainer's own state does not hold."""
        return {
            "rounds": self.rounds.state_inside(),
            "pending_flags": sorted(self._pending_flags),
            **self._reports.state_inside(),
            "trainer": {name: getattr(self.trainer, name) for name in TRAINER_COUNTERS},
        }

    def _go_on_inside(self, state: dict[str, Any]) -> None:
        trainer: Any = self.trainer
        self.rounds.restore_inside(state["rounds"])
        error = None
        if self._steps_left < 1:
            error = CheckpointError(
                f"This group stands at step {trainer.state.global_step}, {self.rounds.steps} steps into a round, and the "
                f"run ends at step {trainer.state.max_steps}, with sync_every={self.config.sync_every}. Resume with the "
                "max_steps or num_train_epochs, and the periods, of the run that was ended."
            )
        together("Resuming", error)
        self._pending_flags = set(state["pending_flags"])
        self._reports.restore_inside(state)
        for name, value in state["trainer"].items():
            held = getattr(trainer, name)
            setattr(trainer, name, value.to(held.device) if isinstance(held, torch.Tensor) else value)
        # The losses that are held are those since the last log, so Trainer's mean at the end is over the steps since then.
        trainer._initial_global_step = trainer._globalstep_last_logged
        self.in_round = True
        # Its last step is the next one, and the others are told before it.
        self._still_to_arrive = self._steps_left == 1

    def end(self) -> None:
        """Gives the rounds up: from here on the guard refuses steps on this model."""
        self.in_round = False
        self.rounds.release()

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

    def before_event(self, event: str) -> None:
        """
        To be called ahead of all callbacks.

        Args:
            event (`str`):
                Name of the event.
        """
        if event == "on_epoch_end":
            # A stream may end inside an accumulation window: the step that was begun will not be made.
            self._begun_at = None

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
        if not self._at_border:  # else the request is met at once
            self._scheduled.note(event, state)
        if event == "on_epoch_begin":
            self.epoch += 1
            self._epoch_is_empty = True
            self._epoch_has_ended = False
            # The epoch that was to be stopped is over.
            self._pending_flags.discard("should_epoch_stop")
        elif event == "on_step_begin":
            self._begin_step()
        elif event == "on_substep_end":
            self._hold_back(control)
        elif event == "on_step_end":
            self._end_step(state, control)
        elif event == "on_epoch_end":
            self._end_epoch(state, control)
        elif event == "on_train_end" and self.in_round and not self.rounds.at_border and not self._leaving:
            self._wait_for_border()
            self._close(state, control)

    def after_border(self, control: TrainerControl) -> None:
        """
        To be called when Trainer has logged, evaluated and saved what was due: a stop that a callback asked for
        meanwhile on some ranks holds for all. Collective at a border, without effect inside a round.

        Args:
            control (`TrainerControl`):
                Trainer's.
        """
        if self._at_border:
            self._share(control, ("should_training_stop", "should_epoch_stop"))
            if self.preemption is not None and self.preemption.due:
                self.preemption.leave_border()

    def count_tokens(self, batches: list[Any]) -> None:
        """
        Counts this rank's samples and input tokens for the log and the weights.

        Args:
            batches (`list`):
                The batches of the coming optimizer step.
        """
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        # By which Trainer itself counts the tokens of a loss; earlier ones take every model for a causal one.
        shifts_labels = getattr(self.trainer, "_loss_shifts_labels", True)
        for batch in batches:
            tokens = batch.get(name) if hasattr(batch, "get") else None
            # Ranks of a tensor or context parallel axis are given the same batch.
            if isinstance(tokens, torch.Tensor):
                self._tokens += tokens.numel() / self._num_copies
            samples, labels = count_batch(batch, self.config.group_weights != "uniform", shifts_labels)
            self._samples += samples / self._num_copies
            self._labels += (labels or 0) / self._num_copies

    @property
    def last_round(self) -> RoundMetrics | None:
        """Metrics of the last round; `None` before its first border."""
        return self._reports.last_round

    def take_pending_logs(self) -> dict[str, float]:
        """The metrics of the last round that have not been logged, once."""
        return self._reports.take_pending_logs()

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
        if self.preemption is not None and self.preemption.leaving:
            raise TrainingPreempted(self.preemption.checkpoint, self.trainer.state.global_step)
        inside = self.in_round
        if inside and self.preemption is not None and self._begun_at == self.trainer.state.global_step:
            raise ValueError(
                "evaluate(), predict(), save_model() or saving a checkpoint was called in the middle of optimizer step "
                f"{self._begun_at + 1}, where the run cannot be ended: a callback's on_pre_optimizer_step, on_optimizer_step "
                "and on_substep_end, or the loss. With enable_jit_checkpoint=True call it in on_step_end, or set that to "
                "False."
            )
        if inside:
            state = self.trainer.state
            self._count_steps(state)
            if not self.rounds.at_border:
                self._hold_back(self.trainer.control)
                self._wait_for_border()
                self._close(state, self.trainer.control)
            self.in_round = False
        try:
            yield
        finally:
            self.in_round = inside
            if inside:
                # The step that was interrupted belongs to the next round.
                self._reports.begin_losses()

    def _warn_of_few_borders(self) -> None:
        config, max_steps = self.config, self.trainer.state.max_steps
        if not self.trainer.is_world_process_zero():
            return
        synchronous = config.sync_steps_at_start + config.sync_steps_at_end
        period = self.rounds.course.period
        if synchronous >= max_steps:
            logger.warning(
                "sync_steps_at_start=%d and sync_steps_at_end=%d are all of the %d steps of this run: it is synchronous "
                "throughout.",
                config.sync_steps_at_start,
                config.sync_steps_at_end,
                max_steps,
            )
        elif period > max_steps - synchronous:
            logger.warning(
                "sync_every=%s is more than the %d federated steps of this run: the groups are averaged once, at their end.",
                config.sync_every,
                max_steps - synchronous,
            )

    def _begin_step(self) -> None:
        self._epoch_is_empty = False
        self._at_border = False
        self._begun_at = self.trainer.state.global_step
        self.in_round = True
        if self._still_to_arrive:
            self._still_to_arrive = False
            self._wait_for_border(untouched=True)
        self.rounds.begin_step()
        self._reports.begin_losses()

    def _end_step(self, state: TrainerState, control: TrainerControl) -> None:
        self._count_steps(state)
        self._at_border = self.rounds.at_border
        if self._at_border:
            # Closed on demand in this very step: this is the border that the requests wait for.
            self.in_round = False
            self._share(control, FLAGS)
            return
        self._hold_back(control)
        if self._steps_left <= 0 and self._needs_border(state):
            # With pre-emption, all groups have said one step ago that they would come.
            self._close(state, control)
        elif self.rounds.overlap is not None and not self.rounds.synchronous:
            self._advance(state)
        elif self.preemption is None:
            return
        elif self.rounds.synchronous:
            # The groups make these steps together, so they end together, and here.
            asked = {name: float(value) for name, value in self._asked_to_end().items()}
            if any(exchange_rows(asked, self.mesh)[0][TO_END]):
                self._close(state, control)
        elif self.preemption.after_step(self.rounds, self._steps_left, self._border_seconds):
            # An epoch that ends with this step has callbacks to be called, whose requests belong to what is saved.
            self._alone_at_epoch_end = epoch_is_whole(state)
            if not self._alone_at_epoch_end:
                self.preemption.leave_alone(self.rounds, self.progress())

    def _end_epoch(self, state: TrainerState, control: TrainerControl) -> None:
        self._epoch_has_ended = True
        if self._epoch_is_empty and state.global_step == 0:
            # Only now is it known of a stream: looking ahead would lose the first example of one that can be read once.
            raise ValueError("The train_dataset is empty: its stream gave no batch. Give it at least one example.")
        if not self.in_round:
            if self._at_border:
                self._share(control, FLAGS)
            return
        # A stream that gave nothing stops the training, and the last epoch ends it: no other border will come.
        ends_here = self._epoch_is_empty or self.epoch >= state.num_train_epochs
        if ends_here and self.rounds.at_border:
            # A stream that ended inside an accumulation window: no step was made since the last border, and it is the
            # same on all ranks, so there is nothing to average or to agree about.
            self.in_round = False
            return
        self._hold_back(control)
        if self._alone_at_epoch_end:
            assert self.preemption is not None
            self.preemption.leave_alone(self.rounds, self.progress())
        if ends_here:
            self._wait_for_border()
            self._close(state, control)

    @property
    def _steps_left(self) -> int:
        """Steps to the end of the round, or of the training."""
        state = self.trainer.state
        return int(min(self.rounds.steps_left, state.max_steps - state.global_step))

    @property
    def _leaving(self) -> bool:
        return self.preemption is not None and self.preemption.leaving

    @property
    def _border_seconds(self) -> float:
        return self.rounds.border_seconds

    def _wait_for_border(self, untouched: bool = False) -> None:
        """Before a border that was not announced at the end of a step: with pre-emption another group may have left."""
        if self.preemption is None or self.rounds.synchronous:
            return
        if not self.preemption.protocol.wait_for_border(self.rounds.round, self._border_seconds):
            self.preemption.leave_alone(self.rounds, self.progress(), untouched)

    def _share(self, control: TrainerControl, flags: Sequence[str]) -> None:
        """At a border: what any rank asks for holds for all."""
        asked = {flag: bool(getattr(control, flag)) for flag in flags} | self._asked_to_end()
        rows, _ = exchange_rows({name: float(value) for name, value in asked.items()}, self.mesh)
        for flag in flags:
            setattr(control, flag, any(rows[flag]))
        self._end_if_asked(control, any(rows.get(TO_END, ())))

    def _asked_to_end(self) -> dict[str, bool]:
        return {} if self.preemption is None else {TO_END: self.preemption.protocol.requested()}

    def _end_if_asked(self, control: TrainerControl, asked: bool) -> None:
        """At a border, with what any rank has asked. A training that ends here anyway comes to its end."""
        state = self.trainer.state
        ends = control.should_training_stop or state.global_step >= state.max_steps
        # An epoch that ends with this step has callbacks to be called, which may ask for an evaluation: it ends after them.
        comes_again = epoch_is_whole(state) and not self._epoch_has_ended
        if self.preemption is not None and asked and not ends and not comes_again and not self.preemption.due:
            self.preemption.end_at_border(control)

    def _count_steps(self, state: TrainerState) -> None:
        # By `global_step`, not by updates: a gradient scaler may skip an update in one group only.
        while self._counted < state.global_step:
            self.rounds.count_step(tokens=self._tokens, samples=self._samples, labels=self._labels)
            self._tokens = self._samples = self._labels = 0.0
            self._counted += 1

    def _hold_back(self, control: TrainerControl) -> None:
        for flag in FLAGS:
            if getattr(control, flag):
                self._pending_flags.add(flag)
                setattr(control, flag, False)

    def _needs_border(self, state: TrainerState) -> bool:
        """
        Whether the round that is over ends with one model. With `overlap_steps` only where somebody needs it; the same on all
        ranks, since schedules are, and requests of other callbacks have come with the last averaging.
        """
        return self.rounds.needs_border or self._scheduled.pending or self._scheduled.is_over(state)

    def _advance(self, state: TrainerState) -> None:
        """With `overlap_steps`, after a step that makes no border: takes in and starts what is due."""
        rounds, sums = self.rounds, {}
        if rounds.is_due:
            self._reports.end_losses(rounds)
            self._reports.begin_losses()
            sums = {"tokens_seen": self._reports.take_tokens(state)}
        votes = {flag: flag in self._pending_flags for flag in FLAGS}
        border = rounds.advance(votes, sums)
        if border is not None:
            self._reports.note_tokens(border, state)
            self._reports.note_round(border)

    def _close(self, state: TrainerState, control: TrainerControl) -> None:
        """The border: averages, takes the union of all ranks' requests, and hands the metrics to Trainer's log."""
        reports = self._reports
        reports.end_losses(self.rounds)
        votes = {flag: flag in self._pending_flags for flag in FLAGS} | self._asked_to_end()
        border = self.rounds.close(votes, {"tokens_seen": reports.take_tokens(state)})
        for each in (*border.earlier, border):
            reports.note_tokens(each, state)
        self._pending_flags.clear()
        self._scheduled.pending = False
        self.in_round = False
        self._at_border = True
        for flag in FLAGS:
            if border.votes[flag]:
                setattr(control, flag, True)
        self._end_if_asked(control, border.votes.get(TO_END, False))
        for earlier in border.earlier:
            reports.note_round(earlier)
        if border.metrics not in [earlier.metrics for earlier in border.earlier]:
            # One line a round: Trainer's own where it is due, else one for the metrics.
            follows = control.should_log and state.global_step > self.trainer._globalstep_last_logged
            reports.note_round(border, logs_follow=follows)

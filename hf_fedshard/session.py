"""One `Trainer.train()`: its events -> rounds. Decides which step ends a round and holds every request until then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerControl, TrainerState
from transformers.utils import logging

from .agreement import agree_on_training
from .config import FederationConfig
from .mesh import FederationMesh
from .metrics import RoundMetrics, exchange_rows
from .rounds import Rounds
from .seams import check_attribute
from .weights import count_batch


logger = logging.get_logger(__name__)

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

    Raises:
        FederationMismatchError: On every rank, if the ranks plan different schedules or hold different models.
        ValueError: On every rank, if the model cannot be federated.
    """

    def __init__(self, trainer: Trainer, mesh: FederationMesh, config: FederationConfig) -> None:
        self.trainer = trainer
        self.mesh = mesh
        self.config = config
        self.in_round = False
        for attribute in ("_tr_loss", "_globalstep_last_logged"):
            check_attribute(trainer, attribute)
        agree_on_training(trainer)
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        model: Any = trainer.model
        self.rounds = Rounds(model, mesh, config, [optimizer])
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
        self._losses_before: torch.Tensor | None = None
        self._tokens_seen_before = trainer.state.num_input_tokens_seen
        self._pending_flags: set[str] = set()
        self._pending_logs: dict[str, float] = {}
        self.last_round: RoundMetrics | None = None
        if config.sync_every > trainer.state.max_steps and trainer.is_world_process_zero():
            logger.warning(
                "sync_every=%d is more than the %d steps of this run: the groups are averaged once, at its end.",
                config.sync_every,
                trainer.state.max_steps,
            )
        samples = trainer.get_total_train_batch_size(trainer.args) // mesh.layout.num_groups
        logger.info("  Train batch size of one weight update (a federation group's) = %d", samples)

    def end(self) -> None:
        """Gives the rounds up: from here on the guard refuses steps on this model."""
        self.in_round = False
        self.rounds.release()

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
        if event == "on_epoch_begin":
            self.epoch += 1
            self._epoch_is_empty = True
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
        elif event == "on_train_end" and self.in_round and not self.rounds.at_border:
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

    def count_tokens(self, batches: list[Any]) -> None:
        """
        Counts this rank's input tokens for the log.

        Args:
            batches (`list`):
                The batches of the coming optimizer step.
        """
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        for batch in batches:
            tokens = batch.get(name) if hasattr(batch, "get") else None
            # Ranks of a tensor or context parallel axis are given the same batch.
            self._tokens += tokens.numel() / self._num_copies if isinstance(tokens, torch.Tensor) else 0
            if self.config.group_weights != "uniform":  # counting labels waits for the device
                samples, labels = count_batch(batch)
                self._samples += samples / self._num_copies
                self._labels += (labels or 0) / self._num_copies

    def take_pending_logs(self) -> dict[str, float]:
        """The metrics of the last round that have not been logged, once."""
        logs, self._pending_logs = self._pending_logs, {}
        return logs

    @contextlib.contextmanager
    def border_on_demand(self) -> Iterator[None]:
        """
        A border for what is called directly inside a round, `trainer.evaluate()` in a callback for example: the round
        is closed first. Like the call itself, this needs every rank to make it at the same step.
        """
        inside = self.in_round
        if inside:
            state = self.trainer.state
            self._count_steps(state)
            if not self.rounds.at_border:
                self._close(state, self.trainer.control)
            self.in_round = False
        try:
            yield
        finally:
            self.in_round = inside
            if inside and self._losses_before is None:
                # The step that was interrupted belongs to the next round.
                self._losses_before = self._train_losses()

    def _begin_step(self) -> None:
        self._epoch_is_empty = False
        self._at_border = False
        self.in_round = True
        self.rounds.begin_step()
        if self._losses_before is None:
            self._losses_before = self._train_losses()

    def _end_step(self, state: TrainerState, control: TrainerControl) -> None:
        self._count_steps(state)
        self._at_border = self.rounds.at_border
        if self._at_border:
            # Closed on demand in this very step: this is the border that the requests wait for.
            self.in_round = False
            self._share(control, FLAGS)
            return
        self._hold_back(control)
        if self.rounds.steps >= self.config.sync_every or state.global_step >= state.max_steps:
            self._close(state, control)

    def _end_epoch(self, state: TrainerState, control: TrainerControl) -> None:
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
        if ends_here:
            self._close(state, control)

    def _share(self, control: TrainerControl, flags: Sequence[str]) -> None:
        """At a border: what any rank asks for holds for all."""
        rows, _ = exchange_rows({flag: float(getattr(control, flag)) for flag in flags}, self.mesh)
        for flag in flags:
            setattr(control, flag, any(rows[flag]))

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

    def _close(self, state: TrainerState, control: TrainerControl) -> None:
        """The border: averages, takes the union of all ranks' requests, and hands the metrics to Trainer's log."""
        rounds = self.rounds
        if self._losses_before is not None and rounds.steps:
            rounds.add_loss(self._train_losses() - self._losses_before, num_losses=rounds.steps)
        # Inside a round Trainer counts as if all groups saw as many tokens as this one; the true sum is due now.
        seen = (state.num_input_tokens_seen - self._tokens_seen_before) / self.mesh.layout.world_size
        border = rounds.close({flag: flag in self._pending_flags for flag in FLAGS}, {"tokens_seen": seen})
        self._tokens_seen_before += round(border.sums["tokens_seen"])
        state.num_input_tokens_seen = self._tokens_seen_before
        self._losses_before = None
        self._pending_flags.clear()
        self.in_round = False
        self._at_border = True
        for flag, wanted in border.votes.items():
            if wanted:
                setattr(control, flag, True)
        self.last_round = border.metrics
        every = self.config.log_every_rounds
        if every and border.metrics.round % every == 0:
            self._pending_logs = border.metrics.as_logs()
            # One line a round: Trainer's own where it is due, else one for the metrics.
            if not (control.should_log and state.global_step > self.trainer._globalstep_last_logged):
                # Not a subclass's `log`: those of TRL add what they have collected since Trainer's own last line.
                Trainer.log(self.trainer, self.take_pending_logs())

    def _train_losses(self) -> torch.Tensor:
        """Sum of this rank's training losses since Trainer last logged, left on the device."""
        return self.trainer._tr_loss.detach().clone()

"""What a Trainer's log says of rounds: their losses, tokens and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerState
from transformers.utils import logging

from .border import Border
from .config import FederationConfig
from .metrics import RoundMetrics
from .rounds import Rounds


logger = logging.get_logger(__name__)


class RoundReports:
    """
    Keeps the books of one training run between Trainer and its rounds.

    Args:
        trainer (`Trainer`):
            The Trainer.
        world_size (`int`):
            Ranks of all groups.
        log_every_rounds (`int`):
            Rounds between two logs of metrics; 0 for none.
    """

    def __init__(self, trainer: Trainer, world_size: int, log_every_rounds: int) -> None:
        self.trainer = trainer
        self.world_size = world_size
        self.log_every_rounds = log_every_rounds
        self.last_round: RoundMetrics | None = None
        self._losses_before: torch.Tensor | None = None
        # `global_step` at which the last step was begun, and the losses up to there.
        self._begun: tuple[int, torch.Tensor] | None = None
        self._tokens_seen_before = trainer.state.num_input_tokens_seen
        # Of rounds whose averaging is in flight: what this rank took their tokens for.
        self._estimates: list[int] = []
        self._pending_logs: dict[str, float] = {}

    def state_inside(self) -> dict[str, Any]:
        """Where the books stand inside a round."""
        return {"losses_before": self._losses_before, "tokens_seen_before": self._tokens_seen_before}

    def restore_inside(self, state: Mapping[str, Any]) -> None:
        """
        Goes on inside a round.

        Args:
            state (`Mapping[str, Any]`):
                Holds what [`~RoundReports.state_inside`] gave.
        """
        self._losses_before = state["losses_before"]
        self._tokens_seen_before = state["tokens_seen_before"]

    def begin_step(self) -> None:
        """Told that a step begins, the first of a round perhaps."""
        self._begun = None
        self._begun = (self.trainer.state.global_step, self._losses_of_steps())
        self.begin_losses()

    def begin_losses(self) -> None:
        """Begins to count the losses of a round, unless that has begun."""
        if self._losses_before is None:
            self._losses_before = self._losses_of_steps()

    def forget_losses(self) -> None:
        """Told at a border that the next round begins with the next step: Trainer may log before it, and count anew."""
        self._losses_before = self._begun = None

    def end_losses(self, rounds: Rounds) -> None:
        """
        Hands the losses of the round that ends over.

        Args:
            rounds ([`Rounds`]):
                What closes it.
        """
        if self._losses_before is not None and rounds.steps:
            rounds.add_loss(self._losses_of_steps() - self._losses_before, num_losses=rounds.steps)
        self._losses_before = None

    def take_tokens(self, state: TrainerState) -> float:
        """
        This rank's share of the tokens of the round that ends. Inside a round Trainer counts as if all groups saw as many as
        this one; the true sum comes with the averaging.

        Args:
            state (`TrainerState`):
                Trainer's.
        """
        estimate = state.num_input_tokens_seen - self._tokens_seen_before
        self._estimates.append(estimate)
        self._tokens_seen_before += estimate
        return estimate / self.world_size

    def note_tokens(self, border: Border, state: TrainerState) -> None:
        """
        Puts the true sum in the place of the estimate.

        Args:
            border ([`Border`]):
                Of the round whose tokens were taken first.
            state (`TrainerState`):
                Trainer's.
        """
        correction = round(border.sums["tokens_seen"]) - self._estimates.pop(0)
        self._tokens_seen_before += correction
        state.num_input_tokens_seen += correction

    def note_round(self, border: Border, logs_follow: bool = False) -> None:
        """
        Hands the metrics of a round to the log.

        Args:
            border ([`Border`]):
                With the metrics.
            logs_follow (`bool`, defaults to `False`):
                Whether Trainer is about to log, so that they come in its line.
        """
        self.last_round = border.metrics
        every = self.log_every_rounds
        if every and border.metrics.round % every == 0:
            self._pending_logs = border.metrics.as_logs()
            if not logs_follow:
                # Not a subclass's `log`: those of TRL add what they have collected since Trainer's own last line.
                Trainer.log(self.trainer, self.take_pending_logs())

    def take_pending_logs(self) -> dict[str, float]:
        """The metrics of the last round that have not been logged, once."""
        logs, self._pending_logs = self._pending_logs, {}
        return logs

    def _losses_of_steps(self) -> torch.Tensor:
        """
        Sum of this rank's training losses since Trainer last logged, left on the device. In the middle of a step without those
        of the step, which is not counted yet.
        """
        if self._begun is not None and self._begun[0] == self.trainer.state.global_step:
            return self._begun[1]
        return self.trainer._tr_loss.detach().clone()


def announce_run(trainer: Trainer, config: FederationConfig, num_groups: int, period: int) -> None:
    """
    Says at the beginning of a run how large a step of a group is, and, on one rank, if the groups will hardly be averaged.

    Args:
        trainer (`Trainer`):
            The Trainer.
        config ([`FederationConfig`]):
            The settings.
        num_groups (`int`):
            How many groups there are.
        period (`int`):
            H of the first round.
    """
    samples = trainer.get_total_train_batch_size(trainer.args) // num_groups
    logger.info("  Train batch size of one weight update (a federation group's) = %d", samples)
    max_steps = trainer.state.max_steps
    if not trainer.is_world_process_zero():
        return
    synchronous = config.sync_steps_at_start + config.sync_steps_at_end
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

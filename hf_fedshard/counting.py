"""Counts the steps of a round, and knows whether it is over. No averaging, and no communication."""

from __future__ import annotations

import time

import torch

from . import guard
from .averaging import ModelAverager
from .config import FederationConfig
from .course import Course
from .metrics import Tally
from .overlap import OverlappedAveraging
from .peers import Peers


class RoundCounter:
    """
    The counting half of [`Rounds`]: everything that happens between two averagings, without communication.

    Args:
        mesh ([`Peers`]):
            The federation.
        config ([`FederationConfig`]):
            Its settings.
        optimizers (`list[torch.optim.Optimizer]`):
            The inner optimizers.
    """

    averager: ModelAverager
    course: Course
    overlap: OverlappedAveraging | None
    """What averages beside the steps, with `overlap_steps` and several groups."""

    def __init__(self, mesh: Peers, config: FederationConfig, optimizers: list[torch.optim.Optimizer]) -> None:
        self.mesh = mesh
        self.config = config
        self.optimizers = optimizers
        self.round = 0
        self.steps = 0
        self.num_optimizer_steps = 0
        self.num_skipped_steps: torch.Tensor | float = 0.0
        """Those of them that fused optimizers have skipped, on the device."""
        self._begun = False
        self.counts_updates = False
        """Whether somebody other than the guard tells of every optimizer step."""
        self.unique_share = 1.0
        """How much of the data counts as new for the weights, where a group repeats its own: see [`OwnData`]."""
        self.border_seconds = 0.0
        """How long an averaging takes: the last one, and before the first of this process a bound from the broadcast."""
        self.clock_is_set = False
        """Whether [`~RoundCounter.begin_step`] was called since the last border."""
        self._tally = Tally()

    def begin_step(self) -> None:
        """
        Restarts the clock of a round if it has no step yet, so that an evaluation at the border does not count. Optional.
        """
        self.clock_is_set = True
        if self.at_border:
            self._tally.started = time.perf_counter()

    @property
    def synchronous(self) -> bool:
        """Whether the round that is running, or begins next, consists of steps synchronised over all groups."""
        return self.course.synchronous

    @property
    def steps_left(self) -> float:
        """Steps to the end of the round."""
        return self.course.steps_left(self.steps)

    @property
    def is_due(self) -> bool:
        """Whether the round has all of its steps, so that [`~Rounds.close`] is due."""
        return self.steps_left <= 0

    def count_step(
        self,
        loss: torch.Tensor | float | None = None,
        tokens: float = 0,
        samples: float = 0,
        labels: float | None = None,
    ) -> bool:
        """
        Counts one optimizer step of this rank's group, without communication.

        Args:
            loss (`torch.Tensor` or `float`, *optional*):
                The step's training loss on this rank, for the log.
            tokens (`int`, defaults to `0`):
                Tokens that this rank trained on in the step, for the log and for `group_weights="tokens"`.
            samples (`int`, defaults to `0`):
                Samples that this rank trained on in the step, for `group_weights="samples"`.
            labels (`int`, *optional*):
                Where not all tokens count in the loss: those that do, for the weights in place of `tokens`.

        Returns:
            `bool`: Whether the round has all of its steps, so that [`~Rounds.close`] is due.

        Raises:
            Exception: What an averaging beside the steps has failed with on this rank.
        """
        if self.overlap is not None:
            self.overlap.raise_failure()
        self.steps += 1
        self._begun = False
        self.course.num_steps += 1
        self._tally.tokens += tokens
        self._tally.labels += self.unique_share * (tokens if labels is None else labels)
        self._tally.samples += self.unique_share * samples
        if loss is not None:
            self.add_loss(loss)
        return self.is_due

    def add_loss(self, loss: torch.Tensor | float, num_losses: int = 1) -> None:
        """
        Adds training losses of this rank to the round's metrics, without waiting for the device.

        Args:
            loss (`torch.Tensor` or `float`):
                A loss, or the sum of several.
            num_losses (`int`, defaults to `1`):
                How many.
        """
        self._tally.loss_sum = self._tally.loss_sum + (loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._tally.num_losses += num_losses

    @property
    def seconds_per_step(self) -> float:
        """How long a step of this round takes, waiting for other groups left aside; 0 before the first."""
        return self._tally.own_seconds() / self.steps if self.steps else 0.0

    def note_wait(self, seconds: float) -> None:
        """
        Told that this rank has waited for other groups before the border, for the metrics.

        Args:
            seconds (`float`):
                How long.
        """
        self._tally.waited_seconds += seconds

    @property
    def at_border(self) -> bool:
        """
        Whether every group holds the same, averaged model: no step was made since the last averaging, nor one begun by
        the optimizer and not yet counted, and no averaging is in flight.
        """
        in_flight = self.overlap is not None and self.overlap.in_flight
        return self.untouched and not in_flight

    @property
    def untouched(self) -> bool:
        """
        Whether no step was made since the last round ended, nor one begun. Under an adapter that tells of every step, see
        [`~RoundCounter.note_begun`], the same on all ranks also in the middle of one.
        """
        return self.steps == 0 and self.num_optimizer_steps == 0 and not self._begun

    def note_begun(self) -> None:
        """
        Told that the optimizers are about to be asked for a step, by an adapter that knows. A gradient scaler may skip it in one
        group and not in another, so what they have done says nothing of where the other groups stand.
        """
        self._begun = True

    def note_optimizer_step(self, found_inf: torch.Tensor | None = None) -> None:
        """
        Told by the guard of every call of an optimizer's step.

        Args:
            found_inf (`torch.Tensor`, *optional*):
                Of one element, 1 where the optimizer skips the step since its gradients are not finite.

        Raises:
            RuntimeError: If the averaging is overdue by more than a round.
        """
        self.num_optimizer_steps += 1
        if found_inf is not None:
            # Not read here: a device would be waited for.
            self.num_skipped_steps = self.num_skipped_steps + found_inf.detach()
        limit = 2 * self.course.period * max(len(self.optimizers), 1)
        if self.num_optimizer_steps > limit and self.mesh.layout.num_groups > 1:
            raise RuntimeError(
                f"{self.num_optimizer_steps} optimizer steps were made since the federation groups were last averaged, "
                f"with sync_every={self.course.period}. Call `fedavg.step()` after each optimizer step."
            )

    def _num_updates(self) -> torch.Tensor | float:
        """
        Steps that an optimizer made, where somebody counts them: a gradient scaler may have skipped some. Not read here, as in
        [`~RoundCounter.note_optimizer_step`].
        """
        if not (self.counts_updates or guard.is_watching()):
            return self.steps
        return (self.num_optimizer_steps - self.num_skipped_steps) / max(len(self.optimizers), 1)

    def _next_round(self) -> None:
        self.round += 1
        self._restart_round()

    def _restart_round(self) -> None:
        self.steps = 0
        self.num_optimizer_steps = 0
        self.num_skipped_steps = 0.0
        self._begun = False
        self.clock_is_set = False
        self._tally = Tally()

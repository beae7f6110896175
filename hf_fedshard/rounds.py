"""The outer loop: counts optimizer steps, says when a round is over, and closes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from . import guard
from .averaging import Held, ModelAverager
from .config import FederationConfig
from .handshake import FederationMismatchError
from .initial import agree_on_model, broadcast_initial_state
from .lora import freeze_first_factors
from .mesh import FederationMesh, Peers
from .metrics import RoundMetrics, Tally, exchange_rows, ratios
from .proximal import ProximalTerm
from .shards import drop_stale_state, reshard
from .weights import group_weights


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Border:
    """
    The moment after a round: every group holds the averaged model.

    Args:
        metrics ([`RoundMetrics`]):
            What the round measured.
        votes (`dict[str, bool]`):
            For each vote that was put, whether any rank of any group cast it.
        sums (`dict[str, float]`):
            For each number that was handed in, its sum over all ranks of all groups.
    """

    metrics: RoundMetrics
    votes: dict[str, bool] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)


class Rounds:
    """
    Federated averaging of one model (FL+FSDP and FL+HSDP, arXiv 2609.20359, with FedAvg of arXiv 1602.05629).

    In a loop of your own it is made by [`FederatedFSDPPlugin.federate`]; call [`~Rounds.step`] after each optimizer
    step and [`~Rounds.finish`] once at the end. [`FedAvgCallback`] drives one under Trainer.

    Args:
        model (`nn.Module`):
            The prepared FSDP2 model, sharded over the axes inside a group of `mesh`.
        mesh ([`FederationMesh`]):
            The federation.
        config ([`FederationConfig`]):
            Its settings.
        optimizers (`Iterable[torch.optim.Optimizer]`, *optional*):
            The inner optimizers. Their state stays with each group, unless `inner_moments` says otherwise; a group that
            was left out of an average because its parameters were not finite starts with fresh moments.

    Construction is collective over the world: it compares parameters between ranks, broadcasts group 0's weights and
    buffers, and verifies them.

    Raises:
        FederationMismatchError: If ranks hold different parameters or settings.
        ValueError: If the model cannot be federated, see [`check_trainable_parameters`].
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Peers,
        config: FederationConfig,
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config
        self.optimizers = list(optimizers)
        self.round = 0
        self.steps = 0
        self.num_optimizer_steps = 0
        self.counts_updates = False
        """Whether somebody other than the guard tells of every optimizer step."""
        for optimizer in self.optimizers:
            drop_stale_state(optimizer)
        reshard(model)
        self._when_finished: list[Callable[[], None]] = []
        if config.lora_average == "freeze_a":
            self.when_finished(freeze_first_factors(model, self.optimizers))
        self._begin()
        self.averager = ModelAverager(model, mesh, config, self.optimizers)
        self._parameter_ids = {id(param) for param in model.parameters()}
        self._tally = Tally()
        if config.proximal_mu and mesh.layout.num_groups > 1:
            names = {id(param): name for name, param in model.named_parameters()}
            term = ProximalTerm(self.optimizers, names, self.averager.outer.anchors, config.proximal_mu)
            self.when_finished(term.remove)
        guard.attach(self)

    def _begin(self) -> None:
        """Makes sure that all groups hold one model. Collective over the world."""
        assert isinstance(self.mesh, FederationMesh)
        agree_on_model(self.model, self.optimizers, self.mesh, self.config)
        if self.mesh.layout.num_groups > 1:
            broadcast_initial_state(self.model, self.mesh)

    def begin_step(self) -> None:
        """
        Restarts the clock of a round if it has no step yet, so that an evaluation at the border does not count. Optional.
        """
        if self.at_border:
            self._tally.started = time.perf_counter()

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
            `bool`: Whether the round has its `sync_every` steps, so that [`~Rounds.close`] is due.
        """
        self.steps += 1
        self._tally.tokens += tokens
        self._tally.labels += tokens if labels is None else labels
        self._tally.samples += samples
        if loss is not None:
            self.add_loss(loss)
        return self.steps >= self.config.sync_every

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

    def step(self, loss: torch.Tensor | float | None = None, tokens: int = 0, samples: int = 0) -> RoundMetrics | None:
        """
        To be called after every optimizer step: counts it, and averages the groups when the round is over.

        Call it once for each optimizer step that the loop attempts, also where a gradient scaler skipped it, since one
        group may skip and another not; with accumulation, only where `accelerator.sync_gradients` is true.

        Args:
            loss (`torch.Tensor` or `float`, *optional*):
                The step's training loss on this rank, for the metrics.
            tokens (`int`, defaults to `0`):
                Tokens that this rank trained on in the step, for the metrics and for `group_weights="tokens"`.
            samples (`int`, defaults to `0`):
                Samples that this rank trained on in the step, for `group_weights="samples"`.

        Returns:
            [`RoundMetrics`] or `None`: The metrics where a round ended, else `None`.
        """
        return self.close().metrics if self.count_step(loss, tokens, samples) else None

    def finish(self) -> RoundMetrics | None:
        """
        Ends the federation: averages the last round even if it is short. Collective; call it on every rank, before the
        model is evaluated for the last time or saved.

        Returns:
            [`RoundMetrics`] or `None`: The metrics of the last round, `None` if the model was at a border already.
        """
        metrics = None if self.at_border else self.close().metrics
        self.release()
        return metrics

    def release(self) -> None:
        """
        Gives the model up without averaging it: it may be evaluated and saved, and an optimizer step on it is refused.
        """
        guard.detach(self)
        for undo in self._when_finished:
            undo()
        self._when_finished.clear()

    def when_finished(self, undo: Callable[[], None]) -> None:
        """
        Has something done by [`~Rounds.finish`].

        Args:
            undo (`Callable`):
                Takes back what an adapter has set up for the time of the federation.
        """
        self._when_finished.append(undo)

    def restore(self, round: int) -> None:
        """
        Told that the model was replaced by a checkpoint's, the same in all groups: a round begins with the next step.

        Args:
            round (`int`):
                Rounds behind the model.
        """
        self._next_round()
        self.round = round
        self.averager.restart()

    @property
    def at_border(self) -> bool:
        """
        Whether every group holds the same, averaged model: no step was made since the last averaging, nor one begun by
        the optimizer and not yet counted.
        """
        return self.steps == 0 and self.num_optimizer_steps == 0

    def close(self, votes: Mapping[str, bool] | None = None, sums: Mapping[str, float] | None = None) -> Border:
        """
        Closes the round: every group's parameters become their average. Collective over the world.

        Order on every rank: the small exchange of metrics and votes, one of weights if a function gives them, then those of
        [`ModelAverager.average`]. What is done depends only on values that all ranks have exchanged, so they stay
        together.

        Args:
            votes (`Mapping[str, bool]`, *optional*):
                Requests of this rank, under the same names on all ranks.
            sums (`Mapping[str, float]`, *optional*):
                Numbers of this rank to be summed over all ranks, under the same names on all ranks.

        Returns:
            [`Border`]: Metrics, and the votes and sums of all ranks.

        Raises:
            RuntimeError: On every rank, if no group has finite parameters.
            FederationMismatchError: On every rank, if the groups made different numbers of steps or train different
                parameters.
        """
        votes, sums = dict(votes or {}), dict(sums or {})
        if self.mesh.layout.num_groups == 1:
            return self._close_alone(votes, sums)
        held = self.averager.collect()
        # After the line above the device has done the steps, and the clock says how long they took.
        row = self._row(held, self._tally.seconds())
        row.update({f"vote/{name}": float(cast) for name, cast in votes.items()})
        row.update({f"sum/{name}": value for name, value in sums.items()})
        rows, wait_seconds = exchange_rows(row, self.mesh)
        self._check_rows(rows, held)
        excluded = tuple(group for group, bad in enumerate(rows["not_finite"]) if bad)
        weights = group_weights(self.config.group_weights, rows, excluded, self.mesh)
        with_moments = self._moments_agree(rows)
        start = time.perf_counter()
        outcome = self.averager.average(held, weights, excluded, with_moments)
        moment_bytes = int(rows["moment_bytes"][self.mesh.group_index]) if with_moments else 0
        metrics = RoundMetrics(
            round=self.round + 1,
            steps=self.steps,
            seconds=self._tally.seconds(),
            wait_seconds=wait_seconds,
            sync_seconds=time.perf_counter() - start,
            bytes_sent=int(rows["slow_bytes"][self.mesh.group_index]) + moment_bytes,
            drift=outcome.drift,
            losses=ratios(rows["loss_sum"], rows["num_losses"], otherwise=float("nan")),
            # Each rank adds its seconds to the row, so their sum over the group is `group_size` times the group's.
            tokens_per_second=ratios(
                rows["all_tokens"], [total / self.mesh.layout.group_size for total in rows["seconds"]], otherwise=0.0
            ),
            excluded=excluded,
            weights=weights,
            moment_bytes_sent=moment_bytes,
            pseudo_gradient_norm=outcome.pseudo_gradient_norm,
            outer_learning_rate=outcome.outer_learning_rate,
            lora_error=outcome.lora_error,
        )
        self._next_round()
        return Border(
            metrics,
            {name: any(rows[f"vote/{name}"]) for name in votes},
            {name: sum(rows[f"sum/{name}"]) for name in sums},
        )

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps parameters that this object averages."""
        return any(id(param) in self._parameter_ids for group in optimizer.param_groups for param in group["params"])

    def note_optimizer_step(self) -> None:
        """
        Told by the guard of every real optimizer step.

        Raises:
            RuntimeError: If the averaging is overdue by more than a round.
        """
        self.num_optimizer_steps += 1
        limit = 2 * self.config.sync_every * max(len(self.optimizers), 1)
        if self.num_optimizer_steps > limit and self.mesh.layout.num_groups > 1:
            raise RuntimeError(
                f"{self.num_optimizer_steps} optimizer steps were made since the federation groups were last averaged, "
                f"with sync_every={self.config.sync_every}. Call `fedavg.step()` after each optimizer step."
            )

    def _row(self, held: Held, seconds: float) -> dict[str, float]:
        group_size = self.mesh.layout.group_size
        return {
            "steps": self.steps / group_size,
            "updates": self._num_updates() / group_size,
            "plan": held.digest() / group_size,
            "moments": held.moments_digest() / group_size,
            "not_finite": float(not held.finite),
            "problems": len(held.problems),
            "slow_bytes": held.slow_bytes("parameters") + held.slow_bytes("adapters"),
            "moment_bytes": held.slow_bytes("moments"),
            "seconds": seconds,
            "all_tokens": self._tally.tokens,
            "tokens": self._tally.labels,
            "samples": self._tally.samples,
            "loss_sum": float(self._tally.loss_sum),
            "num_losses": self._tally.num_losses,
        }

    def _check_rows(self, rows: Mapping[str, list[float]], held: Held) -> None:
        if len({round(steps) for steps in rows["steps"]}) > 1:
            raise FederationMismatchError(
                f"The groups closed a round after different numbers of optimizer steps: {[round(s) for s in rows['steps']]} "
                "in group 0, 1, .... Every group must make the same number of steps: give all of them the same number "
                "of batches."
            )
        if len({round(digest) for digest in rows["plan"]}) > 1:
            raise FederationMismatchError(
                "The groups train different parameters: requires_grad was changed in some groups only."
            )
        if any(rows["problems"]):
            raise ValueError(" ".join(held.problems) or "Another rank cannot average its model; its error says why.")
        if all(rows["not_finite"]):
            raise RuntimeError(
                f"The parameters of every federation group are not finite at the end of round {self.round + 1}. "
                "Training cannot go on from here; lower the learning rate, or clip gradients (max_grad_norm), and start "
                "from the last checkpoint."
            )

    def _num_updates(self) -> float:
        """Steps that an optimizer made, where somebody counts them: a gradient scaler may have skipped some."""
        if not (self.counts_updates or guard.is_watching()):
            return self.steps
        return self.num_optimizer_steps / max(len(self.optimizers), 1)

    def _moments_agree(self, rows: Mapping[str, list[float]]) -> bool:
        """Whether the groups hold moments of the same parameters; not where one of them has made no step yet."""
        if len({round(digest) for digest in rows["moments"]}) == 1:
            return True
        if self.mesh.is_main:
            logger.warning(
                "The optimizers of the federation groups hold moments of different parameters at the end of round %d: a "
                "gradient scaler has skipped all steps of a group, say. The moments were not averaged this time.",
                self.round + 1,
            )
        return False

    def _close_alone(self, votes: dict[str, bool], sums: dict[str, float]) -> Border:
        """One group: plain FSDP or HSDP. There is nobody to average with, and nothing is touched."""
        seconds = self._tally.seconds()
        metrics = RoundMetrics(
            round=self.round + 1,
            steps=self.steps,
            seconds=seconds,
            wait_seconds=0.0,
            sync_seconds=0.0,
            bytes_sent=0,
            drift=0.0,
            losses=ratios([float(self._tally.loss_sum)], [self._tally.num_losses], otherwise=float("nan")),
            tokens_per_second=ratios([self._tally.tokens * self.mesh.layout.group_size], [seconds], otherwise=0.0),
        )
        self._next_round()
        return Border(metrics, votes, sums)

    def _next_round(self) -> None:
        self.round += 1
        self.steps = 0
        self.num_optimizer_steps = 0
        self._tally = Tally()

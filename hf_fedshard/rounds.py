"""The outer loop: counts optimizer steps, says when a round is over, and closes it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import guard
from .averaging import Held, ModelAverager
from .config import FederationConfig
from .handshake import FederationMismatchError
from .initial import agree_on_model, broadcast_initial_state
from .mesh import FederationMesh
from .metrics import RoundMetrics, Tally, exchange_rows, ratios
from .shards import drop_stale_state, reshard


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
            The inner optimizers. Their state stays with each group; a group that was left out of an average because
            its parameters were not finite starts with fresh moments.
        one_model (`bool`, defaults to `True`):
            Whether all groups are to start with group 0's weights and buffers. Not where they resume inside a round.

    Construction is collective over the world: it compares parameters between ranks, broadcasts group 0's weights and
    buffers, and verifies them.

    Raises:
        FederationMismatchError: If ranks hold different parameters or settings.
        ValueError: If the model cannot be federated, see [`check_trainable_parameters`].
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: FederationMesh,
        config: FederationConfig,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        one_model: bool = True,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config
        self.optimizers = list(optimizers)
        self.round = 0
        self.steps = 0
        self.num_optimizer_steps = 0
        for optimizer in self.optimizers:
            drop_stale_state(optimizer)
        reshard(model)
        agree_on_model(model, self.optimizers, mesh, config)
        if mesh.layout.num_groups > 1 and one_model:
            broadcast_initial_state(model, mesh)
        self.averager = ModelAverager(model, mesh, config, self.optimizers)
        self._parameter_ids = {id(param) for param in model.parameters()}
        self._tally = Tally()
        self._when_finished: list[Callable[[], None]] = []
        guard.attach(self)

    def begin_step(self) -> None:
        """
        Restarts the clock of a round if it has no step yet, so that an evaluation at the border does not count. Optional.
        """
        if self.at_border:
            self._tally.started = time.perf_counter()

    def count_step(self, loss: torch.Tensor | float | None = None, tokens: float = 0) -> bool:
        """
        Counts one optimizer step of this rank's group, without communication.

        Args:
            loss (`torch.Tensor` or `float`, *optional*):
                The step's training loss on this rank, for the log.
            tokens (`int`, defaults to `0`):
                Tokens that this rank trained on in the step, for the log.

        Returns:
            `bool`: Whether the round has its `sync_every` steps, so that [`~Rounds.close`] is due.
        """
        self.steps += 1
        self._tally.tokens += tokens
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

    def step(self, loss: torch.Tensor | float | None = None, tokens: int = 0) -> RoundMetrics | None:
        """
        To be called after every optimizer step: counts it, and averages the groups when the round is over.

        Call it once for each optimizer step that the loop attempts, also where a gradient scaler skipped it, since one
        group may skip and another not; with accumulation, only where `accelerator.sync_gradients` is true.

        Args:
            loss (`torch.Tensor` or `float`, *optional*):
                The step's training loss on this rank, for the metrics.
            tokens (`int`, defaults to `0`):
                Tokens that this rank trained on in the step, for the metrics.

        Returns:
            [`RoundMetrics`] or `None`: The metrics where a round ended, else `None`.
        """
        return self.close().metrics if self.count_step(loss, tokens) else None

    def finish(self) -> RoundMetrics | None:
        """
        Ends the federation: averages the last round even if it is short. Collective; call it on every rank, before the
        model is evaluated for the last time or saved.

        Returns:
            [`RoundMetrics`] or `None`: The metrics of the last round, `None` if the model was at a border already.
        """
        metrics = None if self.at_border else self.close().metrics
        # A finished federation may be evaluated and saved; an optimizer step on it will be refused.
        guard.detach(self)
        for undo in self._when_finished:
            undo()
        self._when_finished.clear()
        return metrics

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

    def progress(self) -> dict[str, Any]:
        """Where this rank stands inside the round, as plain values."""
        return {
            "round": self.round,
            "steps": self.steps,
            "num_optimizer_steps": self.num_optimizer_steps,
            "trained": self.averager.trained,
            "seconds": self._tally.seconds(),
            "tally": {name: value for name, value in vars(self._tally).items() if name != "started"},
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """
        Told that the model was replaced by what this rank's group held inside a round.

        Args:
            state (`Mapping[str, Any]`):
                From [`~Rounds.progress`], of the same group.
        """
        self.round = state["round"]
        self.steps = state["steps"]
        self.num_optimizer_steps = state["num_optimizer_steps"]
        self.averager.note_trainable(state["trained"])
        self._tally = Tally(started=time.perf_counter() - state["seconds"], **state["tally"])

    @property
    def seconds_per_step(self) -> float:
        """How long a step of this round takes, waiting for other groups left aside; 0 before the first."""
        return (self._tally.seconds() - self._tally.waited_seconds) / self.steps if self.steps else 0.0

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
        the optimizer and not yet counted.
        """
        return self.steps == 0 and self.num_optimizer_steps == 0

    def close(self, votes: Mapping[str, bool] | None = None, sums: Mapping[str, float] | None = None) -> Border:
        """
        Closes the round: every group's parameters become their average. Collective over the world.

        Order on every rank: the small exchange of metrics and votes, the buckets of the plan, the buffers, the small
        exchange of the drift. What is done depends only on values that all ranks have exchanged, so they stay
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
        waited = self._tally.waited_seconds
        row = self._row(held, self._tally.seconds() - waited)
        row.update({f"vote/{name}": float(cast) for name, cast in votes.items()})
        row.update({f"sum/{name}": value for name, value in sums.items()})
        rows, wait_seconds = exchange_rows(row, self.mesh)
        self._check_rows(rows, held)
        excluded = tuple(group for group, bad in enumerate(rows["not_finite"]) if bad)
        start = time.perf_counter()
        drift = self.averager.average(held, excluded)
        metrics = RoundMetrics(
            round=self.round + 1,
            steps=self.steps,
            seconds=self._tally.seconds(),
            wait_seconds=waited + wait_seconds,
            sync_seconds=time.perf_counter() - start,
            bytes_sent=int(rows["slow_bytes"][self.mesh.group_index]),
            drift=drift,
            losses=ratios(rows["loss_sum"], rows["num_losses"], otherwise=float("nan")),
            # Each rank adds its seconds to the row, so their sum over the group is `group_size` times the group's.
            tokens_per_second=ratios(
                rows["tokens"], [total / self.mesh.layout.group_size for total in rows["seconds"]], otherwise=0.0
            ),
            excluded=excluded,
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
            "plan": zlib.crc32(repr(list(held.shards)).encode()) / group_size,
            "not_finite": float(not held.finite),
            "unmanaged": len(held.unmanaged),
            "slow_bytes": held.plan.slow_bytes(),
            "seconds": seconds,
            "tokens": float(self._tally.tokens),
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
        if any(rows["unmanaged"]):
            raise ValueError(
                "Trainable parameters were added after training began, and FSDP2 does not manage them, so their gradients "
                f"are reduced nowhere (on this rank: {', '.join(held.unmanaged) or 'none'}). Add them before `prepare`."
            )
        if all(rows["not_finite"]):
            raise RuntimeError(
                f"The parameters of every federation group are not finite at the end of round {self.round + 1}. "
                "Training cannot go on from here; lower the learning rate, or clip gradients (max_grad_norm), and start "
                "from the last checkpoint."
            )

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

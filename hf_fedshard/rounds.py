"""The outer loop: counts optimizer steps, says when a round is over, and closes it."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from . import guard
from .averaging import AveragingReport, ExchangePlan, average_replicated, plan_exchange, run_exchange
from .config import FederationConfig
from .handshake import FederationMismatchError, agree
from .initial import broadcast_initial_state
from .mesh import FederationMesh
from .metrics import RoundMetrics, exchange_rows
from .shards import check_trainable_parameters, local_shards, persistent_buffers, reshard


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
            The inner optimizers. Their state stays with each group; a group that was left out of an average because
            its parameters were not finite starts with fresh moments.

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
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config
        self.optimizers = list(optimizers)
        self.round = 0
        self.steps = 0
        self.num_optimizer_steps = 0
        reshard(model)
        _compare_models(model, mesh, config)
        if mesh.layout.num_groups > 1:
            broadcast_initial_state(model, mesh)
        self._plan: ExchangePlan | None = None
        self._plan_names: tuple[str, ...] = ()
        self._parameter_ids = {id(param) for param in model.parameters()}
        self._started: float | None = None
        self._tokens = 0
        self._loss_sum: torch.Tensor | float = 0.0
        self._num_losses = 0
        guard.attach(self)

    def begin_step(self) -> None:
        """Starts the clock of a round at its first step. Called by [`~Rounds.step`] where the loop does not."""
        if self._started is None:
            self._started = time.perf_counter()

    def count_step(self, loss: torch.Tensor | float | None = None, tokens: int = 0) -> bool:
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
        self._tokens += tokens
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
        self._loss_sum = self._loss_sum + (loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._num_losses += num_losses

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
        self.begin_step()
        return self.close().metrics if self.count_step(loss, tokens) else None

    def finish(self) -> RoundMetrics | None:
        """
        Ends the federation: averages the last round even if it is short. Collective; call it on every rank, before the
        model is evaluated for the last time or saved.

        Returns:
            [`RoundMetrics`] or `None`: The metrics of the last round, `None` if the model was at a border already.
        """
        metrics = self.close().metrics if self.steps else None
        guard.detach(self)
        # A finished federation may be evaluated and saved; training it on would be noticed by the guard.
        return metrics

    @property
    def at_border(self) -> bool:
        """Whether every group holds the same, averaged model: no step was made since the last averaging."""
        return self.steps == 0

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
        reached = time.perf_counter()
        started = reached if self._started is None else self._started
        votes, sums = dict(votes or {}), dict(sums or {})
        if self.mesh.layout.num_groups == 1:
            return self._close_alone(votes, sums, reached - started)
        reshard(self.model)
        shards = local_shards(self.model, trainable_only=True)
        plan = self._plan_for(shards)
        finite = _all_finite(shards.values())
        rows, wait_seconds = exchange_rows(
            {
                **self._row(votes, plan, finite, reached - started),
                **{f"sum/{name}": value for name, value in sums.items()},
            },
            self.mesh,
        )
        self._check_rows(rows)
        excluded = tuple(group for group, bad in enumerate(rows["not_finite"]) if bad)
        start = time.perf_counter()
        report = self._average(plan, shards, excluded)
        drift = self._exchange_drift(report.squared_drift, report.squared_norm, excluded)
        sync_seconds = time.perf_counter() - start
        metrics = RoundMetrics(
            round=self.round + 1,
            steps=self.steps,
            seconds=time.perf_counter() - started,
            wait_seconds=wait_seconds,
            sync_seconds=sync_seconds,
            bytes_sent=int(rows["slow_bytes"][self.mesh.group_index]),
            drift=drift,
            losses=tuple(
                s / n if n else float("nan") for s, n in zip(rows["loss_sum"], rows["num_losses"], strict=True)
            ),
            tokens_per_second=tuple(
                n * self.mesh.layout.group_size / t if t > 0 else 0.0
                for n, t in zip(rows["tokens"], rows["seconds"], strict=True)
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

    def _average(
        self, plan: ExchangePlan, shards: Mapping[str, torch.Tensor], excluded: tuple[int, ...]
    ) -> AveragingReport:
        num_groups = self.mesh.layout.num_groups
        included = num_groups - len(excluded)
        left_out = self.mesh.group_index in excluded
        with torch.no_grad():
            report = run_exchange(plan, shards, self.mesh.device, 0.0 if left_out else 1.0, float(included))
            average_replicated(persistent_buffers(self.model), self.mesh, not left_out, included)
        if excluded:
            if torch.distributed.get_rank() == 0:
                logger.warning(
                    "Round %d: the parameters of group %s were not finite. It was left out of the average, has taken "
                    "the average of the others, and starts with fresh optimizer moments.",
                    self.round + 1,
                    ", ".join(map(str, excluded)),
                )
            if left_out:
                for optimizer in self.optimizers:
                    optimizer.state.clear()
        return report

    def _exchange_drift(
        self, squared_drift: torch.Tensor, squared_norm: torch.Tensor, excluded: tuple[int, ...]
    ) -> float:
        # The replicas of a group each report the whole shard, so the ratio needs no correction.
        rows, _ = exchange_rows({"drift": squared_drift.item(), "norm": squared_norm.item()}, self.mesh)
        included = self.mesh.layout.num_groups - len(excluded)
        norm = rows["norm"][0]
        return (sum(rows["drift"]) / included / norm) ** 0.5 if norm > 0 else 0.0

    def _row(self, votes: Mapping[str, bool], plan: ExchangePlan, finite: bool, seconds: float) -> dict[str, float]:
        group_size = self.mesh.layout.group_size
        return {
            "steps": self.steps / group_size,
            "plan": zlib.crc32(repr(self._plan_names).encode()) / group_size,
            "not_finite": float(not finite),
            "slow_bytes": plan.slow_bytes(),
            "seconds": seconds,
            "tokens": float(self._tokens),
            "loss_sum": float(self._loss_sum) if self._num_losses else 0.0,
            "num_losses": self._num_losses,
            **{f"vote/{name}": float(cast) for name, cast in votes.items()},
        }

    def _check_rows(self, rows: Mapping[str, list[float]]) -> None:
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
        if all(rows["not_finite"]):
            raise RuntimeError(
                f"The parameters of every federation group are not finite at the end of round {self.round + 1}. "
                "Training cannot go on from here; lower the learning rate, or clip gradients (max_grad_norm), and start "
                "from the last checkpoint."
            )

    def _plan_for(self, shards: Mapping[str, torch.Tensor]) -> ExchangePlan:
        """The plan for the parameters that train now. Unfreezing some in mid-run makes a new one."""
        if self._plan is None or tuple(shards) != self._plan_names:
            self._plan = plan_exchange(shards, self.mesh, self.config.bucket_size_bytes)
            self._plan_names = tuple(shards)
        return self._plan

    def _close_alone(self, votes: dict[str, bool], sums: dict[str, float], seconds: float) -> Border:
        """One group: plain FSDP or HSDP. There is nobody to average with, and nothing is touched."""
        loss = float(self._loss_sum) / self._num_losses if self._num_losses else float("nan")
        rate = self._tokens * self.mesh.layout.group_size / seconds if seconds > 0 else 0.0
        metrics = RoundMetrics(self.round + 1, self.steps, seconds, 0.0, 0.0, 0, 0.0, (loss,), (rate,))
        self._next_round()
        return Border(metrics, votes, sums)

    def _next_round(self) -> None:
        self.round += 1
        self.steps = 0
        self.num_optimizer_steps = 0
        self._started = None
        self._tokens = 0
        self._loss_sum = 0.0
        self._num_losses = 0


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    norms = [tensor.norm() for tensor in tensors if tensor.numel()]
    return bool(torch.isfinite(torch.stack([norm.double().cpu() for norm in norms])).all()) if norms else True


def _compare_models(model: nn.Module, mesh: FederationMesh, config: FederationConfig) -> None:
    """The handshake about what is averaged: settings, and name, shape, dtype and role of every parameter."""
    error = None
    try:
        check_trainable_parameters(model)
    except ValueError as problem:
        error = str(problem)
    described = [
        (name, tuple(param.shape), str(param.dtype), param.requires_grad) for name, param in model.named_parameters()
    ]
    described += [(name, tuple(buffer.shape), str(buffer.dtype), False) for name, buffer in model.named_buffers()]
    agree(
        "the federated model",
        {
            **vars(config),
            "layout": str(mesh.layout),
            "num_parameters": len(described),
            "parameters": f"{zlib.crc32(repr(described).encode()):08x}",
        },
        error,
    )

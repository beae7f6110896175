"""What a round measured: small numbers of every group, exchanged beside the sync, and their names in logs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from .collectives import all_reduce
from .peers import Peers


LOG_PREFIX = "fedshard/"
MAX_LOGGED_GROUPS = 16

Rows: TypeAlias = Mapping[str, list[float]]
"""What the ranks said, by name: the sums over the ranks of group 0, 1, ...."""


@dataclass(frozen=True)
class RoundMetrics:
    """
    Metrics of one round. They are equal on all ranks, but for these:

    - Times and what is formed of them (`seconds`, `wait_seconds`, `sync_seconds`, `overlapped_seconds`, `sync_share`), and
      `lora_error`, are those of this rank. What is logged is rank 0's.
    - `bytes_sent` and `moment_bytes_sent` are those of this rank's group.

    Where ranks must decide alike, decide on the others, or put the decision to a vote.

    Args:
        round (`int`):
            Number of this round, counted from 1.
        steps (`int`):
            Optimizer steps in it. 0 of a border that was made where none was counted: it ends no round, and `round` is that of
            the last one, 0 before the first.
        seconds (`float`):
            Wall time of the round on this rank, its sync included.
        wait_seconds (`float`):
            Time this rank waited for the slowest group to arrive at the border.
        sync_seconds (`float`):
            Time of the averaging itself, on this rank.
        bytes_sent (`int`):
            Bytes that the ranks of this rank's group together sent to other groups for the averaging.
        drift (`float`):
            Distance of the groups from their average before it replaced them: the root of the mean over groups of the
            squared distance, relative to the norm of the average.
        losses (`tuple[float, ...]`):
            Mean training loss of each group in the round, `nan` where none was given.
        tokens_per_second (`tuple[float, ...]`):
            Tokens trained by each group over the time it spent between its first step and the border.
        excluded (`tuple[int, ...]`):
            Groups whose parameters were not finite and were left out of the average.
        period (`int`, *optional*):
            The period that the round was begun with, where `sync_every` is no fixed one.
        synchronous (`bool`, defaults to `False`):
            Whether its steps were synchronised over all groups.
        weights (`tuple[float, ...]`):
            How much each group counted in the average, relative to the largest.
        moment_bytes_sent (`int`):
            Those of `bytes_sent` that were moments of the inner optimizers.
        pseudo_gradient_norm (`float`, *optional*):
            Norm of the model at the last border minus the average; `None` where the average was taken as it is.
        outer_learning_rate (`float`, *optional*):
            Of the outer step; `None` likewise.
        lora_error (`float`, *optional*):
            With `lora_average="product"`: the largest part of a mean product, relative to its norm, that an adapter of this
            rank cannot hold.
        overlapped_seconds (`float`, *optional*):
            With `overlap_steps`: time that the averaging took beside the training steps. `sync_seconds` is then how long the
            steps stood still for it: to make snapshots, to wait for the outcome, and to take it in. A border that ends a round
            in which fragments had their turn adds that of theirs to its own time, and their bytes and pseudo-gradients to its
            own. Its `drift` is that at the border alone, of the whole model.
        earlier (`tuple[RoundMetrics, ...]`):
            With `overlap_steps`, of what a loop is given: metrics of the rounds before it, oldest first, whose averagings were in
            flight when the border was made that closed this one.
    """

    round: int
    steps: int
    seconds: float
    wait_seconds: float
    sync_seconds: float
    bytes_sent: int
    drift: float
    losses: tuple[float, ...]
    tokens_per_second: tuple[float, ...]
    excluded: tuple[int, ...] = ()
    period: int | None = None
    synchronous: bool = False
    weights: tuple[float, ...] = ()
    moment_bytes_sent: int = 0
    pseudo_gradient_norm: float | None = None
    outer_learning_rate: float | None = None
    lora_error: float | None = None
    overlapped_seconds: float | None = None
    earlier: tuple[RoundMetrics, ...] = ()

    @property
    def known_drift(self) -> float | None:
        """
        The drift, for the next period; `None` where one group alone counted, the others left out after a fault or without
        weight: it is at no distance from itself.
        """
        return self.drift if sum(weight > 0 for weight in self.weights) > 1 else None

    @property
    def sync_share(self) -> float:
        """Share of the round's wall time that was spent waiting and averaging."""
        return (self.wait_seconds + self.sync_seconds) / self.seconds if self.seconds > 0 else 0.0

    def as_logs(self) -> dict[str, float]:
        """
        The metrics under the names that appear in logs and trackers.

        Returns:
            `dict[str, float]`: `fedshard/round`, `fedshard/steps`, ..., and for each group `fedshard/loss/group_<g>` and
            `fedshard/tokens_per_second/group_<g>`; with more than 16 groups the least, mean and greatest of them
            (`.../min`, `.../mean`, `.../max`) and the groups of the extremes (`.../argmin`, `.../argmax`).
        """
        logs: dict[str, float] = {
            "round": self.round,
            "steps": self.steps,
            "sync_seconds": round(self.sync_seconds, 4),
            "wait_seconds": round(self.wait_seconds, 4),
            "sync_share": round(self.sync_share, 4),
            "bytes_sent": self.bytes_sent,
            "drift": float(f"{self.drift:.4g}"),
        }
        for name in ("pseudo_gradient_norm", "outer_learning_rate", "lora_error"):
            value = getattr(self, name)
            if value is not None:
                logs[name] = float(f"{value:.4g}")
        if self.overlapped_seconds is not None:
            logs["overlapped_seconds"] = round(self.overlapped_seconds, 4)
        if self.moment_bytes_sent:
            logs["moment_bytes_sent"] = self.moment_bytes_sent
        if len(set(self.weights)) > 1:
            logs.update(_by_group("weight", self.weights, digits=4))
        logs.update(_by_group("loss", self.losses, digits=4))
        logs.update(_by_group("tokens_per_second", self.tokens_per_second, digits=1))
        if self.excluded:
            logs["excluded_groups"] = len(self.excluded)
        if self.period is not None:
            logs["period"] = self.period
        if self.synchronous:
            logs["synchronous"] = 1
        return {LOG_PREFIX + name: value for name, value in logs.items()}


def _by_group(name: str, values: Sequence[float], digits: int) -> dict[str, float]:
    known = {group: round(value, digits) for group, value in enumerate(values) if value == value and value != 0}
    if len(values) <= MAX_LOGGED_GROUPS or not known:
        return {f"{name}/group_{group}": value for group, value in known.items()}
    least, greatest = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    return {
        f"{name}/min": known[least],
        f"{name}/argmin": least,
        f"{name}/mean": round(sum(known.values()) / len(known), digits),
        f"{name}/max": known[greatest],
        f"{name}/argmax": greatest,
    }


@dataclass
class Tally:
    """
    What this rank counts during a round.

    Args:
        started (`float`):
            Clock when the round began.
        tokens (`float`, defaults to `0`):
            Tokens trained.
        labels (`float`, defaults to `0`):
            Those of them that count in the loss.
        samples (`float`, defaults to `0`):
            Samples trained.
        loss_sum (`torch.Tensor` or `float`, defaults to `0.0`):
            Sum of training losses. Stays on the device: reading it would make every step wait for the device.
        num_losses (`int`, defaults to `0`):
            How many losses are in the sum.
        waited_seconds (`float`, defaults to `0.0`):
            Time that was spent waiting for other groups before the border.
        taken_in_seconds (`float`, defaults to `0.0`):
            Time that was spent waiting for the outcome of an earlier averaging and taking it in.
    """

    started: float = field(default_factory=time.perf_counter)
    tokens: float = 0
    labels: float = 0
    samples: float = 0
    loss_sum: torch.Tensor | float = 0.0
    num_losses: int = 0
    waited_seconds: float = 0.0
    taken_in_seconds: float = 0.0

    def seconds(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self.started

    def own_seconds(self) -> float:
        """Those of them that went into the group's own steps."""
        return self.seconds() - self.waited_seconds - self.taken_in_seconds


def ratios(numerators: Sequence[float], denominators: Sequence[float], otherwise: float) -> tuple[float, ...]:
    """
    Quotients group by group.

    Args:
        numerators (`Sequence[float]`):
            One for each group.
        denominators (`Sequence[float]`):
            One for each group.
        otherwise (`float`):
            What stands for a quotient by zero.
    """
    return tuple(n / d if d else otherwise for n, d in zip(numerators, denominators, strict=True))


def exchange_rows(values: Mapping[str, float], mesh: Peers) -> tuple[dict[str, list[float]], float]:
    """
    Sums each value over the ranks of a group and tells every rank the sums of all groups.

    Two small all-reduces, the same on all ranks: inside the group, then between the groups, where each group fills its
    own row of a matrix of zeros.

    Args:
        values (`Mapping[str, float]`):
            This rank's contributions, under the same names on all ranks.
        mesh ([`Peers`]):
            The federation.

    Returns:
        `tuple[dict[str, list[float]], float]`: For each name the sum of group 0, 1, ...; and the seconds that the
        exchange between groups took, which is how long this group waited for the last one.
    """
    row = torch.tensor(list(values.values()), dtype=torch.float64, device=mesh.device)
    all_reduce(row, mesh.group)
    row = row.cpu().to(mesh.device)  # waits for the group, so that the clock below times the other groups alone
    start = time.perf_counter()
    table = torch.zeros(mesh.layout.num_groups, row.numel(), dtype=torch.float64, device=mesh.device)
    table[mesh.group_index] = row
    all_reduce(table, mesh.fed)
    columns = table.t().tolist()
    return dict(zip(values, columns, strict=True)), time.perf_counter() - start

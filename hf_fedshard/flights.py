"""Averagings that are in flight: what is known when one starts, and what comes back."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .border import Asked
from .closing import make_metrics
from .held import Held
from .metrics import RoundMetrics, Rows, Tally
from .outcome import Exchanged, Outcome
from .peers import Peers
from .snapshots import Snapshot


Count: TypeAlias = float | torch.Tensor
"""What may be on the device still: whoever reads it waits for that."""


@dataclass(frozen=True)
class Span:
    """
    What a rank has counted when an exchange starts.

    Args:
        round (`int`):
            Number of the round, counted from 1.
        steps (`int`):
            Optimizer steps since it began.
        steps_behind (`int`):
            Those of the whole run.
        tally ([`Tally`]):
            Of the round so far.
        updates (`float` or `torch.Tensor`):
            Steps that an optimizer made; for the thread that exchanges to read.
        period (`int`, *optional*):
            For the metrics: the period of the round, where it is no fixed one.
    """

    round: int
    steps: int
    steps_behind: int
    tally: Tally
    updates: Count
    period: int | None


@dataclass(frozen=True)
class Landed:
    """
    What the thread of the slow tier hands back.

    Args:
        rows (`Mapping[str, list[float]]`):
            What all groups said.
        held ([`Held`]):
            The averages, or the pseudo-gradients.
        found ([`Exchanged`]):
            What is left to be done.
        excluded (`tuple[int, ...]`):
            Groups that were left out.
        drift (`float`):
            The same bits on all ranks, where the period follows it.
        seconds (`float`):
            Time of the exchange on this rank.
    """

    rows: Rows
    held: Held
    found: Exchanged
    excluded: tuple[int, ...]
    drift: float
    seconds: float


@dataclass
class Flight:
    """
    An exchange that was started and whose outcome is not in the model yet.

    Args:
        fragment (`int`):
            Number of the fragment.
        span ([`Span`]):
            What was counted when it started.
        due (`int`):
            Optimizer steps of the run behind when its outcome is to be taken in.
        snapshot ([`Snapshot`]):
            What is exchanged.
        started_seconds (`float`):
            Time that the start took.
        seconds (`float`):
            Time of the round when it started.
        asked ([`Asked`]):
            The requests and numbers that ride on it.
        future (`Future`):
            Of the exchange.
    """

    fragment: int
    span: Span
    due: int
    snapshot: Snapshot
    started_seconds: float
    seconds: float
    asked: Asked
    future: Future[Landed]


@dataclass
class RoundSums:
    """What the fragments of a round have come to so far; sums of what [`RoundMetrics`] and [`Exchanged`] say of each."""

    sync_seconds: float = 0.0
    overlapped_seconds: float = 0.0
    bytes_sent: int = 0
    squared_drift: float = 0.0
    squared_norm: float = 0.0
    squared_gradient: float = 0.0

    def add(self, flight: Flight, landed: Landed, group: int, sync_seconds: float) -> None:
        """
        Adds a fragment.

        Args:
            flight ([`Flight`]):
                Its exchange.
            landed ([`Landed`]):
                What came back.
            group (`int`):
                This rank's.
            sync_seconds (`float`):
                How long the steps stood still for it.
        """
        self.sync_seconds += sync_seconds
        self.overlapped_seconds += landed.seconds
        self.bytes_sent += int(landed.rows["slow_bytes"][group])
        self.squared_drift += landed.found.squared_drift
        self.squared_norm += landed.found.squared_norm
        self.squared_gradient += landed.found.pseudo_gradient_norm**2

    def add_to(self, metrics: RoundMetrics) -> RoundMetrics:
        """
        What the round has sent, how long its steps stood still, and the norm of its pseudo-gradient, where a border ends it
        before its last fragment has had its turn: the border's part, and that of the fragments before it.

        The drift stays that of the border, where the groups become one model: what fragments had at their turns is drift that is
        over, and the border has measured them again.

        Args:
            metrics ([`RoundMetrics`]):
                What the border has measured.
        """
        norm = metrics.pseudo_gradient_norm
        return dataclasses.replace(
            metrics,
            sync_seconds=metrics.sync_seconds + self.sync_seconds,
            bytes_sent=metrics.bytes_sent + self.bytes_sent,
            pseudo_gradient_norm=None if norm is None else (norm**2 + self.squared_gradient) ** 0.5,
        )

    def metrics(self, flight: Flight, landed: Landed, outcome: Outcome, mesh: Peers) -> RoundMetrics:
        """
        The metrics of the round, with its last fragment.

        Args:
            flight ([`Flight`]):
                The exchange of the last fragment.
            landed ([`Landed`]):
                What came back.
            outcome ([`Outcome`]):
                Of its averaging.
            mesh ([`Peers`]):
                The federation.
        """
        metrics = make_metrics(
            landed.rows,
            mesh,
            outcome,
            round=flight.span.round,
            steps=flight.span.steps,
            seconds=flight.seconds,
            wait_seconds=0.0,
            sync_seconds=self.sync_seconds,
            period=flight.span.period,
            synchronous=False,
        )
        drift = (self.squared_drift / self.squared_norm) ** 0.5 if self.squared_norm > 0 else 0.0
        norm = None if metrics.pseudo_gradient_norm is None else self.squared_gradient**0.5
        return dataclasses.replace(
            metrics,
            overlapped_seconds=self.overlapped_seconds,
            bytes_sent=self.bytes_sent,
            drift=drift,
            pseudo_gradient_norm=norm,
        )

"""The exchange of a snapshot in the thread of the slow tier, beside the training steps."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from .averaging import ModelAverager
from .closing import check_rows, left_out, make_row
from .collectives import broadcast_from_first
from .config import FederationConfig
from .flights import Landed, Span
from .metrics import exchange_rows
from .peers import OverlapPeers
from .snapshots import Snapshot, note_distance
from .weights import group_weights


class FoundByAll(Exception):
    """
    An error that all ranks have found in the same rows, so that their communicators are in order.

    Args:
        error (`Exception`):
            What they raise.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def exchange_snapshot(
    averager: ModelAverager,
    tier: OverlapPeers,
    config: FederationConfig,
    snapshot: Snapshot,
    span: Span,
    seconds: float,
    bytes_sent: int,
    more: Mapping[str, float | torch.Tensor],
) -> Landed:
    """
    Averages a snapshot over the groups, and touches neither model nor optimizers.

    In the thread of the slow tier, collective over the world. Order on every rank: the rows, so that a group that has
    fallen out is known; weights, if a function gives them; what [`ModelAverager.exchange`] does; rank 0's drift, where
    the period follows it.

    The rows go through host memory: all groups have come when the first kernel of the exchange is launched, so that none
    spins on the device, in the way of the steps, for as long as the slowest group trains.

    Args:
        averager ([`ModelAverager`]):
            Of the model, on the slow tier.
        tier ([`OverlapPeers`]):
            The communicators.
        config ([`FederationConfig`]):
            The settings.
        snapshot ([`Snapshot`]):
            What is exchanged.
        span ([`Span`]):
            What was counted for it.
        seconds (`float`):
            Time of the round, waiting for other groups left aside.
        bytes_sent (`int`):
            Bytes that this rank sends to other groups.
        more (`Mapping[str, float | torch.Tensor]`):
            Votes, sums and checksums of this rank, under the same names on all ranks.

    Returns:
        [`Landed`]: For the thread that trains.

    Raises:
        FoundByAll: On every rank, if the groups made different numbers of steps or train different parameters, if one holds
            what cannot be averaged, if none has finite parameters, or if the weights are no weights.
    """
    started = time.perf_counter()
    if snapshot.ready is not None:
        # Anchors, buffers and counts too are what the steps' stream makes them by then.
        snapshot.ready.wait(torch.accelerator.current_stream())
        if tier.device.type == "cpu":
            snapshot.ready.synchronize()
    held = snapshot.to_exchange()
    row = make_row(held, span.tally, span.steps, span.updates, seconds, bytes_sent, tier.layout.group_size)
    rows, _ = exchange_rows({**row, **{name: float(value) for name, value in more.items()}}, tier.host)
    try:
        check_rows(rows, held, span.round)
    except Exception as error:
        raise FoundByAll(error) from None
    excluded = left_out(rows)
    try:
        weights = group_weights(config.group_weights, rows, excluded, tier)
    except ValueError as error:  # also what a function does wrong on one rank; an error of its exchange is another one
        raise FoundByAll(error) from None
    found = averager.exchange(held, weights, with_moments=False)
    drift = found.drift
    if config.sync_every == "drift":
        measured = torch.tensor(drift, dtype=torch.float64, device=tier.device)
        broadcast_from_first(measured, tier.fed, tier.group)
        drift = float(measured)
    if averager.outer.optimizer is None:
        note_distance(snapshot)
    if tier.worker.device.type != "cpu":
        # The other thread then needs no more than this one's word for it.
        torch.accelerator.current_stream().synchronize()
    return Landed(rows, held, found, excluded, drift, time.perf_counter() - started)

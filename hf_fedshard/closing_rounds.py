"""How a round is closed: what the groups exchange at a border, in which order, and what it comes to."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from .advancing import AdvancingRounds
from .anchors import SharedAnchors
from .border import Asked, Border
from .closing import check_rows, left_out, make_metrics, make_row, metrics_alone, moments_agree, row_alone
from .held import Held
from .metrics import Rows, exchange_rows
from .outcome import Outcome
from .peers import Peers
from .periods import MeasuredRound
from .weights import group_weights


class ClosingRounds(AdvancingRounds):
    """The part of [`Rounds`] that averages while the steps wait."""

    peers: Peers
    """On whose communicators is averaged."""
    _anchors: SharedAnchors

    def close(self, votes: Mapping[str, bool] | None = None, sums: Mapping[str, float] | None = None) -> Border:
        """
        Closes the round: every group's parameters become their average. Collective over the world.

        Order on every rank: what is in flight, see [`OverlappedAveraging`], also of other federations on the same slow tier,
        so that no other thread uses it; the small exchange of metrics and votes; that of anchors if those of the groups
        differ; one of weights if a function gives them, then those of [`ModelAverager.average`]; then the period of the next
        round, if it is measured, and what its phase needs. What is done depends only on values that all ranks have
        exchanged, so they stay together.

        After synchronous steps the groups hold one model already: in place of the average stands the proof of that, and
        there is no outer step. Nor is there one of what has made its step in this round, beside the steps, or in a round
        without a step: see [`ModelAverager.average`].

        Where no step was counted since the last border this makes a border and no round: `round` and the period stay.

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
        asked = Asked(votes or {}, sums or {})
        if self.mesh.layout.num_groups == 1:
            return self._close_alone(asked)
        turn = self._turn()
        earlier, is_border, beside = self._drain()
        self.averager.wait()
        if is_border:
            # Started after the very step that is behind: its outcome is the model, and there is nothing else to average.
            return self._border_as_it_is(earlier.pop(), asked)
        held = self.averager.tensors.collect(self.fragments)
        # After the line above the device has done the steps, and the clock says how long they took.
        waited = self._tally.waited_seconds
        group_size = self.mesh.layout.group_size
        bytes_sent = self.course.slow_bytes(held.parameter_bytes())
        seconds = self._tally.own_seconds()
        row = make_row(held, self._tally, self.steps, self._num_updates(), seconds, bytes_sent, group_size)
        row.update({name: float(value) for name, value in self._anchors.row().items()})
        rows, wait_seconds = exchange_rows(row | asked.row(), self.peers)
        check_rows(rows, held, self.round + 1)
        start = time.perf_counter()
        outcome, bytes_besides = self._average(held, rows, turn)
        metrics = make_metrics(
            rows,
            self.peers,
            outcome,
            round=self._number,
            steps=self.steps,
            seconds=self._tally.seconds(),
            wait_seconds=waited + wait_seconds,
            sync_seconds=time.perf_counter() - start,
            period=None if isinstance(self.config.sync_every, int) else self.course.period,
            synchronous=self.synchronous,
            bytes_besides=bytes_besides,
        )
        if not self.synchronous:
            self.border_seconds = metrics.sync_seconds
        if earlier and self.untouched:
            # The round has ended, and its last fragment was in flight: this is its border, and no round of its own.
            self._restart_round()
            self.course.begin()
            return earlier[-1].with_border(metrics, *asked.answers(rows), tuple(earlier[:-1]))
        if not self.steps:
            # Nothing was counted, also where a step was begun, which belongs to the round that follows: a border, and no round.
            # The same on all ranks: their rows have been compared.
            self._restart_round()
            self.course.begin()
            return Border(beside.add_to(metrics), *asked.answers(rows), tuple(earlier))
        slowest = max(rows["seconds"]) / group_size
        self.course.end(MeasuredRound(self.steps, slowest, metrics.sync_seconds, metrics.known_drift))
        self._next_round()
        self.course.begin()
        return Border(beside.add_to(metrics), *asked.answers(rows), tuple(earlier))

    def _border_as_it_is(self, border: Border, asked: Asked) -> Border:
        """A border whose averaging was in flight; what is asked for now was not. Collective over the world if anything is."""
        self.averager.leave_out_frozen()
        row = asked.row()
        rows = exchange_rows(row, self.peers)[0] if row else {}
        return Border(border.metrics, *asked.answers(rows), (border,))

    def _average(self, held: Held, rows: Rows, turn: Collection[str] | None) -> tuple[Outcome, int]:
        """What it came to, and what this rank's group has sent for it beside the rows' `slow_bytes`."""
        if self.course.holds_one_model(held.shards):
            return self.averager.take_as_it_is(held, left_out(rows)), 0
        bytes_besides = self._anchors.unify(rows, self.round + 1)
        if self.synchronous:  # there was to be nothing to average
            bytes_besides += int(rows["parameter_bytes"][self.peers.group_index])
        excluded = left_out(rows)
        # Without a counted step, after fragments or in the middle of the first one, there is nothing to weigh by.
        rule = self.config.group_weights if self.steps else "uniform"
        weights = group_weights(rule, rows, excluded, self.peers)
        with_moments = moments_agree(rows, self.peers, self.round + 1)
        step = not self.synchronous
        outcome = self.averager.average(held, weights, excluded, with_moments, step=step, turn=turn)
        return outcome, bytes_besides

    @property
    def _number(self) -> int:
        """Of the round that ends now; of the last one if no step was counted since."""
        return self.round + (self.steps > 0)

    def _close_alone(self, asked: Asked) -> Border:
        """
        One group: plain FSDP or HSDP. There is nobody to average with, and nothing is touched. Collective over the world, for
        what its ranks ask of each other and have counted.
        """
        rows, _ = exchange_rows(row_alone(self._tally) | asked.row(), self.peers)
        metrics = metrics_alone(rows, self._tally, self._number, self.steps, self.mesh.layout.group_size)
        if self.steps:
            self.course.end(MeasuredRound(self.steps, metrics.seconds, 0.0, 0.0))
            self._next_round()
        else:
            self._restart_round()
        return Border(metrics, *asked.answers(rows))

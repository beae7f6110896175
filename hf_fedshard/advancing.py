"""Rounds that go on while they are averaged: what is started, and what is taken in, after which step."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from .border import Border
from .flights import RoundSums, Span
from .periods import MeasuredRound
from .round_state import ResumableRounds


class AdvancingRounds(ResumableRounds):
    """The part of [`Rounds`] that averages beside the steps. Without `overlap_steps` it does nothing."""

    @property
    def fragments(self) -> Sequence[Collection[str] | None]:
        """Names of the parameters of each part that is averaged by itself; `None` stands for all."""
        return [None] if self.overlap is None else self.overlap.fragments

    @property
    def needs_border(self) -> bool:
        """
        Whether the round that is over has to be closed: without `overlap_steps` always, with it where steps are synchronous or
        become so, and where any rank asks for it. The same on all ranks.
        """
        if self.overlap is None or self.synchronous or self.course.turns_synchronous:
            return True
        return self.overlap.wants_border

    def advance(
        self, votes: Mapping[str, bool] | None = None, sums: Mapping[str, float] | None = None
    ) -> Border | None:
        """
        With `overlap_steps`, to be called after each step after which the round is not closed: takes in what is due, and
        starts to average what is due. At the end of a round the next one begins. Does nothing without.

        Args:
            votes (`Mapping[str, bool]`, *optional*):
                Requests of this rank, under the same names on all ranks. They ride on what is started; if any rank has one, the
                next round ends with a border.
            sums (`Mapping[str, float]`, *optional*):
                Where the round is over: numbers of this rank to be summed over all ranks.

        Returns:
            [`Border`] or `None`: What an earlier round came to, where its outcome was taken in.
        """
        overlap, border = self.overlap, None
        if overlap is None or self.synchronous:
            return None
        while overlap.is_due(self.course.num_steps):
            landed = self._take_in()
            if landed is not None:
                # `overlap_steps` is at most a period, so that a round ends before the outcome of the next one is due.
                assert border is None, "two rounds were taken in after one step"
                border = landed
        fragment = overlap.fragment_due(self.steps, self.course.period)
        if fragment is not None:
            ends_round = self.is_due
            besides = self.course.slow_bytes(0) if ends_round else 0
            overlap.start(fragment, self._span(), votes or {}, (sums or {}) if ends_round else {}, besides)
            if ends_round:
                if self.config.sync_every != "drift":  # else when the drift is known
                    self.course.end(MeasuredRound(self.steps, 0.0, 0.0, 0.0), agreed=True)
                self._next_round()
        return border

    @property
    def has_to_advance(self) -> bool:
        """Whether [`~AdvancingRounds.advance`] has an outcome to take in or an averaging to start: the same on all ranks."""
        if self.overlap is None or self.synchronous:
            return False
        starts = self.overlap.fragment_due(self.steps, self.course.period) is not None
        return starts or self.overlap.is_due(self.course.num_steps)

    def _turn(self) -> frozenset[str] | None:
        """
        Names of the parameters of which the outer optimizer makes a step if the round ends now; by default all. Each makes one
        in a round: none where no step was made, and of fragments not those that have had their turn, see
        [`OverlappedAveraging`]. The same on all ranks.
        """
        if not self.steps:
            return frozenset()
        return None if self.overlap is None else self.overlap.still_to_come()

    def _span(self) -> Span:
        return Span(
            round=self.round + 1,
            steps=self.steps,
            steps_behind=self.course.num_steps,
            tally=self._tally,
            updates=self._num_updates(),
            period=None if isinstance(self.config.sync_every, int) else self.course.period,
        )

    def _take_in(self, untouched: bool = False) -> Border | None:
        """Waits for the averaging that was started first, and gives the model its outcome."""
        assert self.overlap is not None
        started = time.perf_counter()
        landed = self.overlap.land(untouched)
        self._tally.taken_in_seconds += time.perf_counter() - started
        if landed is None:
            return None
        border, drift = landed
        if self.config.sync_every == "drift":
            known = None if border.metrics.known_drift is None else drift
            self.course.end(MeasuredRound(border.metrics.steps, 0.0, 0.0, known), agreed=True)
        return border

    def _drain(self) -> tuple[list[Border], bool, RoundSums]:
        """
        Takes in all that is in flight, in the order in which it was started, which is the same on all ranks.

        Returns:
            `tuple[list[Border], bool, RoundSums]`: What rounds came to by it, whether that is a full border (all groups hold one
            model, and anchors that do not differ), and what fragments of the round that is running came to.
        """
        overlap = self.overlap
        if overlap is None:
            return [], False, RoundSums()
        untouched = self.untouched and len(overlap.fragments) == 1
        is_border = untouched and overlap.in_flight
        borders = []
        while overlap.in_flight:
            borders.append(self._take_in(untouched))
        # What was in flight is the model, but says nothing of anchors that differ: an ordinary border makes them one.
        is_border = is_border and not overlap.anchors_differ
        beside = overlap.begin_anew()
        return [border for border in borders if border is not None], is_border, beside

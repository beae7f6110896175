"""
Averaging beside the training steps: what was a snapshot at the end of one step is exchanged while the next steps are made,
and its outcome is given to the model some steps later.

Order, and why nothing can deadlock. All ranks start the same exchanges after the same steps, since that depends on numbers
of steps and on values that all have exchanged before; one thread of each rank runs them in this order, on communicators
that no other thread uses meanwhile. That thread never waits for the thread that trains. The latter waits for an exchange
where its outcome is due, and, also for those of other federations on the same slow tier, before it uses their communicators
itself; by then it has started that exchange, and its group's collectives of the step are behind it. So each wait is for an
exchange that was started earlier on every rank that has come as far, and the groups' steps depend on no other group: the
earliest exchange that is not over can always go on. That is about calls; docs/overlap.md says what a GPU adds.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping

import torch

from .anchors import SharedAnchors, anchors_differ
from .averaging import ModelAverager
from .border import Asked, Border
from .config import FederationConfig
from .flights import Flight, Landed, RoundSums, Span
from .fragment_windows import FragmentWindows
from .fragments import divide, starts, trained_sizes
from .overlapped_exchange import FoundByAll, exchange_snapshot
from .peers import OverlapPeers
from .shards import reshard_modules
from .snapshots import Snapshots


class OverlappedAveraging:
    """
    Starts exchanges and takes in their outcome. With fragments (`num_fragments`) each has its turn in a round.

    The model takes `w + (1 - alpha) (new - snapshot)`, `new` being what the outer step makes of the average: the update of
    Streaming DiLoCo (arXiv 2501.18512), `alpha w + (1 - alpha) new`, with the steps made since the snapshot added to `new`, so
    that none of a group's progress is lost. A group whose snapshot was not finite takes `new` as it is.

    Args:
        averager ([`ModelAverager`]):
            Of the model, on the slow tier.
        tier ([`OverlapPeers`]):
            The communicators, and the thread.
        config ([`FederationConfig`]):
            The settings.

    Raises:
        ValueError: On every rank, if the model cannot be divided into so many fragments.
    """

    def __init__(self, averager: ModelAverager, tier: OverlapPeers, config: FederationConfig) -> None:
        self.averager = averager
        self.tier = tier
        self.config = config
        self.wants_border = False
        """
        Whether the next round has to end with one model, since a rank asks for it, a layer was frozen, a group has fallen out,
        or the anchors of the groups differ.
        """
        self.anchors_differ = False
        """Whether an outcome has told so since the last full border. The next one has to make them one, and not only the model."""
        self._snapshots = Snapshots(averager, tier.worker.device)
        self._anchors = SharedAnchors(averager)
        self._flights: deque[Flight] = deque()
        self._sums = RoundSums()
        self._had_turn: set[int] = set()
        """Fragments whose exchange was started in the running round."""
        self._failure: BaseException | None = None
        self._failed_together = False
        """Whether all ranks have failed with it at the same place, so that their communicators are in order."""
        self.fragments: list[frozenset[str] | None] = [None]
        if config.num_fragments > 1:
            sizes = trained_sizes(averager.model, averager.trained.averaged_shards())
            whole_sizes = trained_sizes(averager.model, sizes)
            self.fragments = [*divide(sizes, config.num_fragments, whole_sizes)]
        self._windows = FragmentWindows(len(self.fragments))

    @property
    def in_flight(self) -> bool:
        """Whether the outcome of an exchange is not in the model yet."""
        return bool(self._flights)

    def raise_failure(self) -> None:
        """Raises what an exchange has failed with on this rank, at the first step after it."""
        if self._failure is not None:
            raise self._failure

    def fragment_due(self, steps: int, period: int) -> int | None:
        """
        Which fragment's exchange starts after a step of a round.

        Args:
            steps (`int`):
                Steps of the round so far.
            period (`int`):
                Its H.

        Returns:
            `int` or `None`: Number of the fragment, the last one at the end of the round.
        """
        places = starts(period, len(self.fragments))
        return places.index(steps) if steps in places else None

    def still_to_come(self) -> frozenset[str] | None:
        """Names of the parameters of those fragments that have not had their turn in the round; `None` for a whole model."""
        names = [names for number, names in enumerate(self.fragments) if number not in self._had_turn]
        return None if len(self.fragments) == 1 else frozenset().union(*(part for part in names if part is not None))

    def start(
        self, fragment: int, span: Span, votes: Mapping[str, bool], sums: Mapping[str, float], bytes_besides: int = 0
    ) -> None:
        """
        Starts the exchange of a fragment, without communication in this thread.

        Args:
            fragment (`int`):
                Its number; all ranks start the same ones in the same order.
            span ([`Span`]):
                What was counted.
            votes (`Mapping[str, bool]`):
                Requests of this rank, under the same names on all ranks. If any rank has one, the next round ends with a full
                border.
            sums (`Mapping[str, float]`):
                Numbers of this rank to be summed over all ranks.
            bytes_besides (`int`, defaults to `0`):
                Bytes sent to other groups in the round in other ways.
        """
        started = time.perf_counter()
        seconds = span.tally.own_seconds()
        tally, updates = self._windows.close(fragment, span)
        last = fragment == len(self.fragments) - 1
        self._had_turn = set() if last else {*self._had_turn, fragment}
        # Here, where all ranks have taken in the same outcomes; and ahead of the snapshot, which says when a device is ready.
        more: dict[str, float | torch.Tensor] = dict(self._anchors.row()) if last else {}
        number = fragment if len(self.fragments) > 1 else None
        snapshot = self._snapshots.take(number, self.fragments[fragment], with_buffers=last)
        asked = Asked(votes, sums)
        more |= {**asked.row(), "frozen": float(snapshot.has_frozen)}
        bytes_sent = sum(plan.slow_bytes() for plan in snapshot.plans.values()) + bytes_besides

        def exchange() -> Landed:
            try:
                self.raise_failure()  # the peers have failed too, or are about to
                window = dataclasses.replace(span, tally=tally, updates=updates)
                return exchange_snapshot(
                    self.averager, self.tier, self.config, snapshot, window, seconds, bytes_sent, more
                )
            except FoundByAll as found:
                self._failure, self._failed_together = found.error, True
                raise found.error from None
            except BaseException as error:
                self._failure = error
                raise

        future = self.tier.worker.submit(exchange)
        flight = Flight(
            fragment=fragment,
            span=span,
            due=span.steps_behind + self.config.overlap_steps,
            snapshot=snapshot,
            started_seconds=time.perf_counter() - started,
            seconds=span.tally.seconds(),
            asked=asked,
            future=future,
        )
        self._flights.append(flight)

    def is_due(self, steps_behind: int) -> bool:
        """
        Whether the outcome of an exchange is due.

        Args:
            steps_behind (`int`):
                Optimizer steps of the run.
        """
        return bool(self._flights) and self._flights[0].due <= steps_behind

    def land(self, untouched: bool = False) -> tuple[Border, float] | None:
        """
        Waits for the exchange that was started first and gives its outcome to the model. All ranks do it after the same step.

        Args:
            untouched (`bool`, defaults to `False`):
                Whether no step was begun since the snapshot of the whole model: the model is then the average, bit for bit.

        Returns:
            `tuple[Border, float]` or `None`: What the round measured and its drift for the next period, where this was its
            last fragment.
        """
        flight = self._flights[0]
        started = time.perf_counter()
        landed = flight.future.result()
        self._flights.popleft()
        last = flight.fragment == len(self.fragments) - 1
        names = self.fragments[flight.fragment]
        reshard_modules(flight.snapshot.modules.values())
        # The outer step moves the anchors alone: the model has left the snapshot, and is given the difference.
        held = dataclasses.replace(landed.held, shards={})
        outcome = self.averager.settle(held, landed.found, landed.excluded, names, last)
        left = self.tier.group_index in landed.excluded
        share = 1.0 - self.config.overlap_alpha
        self._snapshots.put(flight.snapshot, share, replace=left or untouched)
        answers = flight.asked.answers(landed.rows)
        self.anchors_differ |= anchors_differ(landed.rows)
        self.wants_border |= self._asks_for_border(landed, answers[0])
        sync_seconds = flight.started_seconds + time.perf_counter() - started
        self._sums.add(flight, landed, self.tier.group_index, sync_seconds)
        if not last:
            return None
        sums, self._sums = self._sums, RoundSums()
        return Border(sums.metrics(flight, landed, outcome, self.tier), *answers), landed.drift

    def _asks_for_border(self, landed: Landed, votes: Mapping[str, bool]) -> bool:
        """Whether an outcome tells of something that the next round has to end with one model for; the same on all ranks."""
        return (
            any(votes.values())
            # What was frozen goes on being averaged until then, and stepped by an outer optimizer with momentum.
            or any(landed.rows["frozen"])
            or self.anchors_differ
            # The other fragments of a group that has fallen out are not finite either, and would spoil this one in the next step.
            or (bool(landed.excluded) and len(self.fragments) > 1)
        )

    def begin_anew(self) -> RoundSums:
        """
        Told of a border with nothing in flight: all fragments begin with it.

        Returns:
            [`RoundSums`]: What those have come to that had their turn in the round which it ends.
        """
        assert not self._flights
        self.wants_border = self.anchors_differ = False
        self._windows.begin_anew()
        self._had_turn.clear()
        sums, self._sums = self._sums, RoundSums()
        return sums

    def discard(self) -> None:
        """
        Waits for what is in flight and forgets it: the model was replaced. On all ranks, as what was started on all is to end;
        this thread takes part in no collective.

        Raises:
            Exception: What an exchange has failed with on this rank alone: its communicators are out of step with the others'.
                An error that all ranks have found, no finite group say, is over with the model that it was about.
        """
        while self._flights:
            self._flights.popleft().future.exception()
        if not self._failed_together:
            self.raise_failure()
        self._failure, self._failed_together = None, False
        self.begin_anew()

    def abandon(self) -> None:
        """Forgets what is in flight, without waiting for it."""
        self._flights.clear()
        self._snapshots.drop()


def describe(config: FederationConfig) -> str:
    """
    The overlap in words, for a log; empty without one.

    Args:
        config ([`FederationConfig`]):
            The settings.
    """
    if not config.overlap_steps:
        return ""
    fragments = f" in {config.num_fragments} fragments" if config.num_fragments > 1 else ""
    return f", beside the steps{fragments}, each outcome {config.overlap_steps} steps later"

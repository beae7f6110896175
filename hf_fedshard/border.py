"""Where all groups hold one model: what a rank asks the others beside a round, and what it is told there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .metrics import RoundMetrics, Rows


@dataclass(frozen=True)
class Asked:
    """
    What a rank puts to the others beside a round: it travels in the row of the round, under names of its own.

    Args:
        votes (`Mapping[str, bool]`):
            Requests, under the same names on all ranks.
        sums (`Mapping[str, float]`):
            Numbers to be summed over all ranks, likewise.
    """

    votes: Mapping[str, bool] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, float]:
        """What this rank adds to its row."""
        votes = {f"vote/{name}": float(cast) for name, cast in self.votes.items()}
        return votes | {f"sum/{name}": value for name, value in self.sums.items()}

    def answers(self, rows: Rows) -> tuple[dict[str, bool], dict[str, float]]:
        """
        Args:
            rows (`Mapping[str, list[float]]`):
                Of all groups.

        Returns:
            `tuple[dict[str, bool], dict[str, float]]`: For each vote whether any rank of any group has cast it, and for each
            number its sum.
        """
        votes = {name: any(rows[f"vote/{name}"]) for name in self.votes}
        return votes, {name: sum(rows[f"sum/{name}"]) for name in self.sums}


@dataclass(frozen=True)
class Border:
    """
    The moment after a round: every group holds the averaged model. With `overlap_steps` a round may also end without one;
    this is then what its averaging came to, when its outcome was taken in.

    Args:
        metrics ([`RoundMetrics`]):
            What the round measured.
        votes (`dict[str, bool]`):
            For each vote that was put, whether any rank of any group cast it.
        sums (`dict[str, float]`):
            For each number that was handed in, its sum over all ranks of all groups.
        earlier (`tuple[Border, ...]`):
            Rounds before it whose averagings were still in flight.
    """

    metrics: RoundMetrics
    votes: dict[str, bool] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    earlier: tuple[Border, ...] = ()

    def report(self) -> RoundMetrics:
        """The metrics, with those of the rounds that were taken in with it, so that a loop gets each round's once."""
        # What had just been started is the border itself.
        earlier = tuple(border.metrics for border in self.earlier if border.metrics is not self.metrics)
        return replace(self.metrics, earlier=earlier) if earlier else self.metrics

    def with_border(
        self, border: RoundMetrics, votes: dict[str, bool], sums: dict[str, float], earlier: tuple[Border, ...]
    ) -> Border:
        """
        The border of a round that had ended without one.

        Args:
            border ([`RoundMetrics`]):
                What the averaging of the border has measured, which is added to what the round has.
            votes (`dict[str, bool]`):
                Of the border; those of the round stay with it, in `earlier`.
            sums (`dict[str, float]`):
                Likewise.
            earlier (`tuple[Border, ...]`):
                Rounds before this one.

        Returns:
            [`Border`]: With this round as the last of `earlier`.
        """
        metrics = replace(
            self.metrics,
            seconds=self.metrics.seconds + border.seconds,
            wait_seconds=self.metrics.wait_seconds + border.wait_seconds,
            sync_seconds=self.metrics.sync_seconds + border.sync_seconds,
            bytes_sent=self.metrics.bytes_sent + border.bytes_sent,
            excluded=tuple(sorted({*self.metrics.excluded, *border.excluded})),
        )
        return Border(metrics, votes, sums, (*earlier, replace(self, metrics=metrics)))

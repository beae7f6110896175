"""Periods that follow what the rounds measure, by drift or by time; and which kind `sync_every` asks for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from .config import FederationConfig
from .periods import ListedPeriods, MeasuredRound, Periods, parse_stages


FIRST_PERIOD = 8


class DriftPeriods(Periods):
    """
    Averages when the groups have moved apart by a stated distance. Nothing is exchanged inside a round: each border sets
    the length of the next one from the drift of the last, which grows about linearly with the steps. The period changes
    by a factor of 2 at most.

    Args:
        max_drift (`float`):
            The bound of the drift at a border.
        minimum (`int`):
            Shortest period.
        maximum (`int`):
            Longest period.
    """

    measured = True

    def __init__(self, max_drift: float, minimum: int, maximum: int) -> None:
        super().__init__(min(max(FIRST_PERIOD, minimum), maximum))
        self.max_drift = max_drift
        self.minimum = minimum
        self.maximum = maximum

    def after_round(self, found: MeasuredRound) -> None:
        """As many steps as would have led to the bound."""
        if found.drift is None:
            return
        wanted = found.steps * self.max_drift / found.drift if found.drift > 0 else math.inf
        low, high = max(self.minimum, self.current // 2), min(self.maximum, 2 * self.current)
        # Rounded down: the bound is one.
        self.current = max(low, min(high, int(min(wanted, 2.0**31))))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the period, inside the bounds of this run."""
        super().load_state_dict(state)
        self.current = max(self.minimum, min(self.maximum, self.current))


class MeasuredPeriods(Periods):
    """
    The shortest period whose averaging takes at most a stated share of the time, chosen once, after some rounds.

    The first round is left out: it holds compilation, the allocation of buffers and the first meeting of the groups. Of the
    next ones the medians count. Waiting for a slower group is no part of the share: a longer period does not shorten it.

    Args:
        max_share (`float`):
            The bound of the share.
        minimum (`int`):
            Shortest period.
        maximum (`int`):
            Longest period.
    """

    measured = True
    NUM_ROUNDS = 3

    def __init__(self, max_share: float, minimum: int, maximum: int) -> None:
        super().__init__(min(max(FIRST_PERIOD, minimum), maximum))
        self.max_share = max_share
        self.minimum = minimum
        self.maximum = maximum
        self.found: list[tuple[float, float]] = []
        self.rounds = 0

    def after_round(self, found: MeasuredRound) -> None:
        """Notes what a step and an averaging take, and chooses when enough rounds are behind."""
        self.rounds += 1
        if 1 < self.rounds <= self.NUM_ROUNDS + 1 and found.steps:
            self.found.append((found.seconds / found.steps, found.sync_seconds))
        if self.rounds == self.NUM_ROUNDS + 1 and self.found:
            step, sync = self._choose()
            share = sync / (self.current * step + sync)
            above = f", above max_sync_share={self.max_share:g} for max_sync_every={self.maximum}"
            self.news = (
                f"sync_every='auto': a step takes {step:.4g} s and an averaging {sync:.4g} s. The groups are averaged every "
                f"{self.current} steps, which takes {100 * share:.1f} % of the time"
                f"{above if share > self.max_share * (1 + 1e-9) else ''}."
            )

    def state_dict(self) -> dict[str, Any]:
        """The period, and how far the measurement is."""
        found = [list(pair) for pair in self.found]
        return {"current": self.current, "rounds": self.rounds, "found": found, "bounds": self._bounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the measurement, or keeps what was chosen; where the bounds are others, chooses again."""
        super().load_state_dict(state)
        self.rounds = int(state["rounds"])
        self.found = [(float(step), float(sync)) for step, sync in state["found"]]
        # Only then: at a border all ranks read what rank 0 has measured, inside a round each its own, with equal bounds.
        if state.get("bounds", self._bounds) != self._bounds:
            self.current = max(self.minimum, min(self.maximum, self.current))
            if self.rounds > self.NUM_ROUNDS and self.found:
                self._choose()

    @property
    def _bounds(self) -> list[float]:
        return [self.max_share, self.minimum, self.maximum]

    def _choose(self) -> tuple[float, float]:
        """Sets the period, and gives the seconds of a step and of an averaging."""
        step, sync = (statistics.median(values) for values in zip(*self.found, strict=True))
        # sync / (H step + sync) <= share
        wanted = sync * (1 - self.max_share) / (self.max_share * step) if step > 0 else math.inf
        self.current = max(self.minimum, min(self.maximum, math.ceil(min(wanted, 2.0**31) - 1e-9)))
        return step, sync


def make_periods(config: FederationConfig) -> Periods:
    """
    What `sync_every` says.

    Args:
        config ([`FederationConfig`]):
            The settings.
    """
    bounds = config.min_sync_every, config.max_sync_every
    if isinstance(config.sync_every, int):
        return ListedPeriods([(config.sync_every, None)])
    if config.sync_every == "auto":
        return MeasuredPeriods(config.max_sync_share, *bounds)
    if config.sync_every == "drift":
        assert config.max_drift is not None
        return DriftPeriods(config.max_drift, *bounds)
    stages, growth = parse_stages(config.sync_every)
    return ListedPeriods(stages, growth, config.max_sync_every)


def describe(config: FederationConfig) -> str:
    """
    `sync_every` in words, for a log.

    Args:
        config ([`FederationConfig`]):
            The settings.
    """
    every = config.sync_every
    if isinstance(every, int):
        return f"averaged every {every} steps"
    bounds = f"between {config.min_sync_every} and {config.max_sync_every} steps"
    if every == "auto":
        return f"averaged so often that it takes at most {100 * config.max_sync_share:g} % of the time, {bounds}"
    if every == "drift":
        return f"averaged so often that their drift stays near {config.max_drift:g}, {bounds}"
    return f"averaged after periods of {every} steps"

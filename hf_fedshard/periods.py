"""How long the next round is: a fixed period, a list of them, or one that follows what the rounds measure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .config import FederationConfig

FIRST_PERIOD = 8
ALLOWED = 'an integer of at least 1, a list of periods ("8x100,16" or "4x50,*2"), "drift" or "auto"'
_STAGE = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?")
_GROWTH = re.compile(r"\*([1-9]\d*)")


@dataclass(frozen=True)
class MeasuredRound:
    """
    What a federated round tells about the period.

    Args:
        steps (`int`):
            Optimizer steps in it.
        seconds (`float`):
            Time from its first step to the border, of the slowest group.
        sync_seconds (`float`):
            Time of the averaging, without waiting for others.
        drift (`float`):
            See [`RoundMetrics`].
    """

    steps: int
    seconds: float
    sync_seconds: float
    drift: float


class Periods:
    """
    The period of each round. Rounds that are closed early, and those of synchronous steps, are told apart by the caller.

    Attributes:
        current (`int`): H, optimizer steps of the round that is running or begins next.
        measured (`bool`): Whether the choice rests on what this rank has measured, so that all ranks have to take one
            rank's choice.
        news (`str`): What is to be logged about the choice, if anything.
    """

    measured = False

    def __init__(self, current: int) -> None:
        self.current = current
        self.news = ""

    def after_round(self, found: MeasuredRound) -> None:
        """
        Chooses the period of the next round.

        Args:
            found ([`MeasuredRound`]):
                The round that has ended.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, fit for JSON."""
        return {"current": self.current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Args:
            state (`Mapping[str, Any]`):
                From [`~Periods.state_dict`].
        """
        self.current = int(state["current"])


class ListedPeriods(Periods):
    """
    A fixed period, or one after another. Depends on the number of rounds alone, so all ranks agree by themselves.

    Args:
        stages (`list[tuple[int, int | None]]`):
            Period, and how many rounds it holds; the last one holds for ever.
        growth (`int`, defaults to `1`):
            What the last period is multiplied by, again and again, each time after as many rounds as it was given.
        maximum (`int`, *optional*):
            Where the growth ends.
    """

    def __init__(self, stages: list[tuple[int, int | None]], growth: int = 1, maximum: int | None = None) -> None:
        self.stages = stages
        self.growth = growth
        self.maximum = maximum
        self.rounds = 0
        super().__init__(self._period(0))

    def after_round(self, found: MeasuredRound) -> None:
        """Goes on to the next round; what it measured plays no part."""
        self.rounds += 1
        self.current = self._period(self.rounds)

    def state_dict(self) -> dict[str, Any]:
        """Rounds behind."""
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the round of the state."""
        self.rounds = int(state["rounds"])
        self.current = self._period(self.rounds)

    def _period(self, rounds: int) -> int:
        for period, length in self.stages:
            if length is None or rounds < length:
                return period
            rounds -= length
        period, length = self.stages[-1]
        assert length is not None
        if self.growth == 1:
            return period
        for _ in range(rounds // length + 1):
            period *= self.growth
            if self.maximum is not None and period >= self.maximum:
                return max(self.maximum, self.stages[-1][0])
        return period


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
        wanted = found.steps * self.max_drift / found.drift if found.drift > 0 else math.inf
        low, high = max(self.minimum, self.current // 2), min(self.maximum, 2 * self.current)
        # Rounded down: the bound is one.
        self.current = max(low, min(high, int(min(wanted, 2.0**31))))


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
            step, sync = (statistics.median(values) for values in zip(*self.found, strict=True))
            self.current = self._choose(step, sync)
            share = sync / (self.current * step + sync)
            above = f", above max_sync_share={self.max_share:g} for max_sync_every={self.maximum}"
            self.news = (
                f"sync_every='auto': a step takes {step:.4g} s and an averaging {sync:.4g} s. The groups are averaged every "
                f"{self.current} steps, which takes {100 * share:.1f} % of the time"
                f"{above if share > self.max_share * (1 + 1e-9) else ''}."
            )

    def state_dict(self) -> dict[str, Any]:
        """The period, and how far the measurement is."""
        return {"current": self.current, "rounds": self.rounds, "found": [list(pair) for pair in self.found]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the measurement, or keeps what was chosen."""
        super().load_state_dict(state)
        self.rounds = int(state["rounds"])
        self.found = [(float(step), float(sync)) for step, sync in state["found"]]

    def _choose(self, step: float, sync: float) -> int:
        # sync / (H step + sync) <= share
        wanted = sync * (1 - self.max_share) / (self.max_share * step) if step > 0 else math.inf
        return max(self.minimum, min(self.maximum, math.ceil(min(wanted, 2.0**31) - 1e-9)))


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


def parse_stages(text: str) -> tuple[list[tuple[int, int | None]], int]:
    """
    Reads a list of periods: `"8x100,16"` is 100 rounds of 8 steps and then rounds of 16; `"4x50,*2"` is 50 rounds of 4,
    50 of 8, 50 of 16, ....

    Args:
        text (`str`):
            The list.

    Returns:
        `tuple[list[tuple[int, int | None]], int]`: Period and number of rounds of each stage, and the factor of growth.

    Raises:
        ValueError: If it is no such list.
    """
    items = [item.strip() for item in text.split(",")]
    growth = _GROWTH.fullmatch(items[-1]) if len(items) > 1 else None
    matches = [_STAGE.fullmatch(item) for item in (items[:-1] if growth else items)]
    stages = [(int(match[1]), int(match[2]) if match[2] else None) for match in matches if match is not None]
    if len(stages) < len(matches):
        raise ValueError("it is no list of periods")
    if any(length is None for _, length in (stages if growth else stages[:-1])):
        raise ValueError(
            "only the last period can hold for ever: say for how many rounds each of the others holds, 8x100"
        )
    if stages[-1][1] is not None and not growth:
        stages.append((stages[-1][0], None))
    return stages, int(growth[1]) if growth else 1


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

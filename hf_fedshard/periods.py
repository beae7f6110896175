"""How long the next round is: a fixed period, or a list of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
        drift (`float`, *optional*):
            See [`RoundMetrics`]; `None` where fewer than two groups were averaged, which tells nothing.
    """

    steps: int
    seconds: float
    sync_seconds: float
    drift: float | None


class Periods:
    """
    The period of each round. One that is closed early counts like any other, by its own steps; of synchronous ones nothing is
    told, and a border without a step is no round: [`Course`] and [`Rounds`] see to that.

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

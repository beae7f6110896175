"""The runs of a study side by side: seeds put together, distances from the tuned baseline, and the front of loss and bytes."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweep_results import Result
from sweep_settings import Setting


@dataclass(frozen=True)
class Row:
    """
    Runs that differ in their seed alone.

    Args:
        setting ([`Setting`]):
            The run, with the default seed.
        by_seed (`dict[int, float]`):
            Loss on held-out texts of each seed; infinite where a run diverged.
        share (`float`):
            Slow-tier bytes relative to those of a synchronous run of this length.
    """

    setting: Setting
    by_seed: dict[int, float]
    share: float

    @property
    def losses(self) -> list[float]:
        """Of all seeds."""
        return list(self.by_seed.values())

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return sum(self.losses) / len(self.losses)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; `None` with one seed."""
        return standard_error(self.losses)


def standard_error(values: Sequence[float]) -> float | None:
    """
    Standard error of a mean.

    Args:
        values (`Sequence[float]`):
            What the mean is of.

    Returns:
        `float` or `None`: `None` of a single value, and where one is not finite.
    """
    if len(values) < 2 or not all(math.isfinite(value) for value in values):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def merge_seeds(results: Iterable[Result]) -> list[Row]:
    """
    Puts the seeds of each setting together.

    Args:
        results (`Iterable[Result]`):
            The runs.

    Returns:
        `list[Row]`: The best first.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        without_seed = dataclasses.replace(result.setting, seed=Setting.seed)
        groups.setdefault(without_seed.key, []).append(result)
    rows = []
    for same in groups.values():
        losses = {r.setting.seed: math.inf if r.eval_loss is None else r.eval_loss for r in same}
        setting = dataclasses.replace(same[0].setting, seed=Setting.seed)
        rows.append(Row(setting, losses, same[0].share))
    return sorted(rows, key=lambda row: row.loss)


def best_synchronous(rows: Sequence[Row]) -> Row:
    """
    The tuned baseline: the best of all synchronous runs of these rows, on the seeds that all of them have.

    Args:
        rows (`Sequence[Row]`):
            Of one model and one length.

    Raises:
        ValueError: If there is none.
    """
    found = [row for row in rows if row.setting.mode == "synchronous"]
    if not found:
        raise ValueError("There is no synchronous run to compare with.")
    both = set.intersection(*(set(row.by_seed) for row in found))
    return min(found, key=lambda row: sum(row.by_seed[seed] for seed in both) if both else row.loss)


def above(row: Row, baseline: Row) -> float:
    """
    How far the loss lies above the baseline's, relative to it, over the seeds that both have run, or all if there are none.

    Args:
        row ([`Row`]):
            A setting.
        baseline ([`Row`]):
            The tuned synchronous run.
    """
    both = row.by_seed.keys() & baseline.by_seed.keys()
    if not both:
        return row.loss / baseline.loss - 1
    return sum(row.by_seed[seed] for seed in both) / sum(baseline.by_seed[seed] for seed in both) - 1


def error_above(row: Row, baseline: Row) -> float | None:
    """
    Standard error of [`above`]: of the ratios of the seeds that both have run.

    Args:
        row ([`Row`]):
            A setting.
        baseline ([`Row`]):
            The tuned synchronous run.

    Returns:
        `float` or `None`: `None` for the baseline itself, and with fewer than two seeds.
    """
    if row is baseline:
        return None
    both = row.by_seed.keys() & baseline.by_seed.keys()
    return standard_error([row.by_seed[seed] / baseline.by_seed[seed] for seed in both])


def front(rows: Sequence[Row], baseline: Row) -> list[Row]:
    """
    The settings that no other one beats in both loss and bytes, from the most bytes to the fewest.

    Args:
        rows (`Sequence[Row]`):
            Of one model and one length.
        baseline ([`Row`]):
            The tuned synchronous run.
    """
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.share, above(row, baseline))):
        if row.setting.mode != "alone" and (not kept or above(row, baseline) < above(kept[-1], baseline)):
            kept.append(row)
    return kept[::-1]

"""Makes the tables of a study from its results, and puts them into a document.

    python recipes/sweep_report.py --results docs/data/study-2026-11-30.jsonl --document docs/study.md

A table takes the place between `<!-- table: NAME STEPS SIZE -->` and `<!-- end of table -->`: one of [`TABLES`], of runs of
so many steps and models of so many millions of parameters, `runs 400 1M` say. `NAME STEPS SIZE KEY=VALUE` takes those alone
that have this in their model's configuration, and `KEY=` those that leave it as the preset has it.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from sweep_settings import Result, Setting, describe, read_results


MARKER = re.compile(r"(<!-- table: ([\w-]+) (\d+) (\d+)M(?: (\w+)=(\S*))? -->\n).*?(<!-- end of table -->)", re.S)


@dataclass
class ReportArguments:
    """
    What is reported, and where.

    Args:
        results (`list[str]`):
            Files of JSON lines.
        document (`str`):
            Markdown file with places for tables.
    """

    results: list[str] = field(metadata={"help": "Files of JSON lines."})
    document: str = field(metadata={"help": "Markdown file with places for tables."})


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


def table_of_runs(rows: Sequence[Row]) -> list[str]:
    """
    All settings, the best first.

    Args:
        rows (`Sequence[Row]`):
            Of one model and one length.
    """
    baseline = best_synchronous(rows)
    head = ["setting", "G", "learning rate", "perplexity", "loss", "above synchronous", "slow-tier bytes", "seeds"]
    rows = sorted(rows, key=lambda row: above(row, baseline))
    return _table(head, [[_name(row), str(row.setting.num_groups), *_values(row, baseline)] for row in rows])


def table_of_front(rows: Sequence[Row]) -> list[str]:
    """
    What the front consists of.

    Args:
        rows (`Sequence[Row]`):
            Of one model and one length.
    """
    baseline = best_synchronous(rows)
    same = [row for row in rows if row.setting.num_groups == baseline.setting.num_groups]
    lines = [
        [f"{1 - row.share:.0%}", _above(row, baseline), _name(row), f"{row.setting.learning_rate:g}"]
        for row in front(same, baseline)
    ]
    return _table(["slow-tier bytes saved", "above synchronous", "setting", "learning rate"], lines)


def table_of_rates(rows: Sequence[Row]) -> list[str]:
    """
    Perplexity by learning rate, for settings that were tried at several, on the seeds that all of these have.

    Args:
        rows (`Sequence[Row]`):
            Of one model and one length.
    """
    rates = sorted({row.setting.learning_rate for row in rows})
    by_name: dict[str, dict[float, Row]] = {}
    for row in rows:
        by_name.setdefault(f"{_name(row)} | {row.setting.num_groups}", {})[row.setting.learning_rate] = row
    lines = []
    for name, found in by_name.items():
        if len(found) > 1:
            both = set.intersection(*(set(row.by_seed) for row in found.values()))
            losses = {
                rate: sum(row.by_seed[seed] for seed in both) / len(both) if both else row.loss
                for rate, row in found.items()
            }
            best = min(losses.values())
            cells = ["" if r not in losses else _bold(_perplexity(losses[r]), losses[r] == best) for r in rates]
            lines.append([*name.split(" | "), *cells])
    return _table(["setting", "G", *(f"{rate:g}" for rate in rates)], lines)


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "runs": table_of_runs,
    "front": table_of_front,
    "learning-rates": table_of_rates,
}


def fill(text: str, results: Iterable[Result]) -> str:
    """
    Puts tables into their places.

    Args:
        text (`str`):
            The document.
        results (`Iterable[Result]`):
            All runs. A table takes those of its number of steps, its size of model and its value in the configuration.

    Returns:
        `str`: The document with its tables.

    Raises:
        ValueError: If a table is unknown, has no synchronous run or would mix models.
    """
    results = list(results)

    def one(match: re.Match[str]) -> str:
        name, steps, millions, key, value = match[2], int(match[3]), int(match[4]), match[5], match[6]
        if name not in TABLES:
            raise ValueError(f"Tables are {', '.join(TABLES)}, got {name!r}.")
        rows = merge_seeds(
            result
            for result in results
            if result.setting.max_steps == steps
            and round(result.num_parameters / 1e6) == millions
            and (key is None or str(result.setting.model.get(key, "")) == value)
        )
        models = sorted({str(row.setting.model) for row in rows})
        if len(models) > 1:
            raise ValueError(f"A table is of one model, got {', '.join(models)}: choose by KEY=VALUE or KEY=.")
        return match[1] + "\n".join(TABLES[name](rows)) + "\n" + match[7]

    return MARKER.sub(one, text)


def _values(row: Row, baseline: Row) -> list[str]:
    error = "" if row.error is None else f" ± {row.error:.3f}"
    return [
        f"{row.setting.learning_rate:g}",
        _perplexity(row.loss),
        f"{row.loss:.3f}{error}" if math.isfinite(row.loss) else "diverged",
        _above(row, baseline),
        f"{row.share:.1%}",
        str(len(row.losses)),
    ]


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.1f}" if math.isfinite(loss) else "diverged"


def _percent(value: float) -> str:
    return f"{value:+.1%}" if math.isfinite(value) else "diverged"


def _above(row: Row, baseline: Row) -> str:
    error = error_above(row, baseline)
    return _percent(above(row, baseline)) + ("" if error is None else f" ± {100 * error:.1f}")


def _bold(text: str, on: bool) -> str:
    return f"**{text}**" if on else text


def _name(row: Row) -> str:
    # The model is that of the whole table.
    left_out = ("learning_rate", "max_steps", "warmup_steps", "num_groups", *row.setting.model)
    return describe(row.setting, leave_out=left_out)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines]]


def main() -> None:
    """Writes the tables into the document."""
    (args,) = HfArgumentParser(ReportArguments, description=__doc__).parse_args_into_dataclasses()  # type: ignore[arg-type]
    document = Path(args.document)
    results = read_results(Path(name) for name in args.results)
    document.write_text(fill(document.read_text(encoding="utf-8"), results.values()), encoding="utf-8")


if __name__ == "__main__":
    main()

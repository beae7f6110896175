"""Makes the tables of a study from its results, and puts them into a document.

    python recipes/sweep_report.py --results docs/data/study-2026-11-30.jsonl --document docs/study.md

A table takes the place between `<!-- table: NAME STEPS SIZE -->` and `<!-- end of table -->`: one of [`TABLES`], of runs of
so many steps and models of so many millions of parameters, `runs 400 1M` say. `NAME STEPS SIZE KEY=VALUE ...` takes those alone
that have this in their model's configuration or their federation's, and `KEY=` those that leave it as it is.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from sweep_results import Result, read_results
from sweep_rows import Row, above, best_synchronous, error_above, front, merge_seeds
from sweep_settings import Setting, describe


MARKER = re.compile(r"(<!-- table: ([\w-]+) (\d+) (\d+)M((?: \w+=\S*)*) -->\n).*?(<!-- end of table -->)", re.S)


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
            All runs. A table takes those of its number of steps, its size of model and its values in the configuration.

    Returns:
        `str`: The document with its tables.

    Raises:
        ValueError: If a table is unknown, has no synchronous run or would mix models.
    """
    results = list(results)

    def one(match: re.Match[str]) -> str:
        name, steps, millions = match[2], int(match[3]), int(match[4])
        chosen = dict(pair.split("=", 1) for pair in match[5].split())
        if name not in TABLES:
            raise ValueError(f"Tables are {', '.join(TABLES)}, got {name!r}.")
        rows = merge_seeds(
            result
            for result in results
            if result.setting.max_steps == steps
            and round(result.num_parameters / 1e6) == millions
            and _has(result.setting, chosen)
        )
        models = sorted({str(row.setting.model) for row in rows})
        if len(models) > 1:
            raise ValueError(f"A table is of one model, got {', '.join(models)}: choose by KEY=VALUE or KEY=.")
        return match[1] + "\n".join(TABLES[name](rows)) + "\n" + match[6]

    return MARKER.sub(one, text)


def _has(setting: Setting, chosen: Mapping[str, str]) -> bool:
    values = {**setting.federation, **setting.model}
    return all(str(values.get(key, "")) == value for key, value in chosen.items())


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

"""The study of outer loops: its settings, its runs against each other, its tables."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sweep_data import StudyData, batches, prepare
from sweep_outer import StudyArguments, SweepArguments, parse_arguments, run_study, still_to_run
from sweep_report import MARKER, fill
from sweep_results import Result, append_result, read_results
from sweep_rows import best_synchronous, front, merge_seeds
from sweep_settings import Setting, describe, make_setting, read_study
from sweep_training import Run


ROOT = Path(__file__).resolve().parent.parent
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 1}
SMALL |= {"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1}
PRESET = str(ROOT / "recipes" / "models" / "demo")


def small(**values: Any) -> Setting:
    return make_setting(
        {"max_steps": 6, "warmup_steps": 2, "batch_size": 4, "num_groups": 2, "model": SMALL, **values}
    )


@pytest.fixture(scope="module")
def data() -> StudyData:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    return StudyData(*(torch.randint(0, 32, (number, 8), generator=generator) for number in (40, 10)), vocab_size=32)


def write_study(path: Path, *runs: dict[str, Any], **defaults: Any) -> Path:
    path.write_text(
        yaml.safe_dump({"defaults": defaults, "stages": [{"name": "only", "runs": list(runs)}]}, sort_keys=False)
    )
    return path


def test_studies_are_grids(tmp_path: Path) -> None:
    path = write_study(
        tmp_path / "study.yaml",
        {"mode": ["synchronous", "federated"], "learning_rate": ["3e-3", 0.006], "sync_every": 8},
        {"sync_every": "4x2,8", "outer_options": "momentum=0.5", "outer_optimizer": "fedavgm", "num_groups": 2},
        max_steps=10,
    )
    (stage,) = read_study(path)
    assert stage.name == "only"
    assert [(s.mode, s.learning_rate, s.federation) for s in stage.settings[:4]] == [
        ("synchronous", 3e-3, {}),
        ("synchronous", 6e-3, {}),
        ("federated", 3e-3, {"sync_every": 8}),
        ("federated", 6e-3, {"sync_every": 8}),
    ]
    last = stage.settings[4]
    assert last.config().outer_optimizer == "fedavgm" and last.config().num_groups == 2
    assert describe(last, leave_out=["max_steps"]) == (
        "num_groups=2, sync_every=4x2,8, outer_optimizer=fedavgm, outer_options=momentum=0.5"
    )
    assert {setting.max_steps for setting in stage.settings} == {10}


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ({"sync_evry": 8}, "stage only: unknown settings: sync_evry"),
        ({"mode": "both"}, "mode is one of synchronous, federated, alone, got 'both'"),
        ({"num_groups": 3}, "batch_size=16 is not divisible by num_groups=3"),
        ({"sync_every": 0}, "sync_every"),
        ({"inner_moments": "mean"}, "inner_moments"),
    ],
)
def test_wrong_settings(tmp_path: Path, run: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_study(write_study(tmp_path / "study.yaml", run))
    (tmp_path / "other.yaml").write_text("runs: []")
    with pytest.raises(ValueError, match="should hold defaults and stages, got runs"):
        read_study(tmp_path / "other.yaml")


def test_the_studies_that_are_here_can_be_run() -> None:
    for path in sorted((ROOT / "recipes" / "studies").glob("*.yaml")):
        assert sum(len(stage.settings) for stage in read_study(path)) > 0


def test_batches() -> None:
    blocks = torch.arange(10)[:, None]
    drawn = [batch.flatten().tolist() for _, batch in zip(range(6), batches(blocks, 3, 0), strict=False)]
    for epoch in (drawn[:3], drawn[3:]):
        assert len(set(sum(epoch, []))) == 9
    assert drawn[:3] != drawn[3:]
    again = [batch.flatten().tolist() for _, batch in zip(range(6), batches(blocks, 3, 0), strict=False)]
    assert again == drawn
    with pytest.raises(ValueError, match="10 blocks are fewer than the 11 of one step"):
        next(batches(blocks, 11, 0))


def test_runs_against_each_other(data: StudyData) -> None:
    """Synchronous steps throughout are the synchronous run; rounds of one step of SGD-like size are near it."""

    def run(**values: Any) -> tuple[Result, dict[str, torch.Tensor]]:
        made = Run(small(**values), data, PRESET)
        return made.train(), made.model.state_dict()

    synchronous, weights = run(mode="synchronous")
    throughout, same = run(sync_steps_at_start=6)
    assert all((tensor - same[name]).abs().max() < 1e-5 for name, tensor in weights.items())
    assert throughout.eval_loss == pytest.approx(synchronous.eval_loss, abs=1e-5)
    assert throughout.slow_bytes == throughout.synchronous_slow_bytes == synchronous.slow_bytes
    federated, other = run(sync_every=2, sync_steps_at_start=1, sync_steps_at_end=1, inner_moments="average")
    assert max((tensor - other[name]).abs().max() for name, tensor in weights.items()) > 1e-4
    # Two synchronous steps, and two averagings of parameters and two moments.
    assert federated.share == pytest.approx((2 + 2 * 3) / 6)
    parameters = sum(tensor.numel() for name, tensor in weights.items() if name != "lm_head.weight")
    assert federated.num_parameters == parameters
    # Two groups on a ring send one model each.
    assert synchronous.slow_bytes == 6 * 4 * parameters
    alone, _ = run(mode="alone")
    assert (alone.slow_bytes, alone.share) == (0, 0)
    assert len({result.eval_loss for result in (synchronous, federated, alone)}) == 3


def test_a_study_is_gone_on_with(tmp_path: Path, data: StudyData) -> None:
    runs = {"mode": ["synchronous", "federated"], "sync_every": 3, "seed": [1, 2]}
    defaults = {name: value for name, value in dataclasses.asdict(small()).items() if name in ("max_steps", "model")}
    study = write_study(tmp_path / "study.yaml", runs, runs, batch_size=4, num_groups=2, warmup_steps=2, **defaults)
    words = ["--preset", "demo", "--train_tokenizer", "--train_file", "corpus.jsonl", "--study", str(study)]
    args = parse_arguments([*words, "--results", str(tmp_path / "new" / "results.jsonl")])
    assert len(still_to_run(args.sweep)) == 4, "each once"
    first = run_study(StudyArguments(args.model, args.data, dataclasses.replace(args.sweep, max_runs=3)), data)
    rest = run_study(args, data)
    assert (len(first), len(rest)) == (3, 1)
    assert still_to_run(args.sweep) == [] and run_study(args, data) == []
    results = read_results([Path(args.sweep.results)])
    assert list(results.values()) == first + rest
    with pytest.raises(ValueError, match="has the stages only, got none"):
        still_to_run(SweepArguments(str(study), "results.jsonl", stages=["none"]))
    with Path(args.sweep.results).open("a") as file:
        file.write('{"setting": {"mode"')
    with pytest.raises(ValueError, match="line 5 is no result of a run"):
        still_to_run(args.sweep)


def test_data_are_those_of_the_recipes(tmp_path: Path) -> None:
    rows = [{"text": f"peace and war number {number} " * 20, "year": 1900 + number} for number in range(60)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--preset", "demo", "--train_tokenizer", "--vocab_size", "300", "--train_file", str(path)]
    words += ["--block_size", "16", "--study", "s.yaml", "--results", "r.jsonl"]
    args = parse_arguments([*words, "--holdout_column", "year", "--holdout_pattern", "7$", "--max_eval_blocks", "5"])
    found = prepare(args.model, args.data, 0)
    assert found.evaluation.shape == (5, 16) and found.train.shape[1] == 16 and len(found.train) > 50
    assert found.train.dtype == torch.int64 and int(found.train.max()) < found.vocab_size <= 300
    args = parse_arguments(words)
    with pytest.raises(ValueError, match="held-out texts: give --holdout_column or --validation_file"):
        prepare(args.model, args.data, 0)


def result(loss: float | None, share: float, **values: Any) -> Result:
    return Result(make_setting(values), loss, 1.0, int(1000 * share), 1000, 1.0, 950_000, "2026-11-30", "2.13")


def some_results() -> list[Result]:
    return [
        result(4.5, 1, mode="synchronous"),
        result(4.6, 1, mode="synchronous", seed=1),
        result(4.52, 1, mode="synchronous", learning_rate=1e-3),
        result(5.0, 0.125, sync_every=8),
        result(4.95, 0.375, sync_every=8, inner_moments="average"),
        result(5.1, 0.3, sync_every=8, sync_steps_at_start=70),
        result(None, 0.125, sync_every=8, learning_rate=6e-3),
        result(4.9, 0, mode="alone"),
        result(4.0, 1, mode="synchronous", max_steps=1600),
        dataclasses.replace(result(4.1, 1, mode="synchronous", model={"hidden_size": 400}), num_parameters=5_300_000),
    ]


def test_tables() -> None:
    rows = merge_seeds(some_results()[:-2])
    best = best_synchronous(rows)  # on the seed that both have, though the other one's mean is lower
    assert rows[0] is not best
    assert best.by_seed == {42: 4.5, 1: 4.6} and best.loss == pytest.approx(4.55)
    assert best.error == pytest.approx(math.sqrt(2 * 0.05**2 / 2)) and rows[0].error is None
    assert [row.share for row in front(rows, best)] == [1, 0.375, 0.125]
    text = "# T\n\n<!-- table: {} 400 1M -->\nold\n<!-- end of table -->\nrest"
    runs = fill(text.format("runs"), some_results())
    assert "| synchronous | 4 | 0.003 | 94.6 | 4.550 ± 0.050 | +0.0% | 100.0% | 2 |" in runs
    # Against the same seed of the baseline, not against the mean of both.
    assert "| sync_every=8 | 4 | 0.003 | 148.4 | 5.000 | +11.1% | 12.5% | 1 |" in runs
    assert "| sync_every=8 | 4 | 0.006 | diverged | diverged | diverged | 12.5% | 1 |" in runs
    assert "old" not in runs and runs.endswith("rest") and "4.000" not in runs and "4.100" not in runs
    assert fill(runs, some_results()) == runs
    # Seed by seed: 4.95 of 4.5 and 4.6 of 4.6 are +10 % and +0 %.
    paired = fill(
        text.format("runs"),
        [*some_results(), result(4.95, 0.25, sync_every=4), result(4.6, 0.25, sync_every=4, seed=1)],
    )
    assert "| sync_every=4 | 4 | 0.003 | 118.5 | 4.775 ± 0.175 | +4.9% ± 5.0 | 25.0% | 2 |" in paired
    rates = fill(text.format("learning-rates"), some_results())
    assert "| setting | G | 0.001 | 0.003 | 0.006 |" in rates
    assert "| synchronous | 4 | 91.8 | **90.0** |  |" in rates
    assert "| sync_every=8 | 4 |  | **148.4** | diverged |" in rates
    curve = fill(text.format("front"), some_results())
    assert "| 62% | +10.0% | sync_every=8, inner_moments=average | 0.003 |" in curve and "alone" not in curve
    with pytest.raises(ValueError, match="Tables are runs, front, learning-rates, got 'other'"):
        fill(text.format("other"), some_results())
    with pytest.raises(ValueError, match="no synchronous run"):
        fill(text.format("runs"), some_results()[3:5])


def test_tables_are_of_one_model() -> None:
    wide = [
        result(4.2, 1, mode="synchronous", model={"initializer_range": 0.06}),
        result(4.3, 0.125, sync_every=8, model={"initializer_range": 0.06}),
    ]
    text = "<!-- table: runs 400 1M{} -->\n<!-- end of table -->"
    with pytest.raises(ValueError, match=r"of one model, got .*0\.06.*: choose by KEY=VALUE"):
        fill(text.format(""), [*some_results(), *wide])
    chosen = fill(text.format(" initializer_range=0.06"), [*some_results(), *wide])
    assert "| sync_every=8 | 4 | 0.003 | 73.7 | 4.300 | +2.4% | 12.5% | 1 |" in chosen and "148.4" not in chosen
    coded = result(4.1, 0.03, sync_every=8, wire_format="int8", model={"initializer_range": 0.06})
    plain = fill(text.format(" initializer_range=0.06 wire_format="), [*some_results(), *wide, coded])
    assert plain.split("\n", 1)[1] == chosen.split("\n", 1)[1]
    assert "wire_format=int8" in fill(text.format(" initializer_range=0.06"), [*some_results(), *wide, coded])
    others = fill(text.format(" initializer_range="), [*some_results(), *wide])
    assert others.split("\n", 1)[1] == fill(text.format(""), some_results()).split("\n", 1)[1]


def test_results_keep_their_settings(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for item in some_results():
        append_result(path, item)
    assert list(read_results([path]).values()) == some_results()
    again = dataclasses.replace(some_results()[0], eval_loss=4.0)
    append_result(path, again)
    assert read_results([path])[again.setting.key] == again


def test_tables_of_the_documentation() -> None:
    """They are what the results that are kept give."""
    results = read_results(sorted((ROOT / "docs" / "data").glob("study-*.jsonl"))).values()
    filled = 0
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text()
        filled += len(MARKER.findall(text))
        assert fill(text, results) == text, f"python recipes/sweep_report.py --document {path}"
    assert filled > 0

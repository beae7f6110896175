"""What the benchmark makes of its records: figures, targets, tables, pages and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.arguments import parse_arguments
from benchmarks.commands import COMMAND
from benchmarks.records import EVALUATED, Records
from benchmarks.results import Results
from benchmarks.sections import throughput
from benchmarks.targets import TARGETS
from benchmarks.two_tier import Benchmark
from tests.harness.benchmark_records import folder_of_results, learned, turn


def test_results(tmp_path: Path) -> None:
    results = Results(folder_of_results(tmp_path))
    assert results.bound_bytes == 20_000_000
    share = results.share("2x2", 50, "fp32")
    assert share is not None and share.median == pytest.approx(0.5)
    assert results.link_bytes("2x2", 50, "fp32") == 20_200_000
    # 8 s of computing and 3.232 s of wire would give 729 tokens a second.
    assert results.blocking_efficiency("2x2", 50, "fp32") == pytest.approx(512 / (8192 / (8 + 3.232)))
    targets = {target.what: target.row(results) for target in TARGETS}
    assert len(targets) == len(TARGETS)
    ratio = targets["FL+FSDP against FSDP2, 50 Mbit/s"]
    assert (ratio["value"], ratio["reached"], ratio["variant"]) == (pytest.approx(16.0), False, "fp32 / fsdp")
    sent = targets["FL+FSDP: bytes of one fp32 averaging / ring lower bound"]
    assert (sent["value"], sent["reached"]) == (pytest.approx(1.01), True)
    # Both are at loss 6 after 64 steps; FSDP2 makes them at 32 tokens a second.
    time_to_loss = targets["time to the loss at which FSDP2 ends, 50 Mbit/s: FSDP2 / FL+FSDP"]
    assert (time_to_loss["value"], time_to_loss["reached"]) == (pytest.approx(16.0), True)
    assert targets["own time inside a round, Trainer"]["value"] == pytest.approx(0.2)
    saving = targets["saving a checkpoint of 2 groups: seconds a byte / those of Accelerate's own saving"]
    assert (saving["value"], saving["reached"]) == (pytest.approx(1.2), True)
    assert saving["variant"] == "500 MB in 2.00 s; Accelerate's 300 MB"
    assert targets["int8: bytes / fp32 bound"]["reached"] is None


def test_report(tmp_path: Path) -> None:
    content = report.write_report(folder_of_results(tmp_path))
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(content))
    text = (tmp_path / "results.md").read_text()
    assert "| FL+FSDP against FSDP2, 50 Mbit/s | >= 27x | 16.0x | **missed** | fp32 / fsdp |" in text
    row = next(line for line in text.splitlines() if line.startswith("| ours, fp32, blocking | 512"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1:8] == ["512 (512-512)", "50.0 (50.0-50.0)", "20.20 / 8", "1.010", "3.45 (3.40-3.50)", "3.23", "123"]
    assert "- `int8`: no setting wire_format" in text
    # Equal tokens: 64 steps of both. Equal seconds: the shorter of the curves, 131072 tokens at 512 a second.
    assert "| variant | loss after 65536 tokens | after 256 s at 50 Mbit/s |" in text
    assert "| FSDP2 over all ranks | 6.0000 | 6.8750 | 6.0000 | 64 | - | 1 |" in text
    assert "| ours, fp32, blocking | 6.0000 | 5.0000 | 5.0000 | 128 | 16 | 1 |" in text
    assert f"Evaluated: {EVALUATED}" in text


def test_how_long_steps_stood_still(tmp_path: Path) -> None:
    """Also of variants that are overlapped; turns that were measured before it was noted have none."""
    folder = folder_of_results(tmp_path)
    assert "stand still" not in throughput(report.write_report(folder))
    stood = {"border_seconds": [0.02, 0.02], "standstill_seconds": [0.03, 0.05]}
    Records(folder).append("turns", turn("int8_overlap", 0, 1000.0, 1000.0, **stood))
    text = throughput(report.write_report(folder))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    place = rows[0].index("steps stand still, s a round")
    cells = {row[0]: row[place - 1 : place + 1] for row in rows}
    assert cells["ours, int8, overlapped"] == ["-", "0.040 (0.035-0.045)"]
    assert cells["ours, fp32, blocking"] == ["3.45 (3.40-3.50)", "-"]


def test_commands_measure_the_same_again(tmp_path: Path) -> None:
    """Two seeds of 64 steps, evaluated every 32, and turns of three rounds: none of it the default."""
    folder = folder_of_results(tmp_path)
    (folder / "learning.jsonl").unlink()
    for seed in (0, 1):
        for name, steps in (("fsdp", [0, 32, 64]), ("fp32", [0, 32, 64, 96, 128])):
            Records(folder).append("learning", learned(name, seed, steps, [7.0 - 0.01 * step for step in steps]))
    asked = "--learning_seeds 3 --learning_steps 64 --eval_every 32 --rounds 3"
    for parts, rest in (("turns", asked), ("turns", "--rates 1000 --rounds 5"), ("memory", "--rounds 2")):
        session = {"session": "b", "machine": "Linux", "num_cores": 2, "versions": {}, "plain": False}
        Records(folder).append("sessions", session | {"command": f"{COMMAND} --parts {parts} {rest}"})
    report.write_report(folder)
    text = (folder / "results.md").read_text()
    learning = "--parts learning report --learning_steps 64 --learning_seeds 2 --eval_every 32"
    assert text.count(f"`{COMMAND} {learning}`") == 2
    assert f"`{COMMAND} --parts turns report --shapes 2x2 --rates 50 --rounds 3`" in text
    both = "--parts turns learning report --shapes 2x2 --rates 50 --rounds 3 " + learning.partition("report ")[2]
    assert f"`{COMMAND} {both}`" in text
    assert f"`{COMMAND} --parts turns memory report --shapes 2x2 --rates 50 --rounds 3 --variants fp32`" in text


def test_curves_of_another_length_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a folder holds is not measured again; after other steps it is something else."""
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(Benchmark, "_run_world", lambda self, job, network: jobs.append(job))
    folder = folder_of_results(tmp_path)
    words = ["--output_dir", str(folder), "--plain", "--variants", "fsdp", "fp32", "--eval_every", "64"]
    for more in ("--learning_steps 64", "--learning_steps 128", "--learning_steps 64 --learning_seeds 2"):
        Benchmark(parse_arguments([*words, *more.split()]))._learning()
    assert [job["learning_runs"] for job in jobs] == [
        [(0, "fsdp", 128), (0, "fp32", 256)],
        [(1, "fsdp", 64), (1, "fp32", 128)],
    ]


def excess(folder: Path, runs: dict[str, dict[int, float]]) -> dict[str, Any]:
    """The target of int8 after runs that ended with these losses, by variant and seed."""
    (folder / "learning.jsonl").unlink()
    for name, losses in runs.items():
        for seed, loss in losses.items():
            Records(folder).append("learning", learned(name, seed, [0, 256], [7.0, loss]))
    content = report.write_report(folder)
    return next(row for row in content["targets"] if row["what"].startswith("int8, overlapped"))


def test_a_difference_within_its_error_is_not_resolved(tmp_path: Path) -> None:
    folder = folder_of_results(tmp_path)
    fp32 = {0: 5.0, 1: 5.1, 2: 4.9}
    row = excess(folder, {"fp32": {0: 5.0}, "int8_overlap": {0: 5.0}})
    assert (row["value"], row["error"], row["reached"]) == (0.0, None, None)
    text = (tmp_path / "results.md").read_text()
    assert "0.000 % | not resolvable with these runs | 5.0000 / 5.0000 after 256 steps, 1 seed |" in text

    # 1 % apart, always: the seeds move both alike.
    row = excess(folder, {"fp32": fp32, "int8_overlap": {seed: 1.01 * loss for seed, loss in fp32.items()}})
    assert (row["value"], row["reached"]) == (pytest.approx(1.0), False)
    assert row["error"] == pytest.approx(0.0, abs=1e-9)

    # +1 %, -1 %, +0.3 %: a standard deviation of 1.015 %, so a target of 0.2 % is finer than these runs.
    scattered = {0: 5.0 * 1.01, 1: 5.1 * 0.99, 2: 4.9 * 1.003}
    row = excess(folder, {"fp32": fp32, "int8_overlap": scattered})
    assert (row["value"], row["reached"]) == (pytest.approx(0.1), None)
    assert row["error"] == pytest.approx((1.03 / 3) ** 0.5)
    text = (tmp_path / "results.md").read_text()
    assert "0.100 ± 0.586 % | not resolvable with these runs | 5.0046 / 5.0000 after 256 steps, 3 seeds |" in text
    # In the table of losses the scatter is that of each variant.
    assert "| ours, fp32, blocking | 5.0000 ± 0.0577 |" in text

    # Far beyond the limit it is missed, scatter or not, and seeds that one variant lacks are not compared.
    far = {seed: 1.2 * loss for seed, loss in scattered.items()}
    assert excess(folder, {"fp32": {**fp32, 7: 1.0}, "int8_overlap": far})["reached"] is False


def test_runs_evaluated_in_another_way_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of_results(tmp_path)
    old = learned("int8_overlap", 0, [0, 128], [7.0, 1.0])
    del old["evaluated"]
    Records(folder).append("learning", old)
    assert set(Results(folder).curves) == {"fsdp", "fp32"}
    assert "left out, since evaluated in another way: int8_overlap" in capsys.readouterr().out


def test_page_keeps_its_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    folder = folder_of_results(tmp_path)
    report.main([str(folder), "--page", str(page)])
    page.write_text(page.read_text().replace("## Targets\n", "## Targets\n\nWhy it was missed.\n"))
    report.main([str(folder), "--page", str(page)])
    assert page.read_text().count("Why it was missed.") == 1
    assert page.read_text().count("**missed**") > 0
    assert json.loads(page.with_suffix(".json").read_text())["num_parameters"] == 5_000_000


def test_results_page_shows_its_figures(root: Path) -> None:
    page = root / "docs" / "benchmarks.md"
    content = json.loads(page.with_suffix(".json").read_text())
    assert report.fill_page(page.read_text(), content) == page.read_text()
    assert "<!-- begin targets -->" in page.read_text()


def test_plots(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    folder = folder_of_results(tmp_path)
    content = report.write_report(folder)
    paths = plots.draw(content, folder)
    assert [path.name for path in paths] == ["throughput.svg", "perplexity_tokens.svg", "perplexity_seconds.svg"]
    before = [path.read_text() for path in paths]
    assert [path.read_text() for path in plots.draw(content, folder)] == before

"""The benchmark's arithmetic, clocks, variants, command line and files, without a world."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import arguments, curves, statistics
from benchmarks.launcher import LaunchError, run_side_by_side
from benchmarks.network import parse_counters
from benchmarks.own_time import OwnClock, shares_inside_rounds
from benchmarks.records import Records, rounds_done
from benchmarks.turns import rates_of_rounds, times_of_calls
from benchmarks.variants import CEILING, VARIANTS, Variant, choose, unavailable
from benchmarks.workload import Batches, Workload, make_model
from tests.harness.benchmark_records import turn


def test_spread() -> None:
    assert statistics.spread([]) is None
    assert statistics.spread([3.0]) == statistics.Spread(3.0, 3.0, 3.0, 1)
    assert statistics.spread([5, 1, 2, 4, 3]) == statistics.Spread(3, 2, 4, 5)


def test_speed_is_tokens_over_time() -> None:
    """1000 tokens at 100 a second and 1000 at 300: 2000 in 13.3 s, not 200 a second."""
    assert statistics.speed(turn("fp32", 0, 100.0, 300.0)) == pytest.approx(150.0)


def test_share_is_of_the_neighbouring_ceilings() -> None:
    ceilings = [turn(CEILING, 0, 100.0), turn(CEILING, 1, 200.0), turn(CEILING, 2, 400.0)]
    ceilings.append(turn(CEILING, 0, 9999.0, session="b"))
    ours = [turn("fp32", 0, 75.0), turn("fp32", 1, 150.0), turn("fp32", 0, 1.0, session="without a ceiling")]
    assert statistics.shares_of_ceiling(ours, ceilings) == pytest.approx([0.5, 0.5])


def test_ratio_is_inside_a_session() -> None:
    theirs = [turn("fsdp", 0, 10.0), turn("fsdp", 1, 20.0)]
    ours = [turn("fp32", 0, 100.0), turn("fp32", 1, 100.0), turn("fp32", 0, 7.0, session="b")]
    assert statistics.ratios(ours, theirs) == pytest.approx([10.0, 5.0])


def test_bounds() -> None:
    # 2 groups: each node sends the whole model once in fp32.
    assert statistics.ring_bound_bytes(1000) == 4000
    assert statistics.ring_bound_bytes(1000, num_groups=4) == 6000
    assert statistics.wire_seconds(6.25e6, 50) == pytest.approx(1.0)
    # A round computes 2 s, then waits 2 s for the wire: half of the ceiling.
    assert statistics.blocking_bound(1000.0, 2000.0, 12.5e6, 50) == pytest.approx(500.0)


def test_bytes_of_round() -> None:
    turns = [turn("fp32", 0, 1.0, 1.0, link_bytes=200), turn("fp32", 1, 1.0, link_bytes=130, num_link_rounds=2)]
    assert statistics.bytes_of_round(turns) == pytest.approx(330 / 4)
    assert statistics.bytes_of_round([turn("fp32", 0, 1.0)]) is None


def test_curves() -> None:
    assert curves.interpolate([0, 10, 20], [5.0, 4.0, 2.0], 15) == pytest.approx(3.0)
    assert curves.interpolate([0, 10], [5.0, 4.0], 11) is None
    assert curves.first_reached([0, 10, 20], [5.0, 4.0, 2.0], 3.0) == pytest.approx(15.0)
    assert curves.first_reached([0, 10], [5.0, 4.0], 3.0) is None
    assert curves.first_reached([0, 10], [5.0, 4.0], 6.0) == 0


def test_rates_of_rounds() -> None:
    # A round of all ends with the last rank.
    assert rates_of_rounds([[0.0, 1.0, 3.0], [0.0, 2.0, 3.0]], tokens=10, group_size=2) == pytest.approx([10.0, 20.0])
    # Groups that never meet have rounds of their own.
    assert rates_of_rounds([[0.0, 1.0], [0.0, 2.0]], tokens=10, group_size=1) == pytest.approx([15.0])


def test_times_of_calls() -> None:
    """Two ranks, two rounds of three steps; a rank that waits for the other in a call is not the one that tells its time."""
    calls = [[[0.0, 0.25, 0.5], [0.0, 4.0, 2.0]], [[0.0, 1.0, 3.0], [0.5, 0.0, 1.0]]]
    assert times_of_calls(calls) == {"border_seconds": [0.5, 1.0], "standstill_seconds": [0.75, 1.5]}


def test_counters() -> None:
    table = "Inter-| Receive | Transmit\n face |bytes\n  lo: 1 0 0 0 0 0 0 0 2 0\nve0: 30 1 0 0 0 0 0 0 40 1\n"
    assert parse_counters(table, "ve0") == (30, 40)
    with pytest.raises(RuntimeError, match="ve1 is not in"):
        parse_counters(table, "ve1")


def test_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.own_time.time.perf_counter", lambda: now[0])
    clock = OwnClock()

    def wait(seconds: float) -> None:
        now[0] += seconds

    def ours() -> None:
        wait(1.0)
        clock.theirs(wait)(10.0)
        clock.ours(wait)(2.0)
        wait(4.0)

    clock.ours(ours)()
    clock.theirs(wait)(100.0)
    assert clock.seconds == 7.0


def test_borders_are_no_time_inside_a_round() -> None:
    marks = [(0.0, 0.0), (1.0, 9.0), (2.0, 9.1), (4.0, 9.3), (5.0, 10.3), (6.0, 10.4)]
    # Steps from 0: the first warms up, the fourth ends the round.
    assert shares_inside_rounds(marks, sync_every=4) == pytest.approx([0.1, 0.1, 0.1])


def test_model_is_that_of_the_issue() -> None:
    model = make_model(Workload())
    assert 5.25e6 < sum(param.numel() for param in model.parameters()) < 5.35e6
    again = make_model(Workload())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_batches_of_ranks_are_disjoint() -> None:
    blocks = torch.arange(24).view(12, 2)
    drawn = [Batches(blocks, Workload(batch_size=2, block_size=2), rank, 3) for rank in range(3)]
    first = torch.cat([batches.next() for batches in drawn])
    second = torch.cat([batches.next() for batches in drawn])
    assert torch.equal(torch.cat([first, second]), blocks)
    assert torch.equal(drawn[0].next(), blocks[:2])  # round again


def test_settings_that_are_not_there_are_not_available() -> None:
    assert unavailable(VARIANTS["fp32"]) is None
    wrong = Variant("x", "x", "ours", {}, {"no_such_setting": 1})
    assert unavailable(wrong) == "this version of hf_fedshard has no setting no_such_setting"
    wrong = Variant("x", "x", "ours", {}, {"sync_every": 0})
    assert "refuses it: sync_every must be" in str(unavailable(wrong))
    assert "refuses it: overlap_steps=4 must be 2 or less" in str(unavailable(VARIANTS["int8_overlap"], sync_every=2))


def test_choice_of_variants() -> None:
    assert [variant.name for variant in choose(["hsdp"], "2x2", 50)] == [CEILING, "hsdp"]
    assert {"fsdp", "torchft_diloco", "int4"} <= {variant.name for variant in choose(None, "2x2", 50)}
    assert {"hsdp", "fp32"} <= {variant.name for variant in choose(None, "2x4", 50)}
    assert choose(None, "2x4", 1000) == [VARIANTS[CEILING]]
    with pytest.raises(ValueError, match="no variant int5"):
        choose(["int5"], "2x2", 50)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rounds 0", "--rounds is at least 1"),
        ("--turn_seconds 0", "--turn_seconds is positive"),
        ("--learning_seeds 0", "--learning_seeds is at least 1"),
        ("--eval_every 12", "no multiple of --sync_every=8"),
        ("--learning_steps 24", "--learning_steps=24 is no multiple of --eval_every=16"),
        ("--rates 0", "at least 1, got 0"),
        ("--variants int5", "no variant int5"),
        ("--shapes 3x3", "invalid choice"),
    ],
)
def test_wrong_command_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments.parse_arguments(["--output_dir", "x", "--plain", *words.split()])
    assert message in capsys.readouterr().err


def test_records(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.append("turns", turn("fp32", 0, 1.0, 2.0))
    records.append("turns", turn("fp32", 1, 1.0, rate=200))
    with (tmp_path / "turns.jsonl").open("a") as file:
        file.write('{"shape": "2x2", "ra')
    assert len(records.read("turns")) == 2
    turns = records.read("turns")
    assert rounds_done(statistics.select(turns, "2x2", 50, "fp32")) == 2
    assert rounds_done(statistics.select(turns, "2x4", 50, "fp32")) == 0
    records.check_workload(Workload())
    records.check_workload(Workload())
    with pytest.raises(ValueError, match="num_layers 6 -> 4"):
        records.check_workload(Workload(num_layers=4))


def test_failed_world_is_told(tmp_path: Path) -> None:
    run_side_by_side([([sys.executable, "-c", "print('[fine]')"], {})], tmp_path / "log")
    command = [sys.executable, "-c", "raise SystemExit('out of luck')"]
    with pytest.raises(LaunchError, match="out of luck"):
        run_side_by_side(
            [(command, {}), ([sys.executable, "-c", "import time; time.sleep(60)"], {})], tmp_path / "log"
        )

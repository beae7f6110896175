"""Periods by themselves, and in rounds on four and eight ranks: what they choose, that all ranks agree, that they resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_fedshard import FederationConfig
from hf_fedshard.measured_periods import DriftPeriods, MeasuredPeriods, make_periods
from hf_fedshard.periods import MeasuredRound, Periods
from hf_fedshard.simulation import Simulation
from tests.harness.comparison import assert_matches, refer
from tests.harness.overlap_runs import NUM_STEPS, OverlapRun, make_mesh
from tests.harness.pool import WorkerPool
from tests.test_checkpoint_resume import assert_resumes
from tests.test_trainer_equivalence import run


def periods_of(periods: Periods, num_rounds: int, **found: float) -> list[int]:
    chosen = []
    for _ in range(num_rounds):
        chosen.append(periods.current)
        values = {"seconds": 1.0, "sync_seconds": 1.0, "drift": 1.0, **found}
        periods.after_round(MeasuredRound(steps=periods.current, **values))
    return chosen


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (3, [3, 3, 3, 3, 3, 3]),
        ("4x2,8x1,16", [4, 4, 8, 16, 16, 16]),
        ("4x2,8x1", [4, 4, 8, 8, 8, 8]),
        ("1x2,*2", [1, 1, 2, 2, 4, 4]),
        ("5x1,3x2,*3", [5, 3, 3, 9, 9, 20]),
        ("30x1,*2", [30, 30, 30, 30, 30, 30]),
    ],
)
def test_lists(every: Any, expected: list[int]) -> None:
    def make() -> Periods:
        return make_periods(FederationConfig(sync_every=every, max_sync_every=20))

    assert periods_of(make(), 6) == expected
    for behind in range(6):
        before, after = make(), make()
        periods_of(before, behind)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert periods_of(after, 6 - behind) == expected[behind:]


def test_by_drift() -> None:
    """The groups move apart by 0.01 a step: a bound of 0.3 is reached after 30 steps."""
    periods = DriftPeriods(max_drift=0.3, minimum=2, maximum=100)
    found = []
    for rate in (0.01, 0.01, 0.01, 0.01, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0):
        found.append(periods.current)
        periods.after_round(MeasuredRound(periods.current, 1.0, 1.0, rate * periods.current))
    assert found == [8, 16, 30, 30, 30, 15, 7, 3, 2, 2, 4, 8, 16, 32, 64]
    # A round that was closed early counts by its own steps.
    periods.after_round(MeasuredRound(10, 1.0, 1.0, 0.05))
    assert periods.current == 60


def test_by_time() -> None:
    """A step takes 0.1 s and an averaging 1 s: 19 s of steps to one of averaging are 5 %."""
    periods = MeasuredPeriods(0.05, 1, 1000)
    rounds = [(99.0, 99.0), (0.8, 1.0), (0.8, 50.0), (0.8, 0.9)]  # the first is no measure, and one is an outlier
    for number, (seconds, sync) in enumerate(rounds):
        assert periods.current == 8
        assert not periods.news
        if number == 2:  # resumed in the middle of the measurement
            state = json.loads(json.dumps(periods.state_dict()))
            periods = MeasuredPeriods(0.05, 1, 1000)
            periods.load_state_dict(state)
        periods.after_round(MeasuredRound(8, seconds, sync, 0.1))
    assert periods.current == 190
    assert "every 190 steps" in periods.news
    assert "5.0 %" in periods.news
    periods.after_round(MeasuredRound(190, 1.0, 100.0, 0.1))
    assert periods.current == 190, "chosen once"


@pytest.mark.parametrize(("minimum", "maximum", "expected"), [(1, 32, 32), (300, 400, 300), (1, 4, 4)])
def test_bounds(minimum: int, maximum: int, expected: int) -> None:
    periods = MeasuredPeriods(0.05, minimum, maximum)
    assert minimum <= periods.current <= maximum
    for _ in range(4):
        periods.after_round(MeasuredRound(8, 0.8, 1.0, 0.1))
    assert periods.current == expected
    assert ("above max_sync_share" in periods.news) == (expected < 190)


@pytest.mark.parametrize(
    ("share", "minimum", "maximum", "expected"),
    [(0.05, 1, 1000, 190), (0.05, 1, 32, 32), (0.05, 500, 1000, 500), (0.5, 1, 1000, 10), (0.01, 1, 2000, 990)],
)
@pytest.mark.parametrize("rounds", [2, 4, 6])
def test_other_bounds_hold_from_the_resume_on(
    share: float, minimum: int, maximum: int, expected: int, rounds: int
) -> None:
    """Also for a period that was chosen before: from the same measurement, as if the bounds had been these all along."""
    before, after = MeasuredPeriods(0.05, 1, 1000), MeasuredPeriods(share, minimum, maximum)
    for number in range(6):
        if number == rounds:
            after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        periods = before if number < rounds else after
        periods.after_round(MeasuredRound(8, 0.8, 1.0, 0.1))
    if rounds == 6:
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.current == expected
    drifting = DriftPeriods(0.3, minimum, maximum)
    drifting.load_state_dict({"current": 100})
    assert drifting.current == min(max(100, minimum), maximum)


def test_a_round_without_a_drift_tells_nothing() -> None:
    periods = DriftPeriods(max_drift=0.3, minimum=2, maximum=100)
    for drift, expected in ((None, 8), (0.25, 9), (None, 9)):
        periods.after_round(MeasuredRound(periods.current, 1.0, 1.0, drift))
        assert periods.current == expected


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_a_group_alone_has_no_drift(weights: str) -> None:
    """The other one is left out after a fault, or has no weight: the drift of one group from itself says nothing."""
    config = FederationConfig(2, "drift", max_drift=1e-9, min_sync_every=1, group_weights=weights)
    simulation = Simulation(torch.nn.Linear(2, 2), config, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for step in range(8):
        for group in simulation.groups:
            if step == 7 and group.index == 1 and weights == "uniform":
                torch.nn.init.constant_(group.model.weight, float("nan"))
            group.count_step(samples=1 - group.index)
        metrics = simulation.step()
    assert metrics is not None and metrics.drift == 0 and sum(metrics.weights) == 1
    assert [group.rounds.course.period for group in simulation.groups] == [8, 8]


@pytest.mark.parametrize(("every", "then"), [("drift", 16), ("8x1,5x1,3", 5)])
def test_a_border_without_a_counted_step_is_no_round(every: str, then: int) -> None:
    """Also where every optimizer has made a step that is counted afterwards: the groups are averaged, and the period stays."""
    config = FederationConfig(2, every, max_drift=1.0 if every == "drift" else None)
    simulation = Simulation(torch.nn.Linear(2, 2), config, lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def train() -> None:
        for group in simulation.groups:
            (group.model(torch.ones(1, 2)).sum() * (1 + group.index)).backward()
            group.optimizer.step()
            group.optimizer.zero_grad()

    for _ in range(8):
        train()
        for group in simulation.groups:
            group.count_step()
        metrics = simulation.step()
    assert metrics is not None and 0 < metrics.drift < 1
    simulation.close()
    train()
    weights = [group.model.weight.detach().clone() for group in simulation.groups]
    assert not torch.equal(*weights)
    border = simulation.close()
    for group in simulation.groups:
        assert torch.equal(group.model.weight, sum(weights) / 2)
        assert (group.rounds.course.period, group.rounds.round) == (then, 1)
    assert (border.metrics.round, border.metrics.steps) == (1, 0)


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_list_is_the_reference(size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    ranks = run(pool, tmp_path, kind="double", native=True, sync_every="1x2,3x1,*2", max_steps=13)
    from tests.test_trainer_equivalence import native

    result = refer(ranks, "double", loss=native, sync_every={1, 2, 5, 11})
    assert result.borders == [1, 2, 5, 11, 13]
    assert_matches(ranks, result, "double", 1e-12)
    assert [row["fedshard/period"] for row in ranks[0]["log"] if "fedshard/period" in row] == [1, 1, 3, 6, 12]


def steps_of(ranks: list[dict[str, Any]]) -> list[int]:
    return [row["fedshard/steps"] for row in ranks[0]["log"] if "fedshard/steps" in row]


@pytest.mark.slow
def test_by_drift_on_ranks(world4: WorkerPool, tmp_path: Path) -> None:
    ranks = run(world4, tmp_path, sync_every="drift", max_steps=20, settings={"max_drift": 3e-3, "min_sync_every": 1})
    drifts = [row["fedshard/drift"] for row in ranks[0]["log"] if "fedshard/drift" in row]
    print(steps_of(ranks), drifts)
    assert len(set(steps_of(ranks)[:-1])) > 1, "the period must change"
    assert sum(steps_of(ranks)) == 20
    borders = [sum(steps_of(ranks)[: number + 1]) for number in range(len(steps_of(ranks)))]
    assert_matches(ranks, refer(ranks, sync_every=set(borders)), "llama", 1e-4)


def _measured(sync_seconds: list[float]) -> list[int]:
    """Steps of each round, where a step takes 0.1 s and an averaging, by this rank's clock, as long as is said."""
    after_round = MeasuredPeriods.after_round

    def measured(periods: MeasuredPeriods, found: MeasuredRound) -> None:
        own = dataclasses.replace(found, seconds=0.1 * found.steps, sync_seconds=sync_seconds[dist.get_rank()])
        after_round(periods, own)

    with mock.patch.object(MeasuredPeriods, "after_round", measured):
        mesh = make_mesh(with_slow_tier=False)
        mesh.set_timeout(20.0)
        loop = OverlapRun(mesh, sync_every="auto", max_sync_share=0.5, max_sync_every=2)
        found = [metrics.steps for step in range(NUM_STEPS) if (metrics := loop.step(step)) is not None]
        loop.release()
    return found


@pytest.mark.parametrize(
    ("sync_seconds", "chosen"), [([0.05, 1.0, 1.0, 1.0], [1, 1, 1]), ([1.0, 0.05, 0.05, 0.05], [2])]
)
def test_all_ranks_take_what_rank_0_has_measured(
    world4: WorkerPool, sync_seconds: list[float], chosen: list[int]
) -> None:
    """Four rounds of 2 to measure; then half of the time may go into averaging: for 0.05 s after each step, for 1 s never."""
    for steps in world4.run(_measured, sync_seconds):
        assert steps == [2, 2, 2, 2, *chosen]


@pytest.mark.slow
def test_by_time_on_ranks(world4: WorkerPool, tmp_path: Path) -> None:
    """Four rounds of 8 to measure with the ranks' own clocks, which differ; the choice must not."""
    ranks = run(world4, tmp_path, sync_every="auto", max_steps=44, settings={"max_sync_share": 0.5})
    steps = steps_of(ranks)
    print(steps)
    assert steps[:4] == [8] * 4
    assert len(set(steps[4:-1])) <= 1 and sum(steps) == 44
    periods = [[row["fedshard/period"] for row in rank["log"] if "fedshard/period" in row] for rank in ranks]
    assert all(own == periods[0] for own in periods if own)
    for rank in ranks:
        assert all((tensor == ranks[0]["state"][name]).all() for name, tensor in rank["state"].items())


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": "2x1,1x2,3", "save_steps": 3, "step": 3},
        {"sync_every": "drift", "max_drift": 5e-3, "max_sync_every": 4, "save_steps": 1, "step": 4},
        pytest.param({"sync_every": "auto", "min_sync_every": 2, "max_sync_every": 2}, marks=pytest.mark.slow),
    ],
    ids=["list", "drift", "time"],
)
def test_resumed_is_uninterrupted(world4: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    assert_resumes(world4, tmp_path, **options)

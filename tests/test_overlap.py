"""Averaging beside the steps against a simulation of it on whole models, in FL+FSDP and FL+HSDP."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_fedshard.fragments import divide
from tests.harness.overlap_reference import refer
from tests.harness.overlap_runs import NUM_STEPS, OverlapRun, block_net, make_mesh, nesterov, run_case, run_cases
from tests.harness.pool import WorkerPool


def server_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


# Settings, borders on demand, and what the reference is told. 11 steps.
CASES: dict[str, tuple[dict[str, Any], Collection[int], dict[str, Any]]] = {
    "one step": ({"sync_every": 3, "overlap_steps": 1}, (), {"periods": [3], "delay": 1}),
    "two steps": ({"sync_every": 3, "overlap_steps": 2}, (6,), {"periods": [3], "delay": 2}),
    "inside": ({"sync_every": 4, "overlap_steps": 2}, (5, 9), {"periods": [4], "delay": 2}),
    "a whole period": ({"sync_every": 3, "overlap_steps": 3}, (7,), {"periods": [3], "delay": 3}),
    "alpha": (
        {"sync_every": 4, "overlap_steps": 1, "overlap_alpha": 0.5},
        (9,),
        {"periods": [4], "delay": 1, "alpha": 0.5},
    ),
    "weights": (
        {"sync_every": 4, "overlap_steps": 3, "group_weights": "samples"},
        (),
        {"periods": [4], "delay": 3, "weighted": True},
    ),
    "list": ({"sync_every": "2x2,4", "overlap_steps": 1}, (), {"periods": [2, 2, 4], "delay": 1}),
    "nesterov": (
        {"sync_every": 3, "overlap_steps": 2, "outer_optimizer": "nesterov"},
        (7,),
        {"periods": [3], "delay": 2, "outer": nesterov},
    ),
    "fragments": (
        {"sync_every": 4, "overlap_steps": 1, "num_fragments": 2},
        (),
        {"periods": [4], "delay": 1, "fragments": 2},
    ),
    "several in flight": (
        {"sync_every": 4, "overlap_steps": 4, "num_fragments": 3},
        (5, 7),
        {"periods": [4], "delay": 4, "fragments": 3},
    ),
    "fragments with all": (
        {
            "sync_every": 4,
            "overlap_steps": 2,
            "num_fragments": 4,
            "outer_optimizer": "AdamW",
            "outer_learning_rate": 0.02,
            "group_weights": "samples",
            "overlap_alpha": 0.25,
        },
        (6,),
        {"periods": [4], "delay": 2, "fragments": 4, "outer": server_adam, "weighted": True, "alpha": 0.25},
    ),
}
HYBRID = ("two steps", "fragments with all")


def expected(name: str, num_ranks: int, **changes: Any) -> list[dict[str, torch.Tensor]]:
    _, borders, told = CASES[name]
    told = {**told, **changes}
    if "fragments" in told:
        sizes = {name: param.numel() for name, param in block_net().named_parameters()}
        told["fragments"] = divide(sizes, told["fragments"])
    return refer(num_ranks, borders=borders, **told)


def assert_reference(ranks: list[dict[str, Any]], states: list[dict[str, torch.Tensor]], tolerance: float) -> None:
    size, error = len(ranks) // 2, 0.0
    for number, rank in enumerate(ranks):
        assert len(rank["borders"]) == len(states)
        for state, first, reference in zip(rank["borders"], ranks[0]["borders"], states, strict=True):
            for name, tensor in reference.items():
                assert torch.equal(state[name], first[name]), name
                error = max(error, (state[name] - tensor).abs().max().item())
        # Inside a round the ranks of a group are bit for bit together, and the groups are not.
        for state, own, other in zip(
            rank["groups"],
            ranks[number // size * size]["groups"],
            ranks[(number + size) % len(ranks)]["groups"],
            strict=True,
        ):
            assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())
            assert any(not torch.equal(tensor, other[name]) for name, tensor in state.items())
    print(f"largest difference {error:.1e}")
    assert error < tolerance


@pytest.fixture(scope="module")
def flat(world4: WorkerPool) -> list[dict[str, dict[str, Any]]]:
    return world4.run(run_cases, {name: case[:2] for name, case in CASES.items()}, limit_seconds=300)


@pytest.fixture(scope="module")
def hybrid(world8: WorkerPool) -> list[dict[str, dict[str, Any]]]:
    return world8.run(run_cases, {name: CASES[name][:2] for name in HYBRID}, limit_seconds=300)


@pytest.mark.parametrize("name", CASES)
def test_fl_fsdp_is_the_reference(flat: list[dict[str, dict[str, Any]]], name: str) -> None:
    assert_reference([rank[name] for rank in flat], expected(name, 4), 1e-12)


@pytest.mark.parametrize("name", HYBRID)
def test_fl_hsdp_is_the_reference(hybrid: list[dict[str, dict[str, Any]]], name: str) -> None:
    assert_reference([rank[name] for rank in hybrid], expected(name, 8), 1e-12)


def test_metrics_of_every_round_come_once(flat: list[dict[str, dict[str, Any]]]) -> None:
    for rank in flat:
        for name, run in rank.items():
            numbers = [metrics.round for metrics in run["metrics"]]
            assert numbers == list(range(1, len(numbers) + 1)), name
        beside = [metrics for metrics in rank["one step"]["metrics"] if metrics.overlapped_seconds is not None]
        assert len(beside) == 3  # the last round is short, and closed
        assert all(metrics.steps == 3 and metrics.drift > 0 and metrics.losses[1] > 0 for metrics in beside)
        assert "fedshard/overlapped_seconds" in beside[0].as_logs()
        elements = sum(param.numel() for param in block_net().parameters())
        assert beside[0].bytes_sent == 8 * elements
        # All fragments together send the model once.
        assert rank["fragments"]["metrics"][0].bytes_sent == 8 * elements
        # A border ends the second round after the turn of one of three: that has sent its part, and the border sends all.
        sizes = {name: param.numel() for name, param in block_net().named_parameters()}
        first = sum(sizes[name] for name in divide(sizes, 3)[0])
        second = rank["several in flight"]["metrics"][1]
        assert second.steps == 1 and second.bytes_sent == 8 * (elements + first)


LOOPS: dict[str, tuple[dict[str, Any], int]] = {
    # Settings, and the step after which a layer is frozen.
    "blocking": ({"sync_every": 3}, 0),
    "in flight at the end": ({"sync_every": 3, "overlap_steps": 3}, 0),
    "begun at the end": ({"sync_every": 11, "overlap_steps": 2}, 0),
    "fragments": ({"sync_every": 4, "overlap_steps": 4, "num_fragments": 3}, 0),
    "a border that is wanted": ({"sync_every": 2, "overlap_steps": 2}, 1),
    "synchronous at last": ({"sync_every": 3, "overlap_steps": 3, "sync_steps_at_end": 5}, 0),
}


def count_rounds() -> dict[str, list[tuple[int, int, int]]]:
    """Body: rounds, steps and rounds taken in with them, of all that a loop is given by `step` and `finish`."""
    mesh, found = make_mesh(), {}
    for name, (settings, frozen_after) in LOOPS.items():
        run = OverlapRun(mesh, **settings)
        given = []
        for step in range(NUM_STEPS):
            given.append(run.step(step))
            if step + 1 == frozen_after:
                run.model.head.requires_grad_(False)  # type: ignore[union-attr]
        given.append(run.rounds.finish())
        found[name] = [
            (each.round, each.steps, len(each.earlier))
            for metrics in given
            if metrics is not None
            for each in (*metrics.earlier, metrics)
        ]
    return found


def test_a_loop_is_given_each_round_once(world4: WorkerPool) -> None:
    for found in world4.run(count_rounds, limit_seconds=120):
        for name, rounds in found.items():
            assert [number for number, _, _ in rounds] == list(range(1, len(rounds) + 1)), name
            assert sum(steps for _, steps, _ in rounds) == NUM_STEPS, name
        several = {name for name, rounds in found.items() if any(earlier for _, _, earlier in rounds)}
        assert several == set(LOOPS) - {"blocking", "begun at the end"}


MEASURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Settings, and what the reference is told; no border but the last.
    "whole": (
        {"sync_every": 3, "overlap_steps": 2, "outer_optimizer": "nesterov"},
        {"periods": [3], "delay": 2, "outer": nesterov},
    ),
    "fragments": (
        {
            "sync_every": 4,
            "overlap_steps": 4,
            "num_fragments": 3,
            "outer_optimizer": "nesterov",
            "group_weights": "samples",
        },
        {"periods": [4], "delay": 4, "fragments": 3, "outer": nesterov, "weighted": True},
    ),
}


def measure() -> dict[str, list[tuple[float, float | None]]]:
    """Body: drift and norm of the pseudo-gradient of all rounds, of which a border ends the last."""
    mesh, found = make_mesh(), {}
    for name, (settings, _) in MEASURED.items():
        run = OverlapRun(mesh, **settings)
        given = [run.step(step) for step in range(NUM_STEPS)] + [run.rounds.finish()]
        rounds = [each for metrics in given if metrics is not None for each in (*metrics.earlier, metrics)]
        assert [metrics.overlapped_seconds is None for metrics in rounds[-2:]] == [False, True]
        found[name] = [(metrics.drift, metrics.pseudo_gradient_norm) for metrics in rounds]
    return found


def test_drift_and_norm_are_those_of_the_whole_model(world4: WorkerPool) -> None:
    """With fragments of all of them together, those included that had their turn before a border; the drift there is its own."""
    ranks = world4.run(measure, limit_seconds=120)
    for name, (_, told) in MEASURED.items():
        measured: list[tuple[float, float, float]] = []
        sizes = {name: param.numel() for name, param in block_net().named_parameters()}
        num_fragments = told.get("fragments", 1)
        refer(4, **{**told, "fragments": divide(sizes, num_fragments)}, measured=measured)
        for rank in ranks:
            assert len(rank[name]) == {"whole": 4, "fragments": 3}[name]
            for number, (drift, norm) in enumerate(rank[name]):
                # In the last round two fragments of three have had their turn, then the border averages all at once.
                parts = measured[number * num_fragments : (number + 1) * num_fragments]
                squares = [sum(part[place] for part in parts) for place in range(3)]
                if number == len(rank[name]) - 1:
                    assert len(measured) == (number + 1) * num_fragments
                    squares[:2] = measured[-1][:2]
                assert drift == pytest.approx((squares[0] / squares[1]) ** 0.5, rel=1e-9)
                assert norm == pytest.approx(squares[2] ** 0.5, rel=1e-9)


def ask() -> list[tuple[dict[str, bool], dict[str, float]]]:
    """Body: at a border that is averaged at once, and at one whose averaging was in flight."""
    mesh, found = make_mesh(), []
    for extra in (0, 1):
        run = OverlapRun(mesh, sync_every=3, overlap_steps=2)
        for step in range(3 + extra):
            run.step(step)
        border = run.rounds.close({"one": dist.get_rank() == 3, "none": False}, {"none": 1.0, "vote/none": 2.0})
        found.append((border.votes, border.sums))
        run.release()
    return found


def test_votes_and_sums_of_both_kinds_of_border(world4: WorkerPool) -> None:
    for found in world4.run(ask):
        assert found == [({"one": True, "none": False}, {"none": 4.0, "vote/none": 8.0})] * 2


def run_single(settings: dict[str, Any]) -> dict[str, Any]:
    return run_case(make_mesh(), {"dtype": torch.float32, **settings})


def test_single_precision(world4: WorkerPool) -> None:
    ranks = world4.run(run_single, CASES["one step"][0], limit_seconds=120)
    assert_reference(ranks, expected("one step", 4, dtype=torch.float32), 1e-4)


def blocking() -> Any:
    """The same run four times: as ever, twice; on communicators of its own; and in flight, but waited for at once."""
    plain, tier = make_mesh(with_slow_tier=False), make_mesh()
    settings = {"dtype": torch.float32, "sync_every": 3, "outer_optimizer": "nesterov"}
    gloo, beside = {**settings, "slow_backend": "gloo"}, {**settings, "overlap_steps": 2}
    return [
        run_case(plain, settings)["borders"][-1],
        run_case(make_mesh(False, "gloo"), gloo)["borders"][-1],
        run_case(tier, settings)["borders"][-1],
        run_case(tier, beside, borders=(3, 6, 9))["borders"][-1],
    ]


def test_no_delay_is_blocking_bit_for_bit(world4: WorkerPool) -> None:
    for runs in world4.run(blocking, limit_seconds=120):
        for other in runs[1:]:
            assert all(torch.equal(tensor, runs[0][name]) for name, tensor in other.items())

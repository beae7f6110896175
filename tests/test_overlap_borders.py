"""Full borders between averagings beside the steps: what they leave alone, and who else uses the slow tier meanwhile."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_fedshard import guard, overlapped_exchange
from hf_fedshard.fragments import divide
from tests.harness.models import full_state
from tests.harness.overlap_reference import refer
from tests.harness.overlap_runs import NUM_STEPS, OverlapRun, block_net, make_mesh, nesterov, run_case
from tests.harness.pool import WorkerPool


IN_FOUR = {"sync_every": 4, "num_fragments": 4, "outer_optimizer": "nesterov"}
WHOLE = {"sync_every": 4, "outer_optimizer": "nesterov"}
# Where borders are made, in rounds of 4 steps: never but at the end; after a step that has ended a round, and started its last
# exchange; at the end of a round in place of that exchange, as Trainer's log does.
WHERE = ("end", "after", "instead")


def walked(
    settings: dict[str, Any], where: str, num_steps: int
) -> tuple[dict[str, torch.Tensor], list[float], list[int]]:
    """Body: steps of the same length, other in each group, that do not depend on the model. The model, outer steps, borders."""
    run = OverlapRun(make_mesh(), **settings)
    rounds, borders = run.rounds, []
    generator = torch.Generator().manual_seed(run.mesh.group_index)
    moves = [torch.randn((), generator=generator, dtype=torch.float64) * 1e-2 for _ in run.model.parameters()]
    for step in range(num_steps):
        with torch.no_grad():
            for param, moved in zip(run.model.parameters(), moves, strict=True):
                param.to_local().add_(moved)  # type: ignore[attr-defined]
        if where == "instead" and step % 4 == 3:
            rounds.overlap.wants_border = True  # type: ignore[union-attr]
        rounds.step()
        if where == "after" and step % 4 == 3:
            rounds.close()
        borders += [step + 1] if rounds.at_border else []
    outer = rounds.averager.outer
    state = run.release()
    steps = [0.0]
    if outer.optimizer is not None:
        steps = [float(outer.optimizer.state[anchor].get("step", 0)) for anchor in outer.anchors.values()]
    return state, steps, borders


def walked_everywhere(settings: dict[str, Any], num_steps: int) -> dict[str, Any]:
    return {where: walked(settings, where, num_steps) for where in WHERE}


@pytest.mark.parametrize("settings", [IN_FOUR, WHOLE, {**IN_FOUR, "wire_format": "bf16"}], ids=["four", "one", "bf16"])
@pytest.mark.parametrize("overlap_steps", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_borders_leave_the_outer_loop_alone(world4: WorkerPool, settings: dict[str, Any], overlap_steps: int) -> None:
    """Where steps do not depend on the model, a border changes none of what an outer optimizer sees: neither what, nor how often."""
    settings = {**settings, "overlap_steps": overlap_steps}
    ranks = world4.run(walked_everywhere, settings, 12, limit_seconds=100)
    start = dict(block_net().named_parameters())
    # bfloat16 rounds what is moved by, at other places.
    tolerance = 2e-3 if "wire_format" in settings else 1e-12
    for rank in ranks:
        assert rank["after"][2] == rank["instead"][2] == [4, 8, 12]
        assert rank["end"][2] == []
        for where in WHERE:
            for name, tensor in rank[where][0].items():
                torch.testing.assert_close(tensor, rank["end"][0][name], rtol=0, atol=tolerance, msg=f"{where} {name}")
                assert torch.equal(tensor, ranks[0][where][0][name])
    moved = max((tensor - start[name]).abs().max() for name, tensor in ranks[0]["end"][0].items())
    assert moved > 0.1, "an outer step too many would show"


def counted(overlap_steps: int) -> dict[str, Any]:
    settings = {**IN_FOUR, "outer_optimizer": "AdamW", "outer_learning_rate": 0.01, "overlap_steps": overlap_steps}
    return {where: walked(settings, where, 12)[1] for where in WHERE}


def test_each_fragment_steps_once_in_a_round(world4: WorkerPool) -> None:
    for rank in world4.run(counted, 3):
        assert {tuple(set(steps)) for steps in rank.values()} == {(3.0,)}


def numbered(where: str) -> tuple[list[tuple[int, int]], list[Any], int, int]:
    """Body: rounds of 4, 2 and 2 steps. Number and steps of each that is reported, what is sent, where the run stands at the end."""
    run = OverlapRun(make_mesh(), sync_every="4x1,2x2,3", num_fragments=2, overlap_steps=2)
    rounds, reported = run.rounds, []
    for step in range(8):
        reported.append(run.step(step))
        if where == "after" and rounds.untouched:
            reported.append(rounds.close().report())
    reported.append(rounds.finish())
    guard.detach(rounds)
    found = [each for metrics in reported if metrics for each in (*metrics.earlier, metrics)]
    return [(each.round, each.steps) for each in found], found, rounds.round, rounds.course.period


@pytest.mark.parametrize("where", ["end", "after"])
def test_a_border_right_after_a_round_is_no_round(world4: WorkerPool, where: str) -> None:
    """The last fragment is in flight there: the border belongs to the round, which is reported once and with all that it sent."""
    ranks = world4.run(numbered, where, limit_seconds=100)
    for numbers, found, round, period in ranks:
        assert numbers == [(1, 4), (2, 2), (3, 2)]
        assert (round, period) == (3, 3)
        # Of both ranks of a group, in float64, to one other group.
        model = 8 * sum(param.numel() for param in block_net().parameters())
        sent = [each.bytes_sent for each in found]
        assert sent == ([2 * model] * 3 if where == "after" else [model, model, 2 * model])
        assert all(loss > 0 for each in found for loss in each.losses)


def finished_twice() -> Any:
    """Body: a blocking federation that is closed again where no step was made."""
    run = OverlapRun(make_mesh(), **{**WHOLE, "sync_every": "4x1,2x1,3"})
    for step in range(4):
        run.step(step)
    state = full_state(run.model)
    momentum = [
        value.clone() for held in run.rounds.averager.outer.optimizer.state.values() for value in held.values()
    ]  # type: ignore[union-attr]
    closed = [run.rounds.close().metrics for _ in range(2)]
    place = [(each.round, each.steps) for each in closed], run.rounds.round, run.rounds.course.period
    after = [value.clone() for held in run.rounds.averager.outer.optimizer.state.values() for value in held.values()]  # type: ignore[union-attr]
    again = full_state(run.model)
    run.release()
    equal = all(torch.equal(tensor, again[name]) for name, tensor in state.items())
    return all(map(torch.equal, momentum, after)), equal, place


def test_a_border_without_a_step_makes_no_outer_step_and_is_no_round(world4: WorkerPool) -> None:
    assert world4.run(finished_twice) == [(True, True, ([(1, 0), (1, 0)], 1, 2))] * 4


TWO: tuple[dict[str, Any], ...] = (
    {"sync_every": 3, "overlap_steps": 2, "outer_optimizer": "nesterov"},
    {"sync_every": 4, "overlap_steps": 3, "num_fragments": 2},
)
CLOSED_AT = (5, 8)


def two_models() -> Any:
    """
    Body: two federations on one mesh, stepped in turns; each is closed while the other has an exchange in flight, which is
    slow in one group.
    """
    mesh = make_mesh()
    mesh.set_timeout(30.0)
    runs = [OverlapRun(mesh, **settings) for settings in TWO]
    borders: list[list[Any]] = [[], []]
    exchange_rows, busy = overlapped_exchange.exchange_rows, 0

    def slowly(*args: Any) -> Any:
        time.sleep(0.2 if mesh.group_index else 0.02)
        return exchange_rows(*args)

    with mock.patch.object(overlapped_exchange, "exchange_rows", slowly):
        for step in range(NUM_STEPS):
            for run in runs:
                run.step(step)
            for number, run in enumerate(runs):
                if step + 1 == CLOSED_AT[number]:
                    busy += runs[1 - number].rounds.overlap.in_flight  # type: ignore[union-attr]
                    run.rounds.close()
                    borders[number].append(full_state(run.model))
        for number, run in enumerate(runs):
            borders[number].append(run.release())
    return busy, borders


def test_two_federations_share_a_slow_tier(world4: WorkerPool) -> None:
    sizes = {name: param.numel() for name, param in block_net().named_parameters()}
    expected = [
        refer(4, periods=[3], delay=2, borders=CLOSED_AT[:1], outer=nesterov),
        refer(4, periods=[4], delay=3, borders=CLOSED_AT[1:], fragments=divide(sizes, 2)),
    ]
    for busy, borders in world4.run(two_models, limit_seconds=100):
        assert busy == 2
        for found, states in zip(borders, expected, strict=True):
            assert len(found) == len(states)
            for state, reference in zip(found, states, strict=True):
                for name, tensor in reference.items():
                    torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12, msg=name)


def aborted() -> dict[str, torch.Tensor]:
    """Body: a run is given up with an exchange in flight, and another begins on the same communicators without overlap."""
    mesh = make_mesh(True, "gloo")
    first = OverlapRun(mesh, **TWO[0], slow_backend="gloo")
    exchange_rows = overlapped_exchange.exchange_rows

    def slowly(*args: Any) -> Any:
        time.sleep(1.0 if mesh.group_index else 0)
        return exchange_rows(*args)

    with mock.patch.object(overlapped_exchange, "exchange_rows", slowly):
        for step in range(3):
            first.step(step)
        assert first.rounds.overlap is not None and first.rounds.overlap.in_flight
        first.rounds.release()
        return run_case(mesh, {"sync_every": 3, "slow_backend": "gloo"})["borders"][-1]


def test_a_run_that_was_given_up_is_waited_for(world4: WorkerPool) -> None:
    states = world4.run(aborted, limit_seconds=60)
    reference = refer(4, periods=[3], delay=1, borders=(3, 6, 9))[-1]
    for state in states:
        for name, tensor in reference.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12, msg=name)


def failing(together: bool, **settings: Any) -> tuple[str, int]:
    """Body: an exchange fails, on all ranks alike or on rank 1 alone; then the model is replaced by a checkpoint's."""
    mesh = make_mesh()
    mesh.set_timeout(3.0)
    run = OverlapRun(mesh, sync_every=2, overlap_steps=1, **settings)
    state = run.rounds.state_dict()
    kept = {name: shard.clone() for name, shard in run.rounds.averager.trained.averaged_shards().items()}
    exchange_rows, error = overlapped_exchange.exchange_rows, ""

    def broken(*args: Any) -> Any:
        if not together and dist.get_rank() == 1:
            raise MemoryError("no memory")
        return exchange_rows(*args)

    with mock.patch.object(overlapped_exchange, "exchange_rows", broken):
        try:
            for step in range(4):
                if together and step == 1 and not settings:
                    with torch.no_grad():
                        next(run.model.parameters()).to_local().fill_(float("nan"))  # type: ignore[attr-defined]
                run.step(step)
        except Exception as problem:
            error = type(problem).__name__
    with torch.no_grad():
        for name, shard in run.rounds.averager.trained.averaged_shards().items():
            shard.copy_(kept[name])
    run.optimizer.state.clear()
    try:
        run.rounds.restore(state)
    except Exception as problem:
        guard.detach(run.rounds)
        return f"{error}, again {type(problem).__name__}", 0
    found = []
    for step in range(5):
        run.train(step)
        found.append(run.rounds.step(tokens=1, samples=1))
    run.release()
    return error, sum(metrics is not None for metrics in found)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "RuntimeError"),  # no group is finite
        ({"group_weights": "tokens"}, "ValueError"),  # none were handed over
    ],
)
def test_an_error_of_all_is_over_when_the_model_is_replaced(
    world4: WorkerPool, settings: dict[str, Any], error: str
) -> None:
    assert world4.run(failing, True, **settings) == [(error, 2)] * 4


def test_an_error_of_one_rank_is_not(world4: WorkerPool) -> None:
    results = world4.run(failing, False)
    assert results[1] == ("MemoryError, again MemoryError", 0)
    assert all("again" in text for text, _ in results)

"""What becomes of bad groups, slow groups and errors while an averaging is in flight."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hf_fedshard import guard, overlapped_exchange
from hf_fedshard.shards import persistent_buffers
from tests.harness.delayed import Delayed
from tests.harness.models import full_state
from tests.harness.overlap_devices import Normed
from tests.harness.overlap_runs import NUM_STEPS, OverlapRun, block_net, draws, make_mesh
from tests.harness.pool import WorkerPool


def poisoned(settings: dict[str, Any]) -> dict[str, Any]:
    """Group 1 is not finite at the end of the first round, of 3 steps."""
    mesh = make_mesh()
    run = OverlapRun(mesh, sync_every=3, **settings)
    found: dict[str, Any] = {"metrics": [], "states": [], "moments": []}
    for step in range(8):
        if step == 2 and mesh.group_index == 1:
            with torch.no_grad():
                run.model.layers[0].weight.to_local().fill_(float("nan"))  # type: ignore[union-attr]
        metrics = run.step(step)
        found["metrics"] += [metrics] if metrics else []
        found["states"].append(full_state(run.model))
        found["moments"].append(len(run.optimizer.state))
    found["end"] = run.release()
    return found


def test_a_group_that_is_not_finite_takes_the_average(world4: WorkerPool) -> None:
    ranks = world4.run(poisoned, {"overlap_steps": 1})
    for rank in ranks:
        assert rank["metrics"][0].excluded == (1,)
        assert rank["metrics"][1].excluded == ()
        for name, tensor in rank["end"].items():
            assert tensor.isfinite().all()
            assert torch.equal(tensor, ranks[0]["end"][name])
    for name, tensor in ranks[3]["states"][3].items():
        # The average of the healthy groups is what the one healthy group held at the snapshot.
        assert torch.equal(tensor, ranks[0]["states"][2][name]), name
    assert ranks[3]["moments"][3] == 0 < ranks[0]["moments"][3]


def test_with_fragments_a_full_border_follows(world4: WorkerPool) -> None:
    ranks = world4.run(poisoned, {"overlap_steps": 1, "num_fragments": 2})
    for rank in ranks:
        assert 1 in {group for metrics in rank["metrics"] for group in metrics.excluded}
        for name, tensor in rank["end"].items():
            assert tensor.isfinite().all(), name
            assert torch.equal(tensor, ranks[0]["end"][name])


def different_parameters() -> None:
    run = OverlapRun(make_mesh(), sync_every=2, overlap_steps=1)
    if dist.get_rank() < 2:
        run.model.head.requires_grad_(False)  # type: ignore[union-attr]
        run.rounds.averager.trained._trained -= {"head.weight", "head.bias"}
    for step in range(4):
        run.step(step)


def test_an_error_that_all_find_is_raised_by_all(world4: WorkerPool) -> None:
    errors = world4.run_failing(different_parameters)
    assert {error.type_name for error in errors} == {"FederationMismatchError"}
    assert all("requires_grad was changed in some groups only" in error.message for error in errors)


def failing_exchange() -> Any:
    """On rank 1 the exchange fails. Every rank tells with what, and when."""
    mesh = make_mesh()
    mesh.set_timeout(6.0)
    run = OverlapRun(mesh, sync_every=3, overlap_steps=2)

    def broken(*args: Any) -> Any:
        raise MemoryError("no memory for the buckets")

    started = time.monotonic()
    with (
        mock.patch.object(overlapped_exchange, "exchange_rows", broken)
        if dist.get_rank() == 1
        else mock.patch("time.time")
    ):
        try:
            for step in range(NUM_STEPS):
                if step == 3:
                    time.sleep(0.3)
                run.step(step)
        except Exception as error:
            guard.detach(run.rounds)
            return type(error).__name__, str(error), run.rounds.course.num_steps, time.monotonic() - started
    raise AssertionError("nothing was raised")


def test_an_error_of_one_rank_surfaces_there_and_nobody_hangs(world4: WorkerPool) -> None:
    results = world4.run(failing_exchange, limit_seconds=120)
    assert results[1][:2] == ("MemoryError", "no memory for the buckets")
    assert results[1][2] == 3  # at the first step after it, not where the outcome is due
    # Those who wait for it end with an error of their own when the time is over.
    assert all(seconds < 60 for *_, seconds in results)


def slow_group(overlap_steps: int) -> list[float]:
    run = OverlapRun(make_mesh(), sync_every=4, overlap_steps=overlap_steps)
    ends = []
    for step in range(8):
        if step == 3 and run.mesh.group_index == 1:
            time.sleep(4.0)
        run.step(step)
        ends.append(time.monotonic())
    run.release()
    return ends


def test_a_slow_group_is_waited_for_where_its_outcome_is_due(world4: WorkerPool) -> None:
    results = world4.run(slow_group, 3, limit_seconds=120)
    for fast, slow in zip(results[:2], results[2:], strict=True):
        # Group 0 ends its round, and two more steps, while group 1 is still ahead of the end of its own.
        assert fast[5] < slow[3] - 1.0
        assert fast[6] > slow[3]


def buffers() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Normed().double()
    run = OverlapRun(make_mesh(), model=model, sync_every=3, overlap_steps=2)
    found = []
    for step in range(6):
        run.train(step)
        before = {name: buffer.clone() for name, buffer in persistent_buffers(run.model).items()}
        run.rounds.step()
        found.append((before, {name: buffer.clone() for name, buffer in persistent_buffers(run.model).items()}))
    state = run.release()
    return found, state


def test_buffers(world4: WorkerPool) -> None:
    ranks = world4.run(buffers)
    for steps, state in ranks:
        for name in ("norm.running_mean", "norm.running_var"):
            # At step 5 comes the average of what all ranks held at step 3.
            mean = sum(other[2][0][name] for other, _ in ranks) / 4
            torch.testing.assert_close(steps[4][1][name], mean, rtol=1e-12, atol=0)
            assert not torch.equal(steps[3][1][name], mean)
            assert torch.equal(state[name], ranks[0][1][name])
        assert steps[4][1]["norm.num_batches_tracked"] == 5
        assert state["norm.num_batches_tracked"] == 6


def local_and_pulled() -> Any:
    run = OverlapRun(
        make_mesh(), sync_every=3, overlap_steps=1, local_parameters="head.*", proximal_mu=0.1, inner_moments="reset"
    )
    anchors, moments = [], []
    for step in range(8):
        run.step(step)
        anchors.append({name: anchor.clone() for name, anchor in run.rounds.averager.outer.anchors.items()})
        moments.append(len(run.optimizer.state))
    run.rounds.finish()
    guard.detach(run.rounds)
    shards = run.rounds.averager.trained.averaged_shards()
    held = {name: shard.clone() for name, shard in shards.items()}
    return (
        anchors,
        moments,
        held,
        {n: a.clone() for n, a in run.rounds.averager.outer.anchors.items()},
        full_state(run.model),
    )


def test_local_layers_anchors_and_moments(world4: WorkerPool) -> None:
    ranks = world4.run(local_and_pulled)
    for anchors, moments, held, last, state in ranks:
        # The anchor is the model of the last outcome: it stays while the next one is in flight.
        for name in anchors[0]:
            assert torch.equal(anchors[2][name], anchors[0][name])
            assert not torch.equal(anchors[3][name], anchors[2][name])
            assert torch.equal(held[name], last[name])
        assert moments[2] > moments[3], "moments are reset when the outcome is taken in"
        for name, tensor in state.items():
            same = torch.equal(tensor, ranks[0][4][name]) and torch.equal(tensor, ranks[3][4][name])
            assert same == (not name.startswith("head")), name


def phases() -> Any:
    run = OverlapRun(make_mesh(), sync_every=3, overlap_steps=1, sync_steps_at_start=2, sync_steps_at_end=2)
    borders = []
    for step in range(NUM_STEPS):
        run.step(step)
        if run.rounds.at_border:
            borders.append(step + 1)
    return borders, run.release()


def test_synchronous_steps_begin_and_end_at_full_borders(world4: WorkerPool) -> None:
    from tests.harness.data import batches_by_step
    from tests.harness.outer_runs import adamw, num_samples, sum_over
    from tests.harness.reference import train_reference

    ranks = world4.run(phases)
    torch.set_num_threads(1)
    batches = batches_by_step([draws(rank, 4) for rank in range(4)], 2)
    delayed = Delayed(3, 1, borders=(2, 9, 11))
    result = train_reference(
        block_net,
        batches,
        (2, 9, 11),
        adamw,
        loss=sum_over,
        count=num_samples,
        synchronous=lambda step: step < 2 or step >= 9,
        after_step=delayed,
    )
    assert delayed.landed == [6, 9]
    for borders, state in ranks:
        assert borders == [2, 9]  # and the end
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, result.state[name], rtol=0, atol=1e-12)


def follow_drift() -> Any:
    run = OverlapRun(make_mesh(), sync_every="drift", max_drift=1e-4, min_sync_every=2, overlap_steps=1)
    found = []
    for step in range(NUM_STEPS):
        metrics = run.step(step)
        found += [(metrics.steps, metrics.period)] if metrics else []
    return found, run.rounds.course.period, run.release()


def test_periods_that_follow_the_drift(world4: WorkerPool) -> None:
    ranks = world4.run(follow_drift)
    for found, period, state in ranks:
        assert (found, period) == ranks[0][:2]
        assert found[0] == (8, 8)
        assert period == 4, "the drift is far above the bound, and the period is halved where it is known"
        assert all(torch.equal(tensor, ranks[0][2][name]) for name, tensor in state.items())

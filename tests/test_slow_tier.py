"""The thread of the slow tier: order, errors and ends of its jobs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_fedshard import shutdown, slow_tier
from hf_fedshard.mesh import add_slow_tier
from hf_fedshard.slow_tier import SlowTierWorker, finish_workers, tier_backend
from tests.harness.collectives import CollectiveRecorder
from tests.harness.overlap_runs import OverlapRun, make_mesh
from tests.harness.pool import WorkerPool


def test_jobs_run_in_order_in_another_thread_without_gradients() -> None:
    worker, done = SlowTierWorker(torch.device("cpu")), []

    def job(number: int) -> tuple[int, bool]:
        time.sleep(0.02 if number == 0 else 0)
        done.append(number)
        return threading.get_ident(), torch.is_grad_enabled()

    futures = [worker.submit(lambda number=number: job(number)) for number in range(4)]  # type: ignore[misc]
    results = [future.result(timeout=5) for future in futures]
    assert done == [0, 1, 2, 3]
    assert len(set(results)) == 1
    assert results[0][0] != threading.get_ident()
    assert results[0][1] is False
    worker.finish()


def test_an_error_is_that_of_the_job_and_the_next_one_runs() -> None:
    worker = SlowTierWorker(torch.device("cpu"))
    failed, good = worker.submit(lambda: 1 / 0), worker.submit(lambda: 2)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        failed.result(timeout=5)
    assert good.result(timeout=5) == 2
    worker.finish()


def test_finishing_waits_for_jobs_and_a_later_one_starts_another_thread() -> None:
    worker, done = SlowTierWorker(torch.device("cpu")), []
    worker.submit(lambda: (time.sleep(0.05), done.append(1)))
    finish_workers()
    assert done == [1]
    assert not any(thread.name == "hf_fedshard slow tier" for thread in threading.enumerate())
    assert worker.submit(lambda: 3).result(timeout=5) == 3
    worker.finish()


def test_nothing_of_a_job_is_held_after_it() -> None:
    """Of the last one too, for as long as the thread waits for another."""
    worker = SlowTierWorker(torch.device("cpu"))

    def job(held: torch.Tensor) -> torch.Tensor:
        return held + 1

    held = torch.ones(3)
    future = worker.submit(lambda held=held: job(held))  # type: ignore[misc]
    brought, result = weakref.ref(held), weakref.ref(future.result(timeout=5))
    del held, future
    deadline = time.monotonic() + 5
    while (brought() is not None or result() is not None) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert brought() is None and result() is None
    worker.finish()


def test_waiting_for_jobs_leaves_the_thread_running() -> None:
    worker, done = SlowTierWorker(torch.device("cpu")), []
    worker.wait()
    worker.submit(lambda: (time.sleep(0.05), done.append(1)))
    worker.submit(lambda: 1 / 0)
    worker.wait()
    assert done == [1]
    assert worker.submit(lambda: threading.current_thread()).result() in threading.enumerate()
    worker.finish()


def test_a_process_that_fails_waits_for_nobody() -> None:
    worker, release = SlowTierWorker(torch.device("cpu")), threading.Event()
    worker.submit(lambda: release.wait(20))
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError
        finally:
            shutdown()
    assert time.monotonic() - started < 5
    release.set()
    shutdown()  # in order, it waits
    assert not any(thread.name == "hf_fedshard slow tier" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("device", "setting", "backend"),
    [
        ("cuda", None, "nccl"),
        ("cuda", "nccl", "nccl"),
        ("cuda", "gloo", "gloo"),
        ("cpu", None, None),
        ("cpu", "gloo", "gloo"),
    ],
)
def test_backends(device: str, setting: str | None, backend: str | None) -> None:
    assert tier_backend(device, setting) == backend


def after_groups_of_some() -> float:
    """Body: a script has made groups of some ranks before, as every rank must, and is in one of them or not."""
    for ranks in ([0, 1], [1], [0, 1, 2]):
        dist.new_group(ranks)
    tier = make_mesh().find_slow_tier(None)
    assert tier is not None
    counted = torch.ones(1)
    dist.all_reduce(counted, group=tier.fed)
    return counted.item()


def test_groups_of_a_script_are_not_in_the_way(world4: WorkerPool) -> None:
    assert world4.run(after_groups_of_some, limit_seconds=20) == [2.0] * 4


def collectives_of_construction() -> tuple[dict[str, list[str]], set[int]]:
    """Body: what the construction of a slow tier issues, by ranks, and in which threads."""
    mesh, threads = make_mesh(False), set()

    def meet(tier: slow_tier.SlowTier) -> None:
        threads.add(threading.get_ident() == threading.main_thread().ident)
        original(tier)

    original = slow_tier.SlowTier._meet
    with mock.patch.object(slow_tier.SlowTier, "_meet", meet), CollectiveRecorder() as recorder:
        tier = add_slow_tier(mesh).find_slow_tier(None)
    assert tier is not None
    found: dict[str, list[str]] = {}
    for collective in recorder.collectives:
        found.setdefault(str(collective.ranks), []).append(collective.name)
    expected = {str(tuple(dist.get_process_group_ranks(group))) for group in tier.process_groups()}
    assert set(found) == expected
    return found, threads


@pytest.mark.parametrize("size", [4, 8])
def test_every_communicator_is_used_at_construction(size: int, request: pytest.FixtureRequest) -> None:
    """By the thread that constructs: NCCL makes and connects a communicator in its first collectives."""
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    for found, threads in pool.run(collectives_of_construction):
        assert threads == {True}
        assert len(found) == size // 4 + 1
        for names in found.values():
            assert len(set(names)) == len(names) == 4, names


def tiers_of_settings() -> list[str]:
    """Body: on which communicators federations average that share a mesh."""
    mesh = make_mesh(False)
    first = add_slow_tier(mesh, "gloo")
    both = add_slow_tier(first)
    assert add_slow_tier(both, "gloo") is both
    settings = ({"slow_backend": "gloo"}, {}, {"overlap_steps": 1}, {"overlap_steps": 1, "slow_backend": "gloo"}, {})
    found = []
    for each in settings:
        run = OverlapRun(both, sync_every=2, **each)
        names = {id(mesh.fed): "mesh", id(first.slow_tiers[0].fed): "gloo", id(both.slow_tiers[1].fed): "own"}
        found.append(names[id(run.rounds.peers.fed)])
        run.release()
    return found


def test_a_federation_averages_on_what_its_settings_ask_for(world4: WorkerPool) -> None:
    """Whatever others have added to the mesh, and before or after."""
    for found in world4.run(tiers_of_settings):
        assert found == ["gloo", "mesh", "own", "gloo", "mesh"]


def communicators() -> list[tuple[list[int], list[int], bool, bool]]:
    mesh = make_mesh()
    tier = mesh.find_slow_tier(None)
    assert tier is not None
    pairs = [(mesh.group, tier.group), (mesh.fed, tier.fed)]
    if mesh.replicate is not None:
        assert tier.replicate is not None
        pairs.append((mesh.replicate, tier.replicate))
    mesh.set_timeout(11.0)
    return [
        (
            dist.get_process_group_ranks(own),
            dist.get_process_group_ranks(twin),
            own is twin,
            tier.group_index == mesh.group_index and tier.fed.rank() == mesh.fed.rank(),
        )
        for own, twin in pairs
    ]


@pytest.mark.parametrize("size", [4, 8])
def test_communicators_are_its_own(size: int, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    for pairs in pool.run(communicators):
        assert len(pairs) == size // 4 + 1
        for own, twin, is_same, in_order in pairs:
            assert own == twin
            assert not is_same
            assert in_order

"""The thread of the slow tier: order, errors and ends of its jobs."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from hf_fedshard.slow_tier import SlowTierWorker, finish_workers
from tests.harness.overlap_runs import make_mesh
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


def communicators() -> list[tuple[list[int], list[int], bool, bool]]:
    mesh = make_mesh()
    tier = mesh.slow_tier
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

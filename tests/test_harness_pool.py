"""Worker pools: what they promise to every other test."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import pool
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.reports import WorldError, WorldTimeoutError


def _rank_times(factor: int) -> int:
    return dist.get_rank() * factor


def _raise_on(ranks: list[int]) -> None:
    secret = 40 + dist.get_rank()
    if dist.get_rank() in ranks:
        raise ValueError(f"rank {dist.get_rank()} says no to {secret}")
    if len(ranks) == 1:
        dist.barrier()


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def _skip() -> None:
    pytest.skip("not here")


def _unpicklable() -> Any:
    return lambda: None


def _soil() -> None:
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    torch.set_default_dtype(torch.float64)
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    from accelerate import Accelerator

    Accelerator(cpu=True, gradient_accumulation_steps=7)


def _look() -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    return {
        "variable": os.environ.get("ACCELERATE_USE_FSDP"),
        "dtype": str(torch.get_default_dtype()),
        "groups": len(dist.distributed_c10d._world.pg_names),
        "states": [len(s._shared_state) for s in (AcceleratorState, GradientState, PartialState)],
        "random": torch.rand(1).item(),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }


def _accelerate_joins() -> tuple[bool, int, str]:
    from accelerate import PartialState

    before = dist.is_initialized()
    state = PartialState(cpu=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    return before, int(total), state.distributed_type.value


def _backend_and_sum(device: str) -> float:
    where = torch.device(device, dist.get_rank() % max(1, torch.cuda.device_count())) if device == "cuda" else "cpu"
    value = torch.ones(3, device=where)
    dist.all_reduce(value)
    return value.sum().item()


def test_values_by_rank(world4: WorkerPool) -> None:
    assert world4.run(_rank_times, 3) == [0, 3, 6, 9]
    assert world4.run(_rank_times, factor=2) == [0, 2, 4, 6]


def test_world_of_eight(world8: WorkerPool) -> None:
    assert world8.run(_rank_times, 1) == list(range(8))


def test_device(world4: WorkerPool, device: str) -> None:
    assert world4.run(_backend_and_sum, device) == [12.0] * 4


def test_error_names_ranks_and_shows_locals(world4: WorkerPool) -> None:
    starts = world4.num_starts
    with pytest.raises(WorldError, match=r"(?s)failed on rank .*rank 2 says no to 42.*secret = 42") as caught:
        world4.run(_raise_on, [0, 1, 2, 3])
    assert {error.rank for error in caught.value.errors} == {0, 1, 2, 3}
    assert world4.run(_rank_times, 1) == [0, 1, 2, 3]
    assert world4.num_starts == starts, "a body that every rank has left does not cost a new world"


def test_run_failing(world4: WorkerPool) -> None:
    errors = world4.run_failing(_raise_on, [0, 1, 2, 3])
    assert [(error.rank, error.type_name) for error in errors] == [(rank, "ValueError") for rank in range(4)]
    assert errors[3].message == "rank 3 says no to 43"
    assert errors[0].is_a(Exception)
    assert not errors[0].is_a(KeyError)
    with pytest.raises(WorldError, match=r"did not on \[1, 2\]"):
        world4.run_failing(_raise_on, [0, 3])


def test_skip_inside_a_body(world4: WorkerPool) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        world4.run(_skip)


def test_unpicklable_value(world4: WorkerPool) -> None:
    with pytest.raises(WorldError, match="cannot be pickled"):
        world4.run(_unpicklable)


def test_hang_after_an_error(world4: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.5)
    starts = world4.num_starts
    with pytest.raises(WorldTimeoutError, match=r"(?s)rank 1 raised.*rank 1 says no.*rank 0 is here.*in barrier"):
        world4.run(_raise_on, [1])
    assert world4.run(_rank_times, 1) == [0, 1, 2, 3]
    assert world4.num_starts == starts + 1


def test_limit(world4: WorkerPool) -> None:
    with pytest.raises(WorldTimeoutError, match=r"(?s)no end after 0.5 s.*rank 3 is here.*in _sleep"):
        world4.run(_sleep, 30, limit_seconds=0.5)
    assert world4.run(_rank_times, 1) == [0, 1, 2, 3]


def test_death(world4: WorkerPool) -> None:
    with pytest.raises(WorldTimeoutError, match="rank 2 died with exit code 3"):
        world4.run(_die_on, 2)
    assert world4.run(_rank_times, 1) == [0, 1, 2, 3]


def test_clean_slate(world4: WorkerPool) -> None:
    before = world4.run(_look)
    world4.run(_soil)
    after = world4.run(_look)
    assert after == before
    assert after[0]["groups"] == 1
    assert after[0]["threads"] == 1
    assert after[0]["random"] == after[1]["random"]


def test_environment_of_a_body(world4: WorkerPool) -> None:
    env = fsdp_launch_env(2, 2)
    assert world4.run(_look, env=env)[0]["variable"] == "true"
    assert world4.run(_look)[0]["variable"] is None


def test_fresh_processes(world4: WorkerPool) -> None:
    pids = {look["pid"] for look in world4.run(_look)}
    fresh = {look["pid"] for look in world4.run(_look, fresh=True)}
    later = {look["pid"] for look in world4.run(_look)}
    assert not pids & fresh
    assert not fresh & later


@pytest.mark.parametrize("init_group", [True, False])
def test_accelerate_uses_the_group(world4: WorkerPool, init_group: bool) -> None:
    assert world4.run(_accelerate_joins, init_group=init_group) == [(init_group, 4, "MULTI_CPU")] * 4

"""How the groups agree through the store: all at the border or each alone, and never one without the others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_fedshard.preemption import Preemption
from tests.harness.pool import WorkerPool


def make(received: Callable[[], float | None], grace: float = 60.0, timeout: float = 20.0) -> Preemption:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[dist.get_rank() // 2]
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    return Preemption(store, own, 2, torch.device("cpu"), received, grace, timeout)


def rounds(protocol: Preemption, num_rounds: int, length: int, step: Callable[[int, int], Any]) -> Any:
    """Steps and borders; returns where this rank has left, or `None`."""
    for number in range(num_rounds):
        for done in range(1, length + 1):
            step(number, done)
            if done < length and protocol.after_step(number, length - done, 0.01 * (length - done)):
                return number, done
        total = torch.ones(())
        dist.all_reduce(total)  # the averaging: a rank that is missing would be waited for
        assert total == 4
    return None


def undisturbed() -> tuple[Any, list[bool]]:
    protocol = make(lambda: None)
    end = rounds(protocol, 4, 3, lambda number, done: time.sleep(0.02 * (dist.get_rank() // 2)))
    dist.barrier()
    return end, [protocol.store.check([f"decision/{number}"]) for number in range(4)]


def test_undisturbed(world4: WorkerPool) -> None:
    # Keys of rounds behind all groups are gone.
    assert world4.run(undisturbed) == [(None, [False, False, False, True])] * 4


def told(rank: int, grace: float, slow: float) -> Any:
    since: list[float] = []
    protocol = make(lambda: since[0] if since else None, grace)

    def step(number: int, done: int) -> None:
        if (number, done) == (1, 2) and dist.get_rank() == rank:
            since.append(time.time())
        if (number, done) == (1, 3) and dist.get_rank() >= 2:
            time.sleep(slow)

    end = rounds(protocol, 3, 5, step)
    return end, protocol.requested()


@pytest.mark.parametrize("rank", [0, 3])
def test_there_is_time(world4: WorkerPool, rank: int) -> None:
    results = world4.run(told, rank, 60.0, 0.3)
    assert [end for end, _ in results] == [None] * 4
    assert {results[0][1], results[2][1]} == {True}, "the first rank of each group knows"


def test_a_group_is_too_slow(world4: WorkerPool) -> None:
    results = world4.run(told, 0, 2.0, 1.5)
    # Group 0 waits before its last step until the time is over; group 1 finds that out after its long one.
    assert [end for end, _ in results] == [(1, 4), (1, 4), (1, 3), (1, 3)]


def at_random(seed: int) -> Any:
    chance = random.Random(100 * seed + dist.get_rank() // 2)
    when, rank, grace = random.Random(seed).random() * 0.4, seed % 4, 0.1 + 0.1 * (seed % 5)
    started, clock = time.monotonic(), time.time()
    mine = dist.get_rank() == rank
    protocol = make(lambda: clock + when if mine and time.monotonic() > started + when else None, grace)
    return rounds(protocol, 12, 3, lambda number, done: time.sleep(chance.random() * 0.05))


@pytest.mark.parametrize("seed", range(8))
def test_nobody_is_left_waiting(world4: WorkerPool, seed: int) -> None:
    """Whenever the request comes, all groups leave in one round or none does: no averaging lacks a rank."""
    ends = world4.run(at_random, seed, limit_seconds=30)
    assert ends[0] == ends[1] and ends[2] == ends[3], "the ranks of a group leave at one step"
    assert (ends[0] is None) == (ends[2] is None)
    if ends[0] is not None:
        assert ends[0][0] == ends[2][0], "the groups leave in one round"


def waits_in_vain() -> None:
    protocol = make(lambda: None, timeout=0.5)
    if dist.get_rank() < 2:
        protocol.wait_for_border(0, 0.0)
    raise RuntimeError("group 1 was never there")


def test_a_group_that_never_comes(world4: WorkerPool) -> None:
    errors = world4.run_failing(waits_in_vain)
    assert "did not come to the end of round 1 in 0.5 seconds" in errors[0].message


def saves_late(seconds: float) -> float:
    since = time.time()
    protocol = make(lambda: since, grace=0.1)
    assert protocol.requested_in_group()
    time.sleep(0.3 + (seconds if dist.get_rank() == 3 else 0))
    protocol.leave(4)
    return time.time() - since


def test_nobody_leaves_ahead_of_a_rank_that_still_saves(world4: WorkerPool) -> None:
    """The time is over, but the kill has not come."""
    assert min(world4.run(saves_late, 1.5)) > 1.7

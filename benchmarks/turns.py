"""
One turn of one variant: a few measured rounds between two moments at which the link is silent.

Variants take turns in one world of processes, so that what the machine does meanwhile meets all of them alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from .contenders import Contender
from .variants import Variant
from .world import World


@dataclass(frozen=True)
class TurnPlan:
    """
    What a turn consists of.

    Args:
        num_rounds (`int`):
            Measured rounds.
        num_steps (`int`):
            Steps in a round: H, or fewer where every step is alike.
        num_lead_in (`int`, defaults to `0`):
            Rounds before them that are not timed: one for overlapped variants, whose averaging reaches into the next round.
    """

    num_rounds: int
    num_steps: int
    num_lead_in: int = 0


@dataclass(frozen=True)
class Turn:
    """
    What a turn found, as it is kept on disk.

    Args:
        shape (`str`):
            Shape of the world.
        rate (`int`):
            Mbit/s; 0 in plain mode.
        variant (`str`):
            Name.
        session (`str`):
            The run of the benchmark: ratios are formed inside one.
        cycle (`int`):
            Number of the turn of this variant in this block.
        num_steps (`int`):
            Steps in a round.
        tokens_per_second (`list[float]`):
            Of all ranks together, in each round.
        border_seconds (`list[float]`):
            Of the averaging at the end of each round, on the rank that waited least.
        standstill_seconds (`list[float]`):
            How long the steps stood still for averaging in each round, all calls together, on that rank.
        link_bytes (`int`):
            Bytes over the link in its busier direction, with all headers, in all rounds of the turn.
        num_link_rounds (`int`):
            Those rounds, the lead-in among them.
        load (`float`):
            The machine's load average over a minute, when the turn began.
        when (`float`):
            Seconds since the epoch.
    """

    shape: str
    rate: int
    variant: str
    session: str
    cycle: int
    num_steps: int
    tokens_per_second: list[float]
    border_seconds: list[float]
    standstill_seconds: list[float]
    link_bytes: int
    num_link_rounds: int
    load: float
    when: float

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return asdict(self)


def run_turn(world: World, contender: Contender, plan: TurnPlan) -> dict[str, Any]:
    """
    Runs a turn. Collective over the world: all ranks take the same turns in the same order.

    Args:
        world ([`World`]):
            Where.
        contender ([`Contender`]):
            Who trains.
        plan ([`TurnPlan`]):
            How long.

    Returns:
        `dict[str, Any]`: On rank 0 the measured fields of [`Turn`].
    """
    load, when = os.getloadavg()[0], time.time()
    world.settle()
    before = world.counters()
    dist.barrier()
    for _ in range(plan.num_lead_in * plan.num_steps):
        contender.step()
    # One clock for all processes of a machine.
    marks, calls = [time.perf_counter()], []
    for _ in range(plan.num_rounds):
        calls.append([contender.step() for _ in range(plan.num_steps)])
        marks.append(time.perf_counter())
    if contender.never_meets:
        _keep_busy(world, contender)
    world.settle()
    crossed = [after - start for after, start in zip(world.counters(), before, strict=True)]
    everybody: list[Any] = [None] * world.size
    dist.all_gather_object(everybody, (marks, calls))
    tokens = plan.num_steps * world.workload.step_tokens
    return {
        "num_steps": plan.num_steps,
        "tokens_per_second": rates_of_rounds(
            [marks for marks, _ in everybody], tokens, world.node_size if contender.never_meets else world.size
        ),
        **times_of_calls([calls for _, calls in everybody]),
        "link_bytes": max(crossed),
        "num_link_rounds": plan.num_rounds + plan.num_lead_in,
        "load": load,
        "when": when,
    }


def rates_of_rounds(marks: Sequence[Sequence[float]], tokens: int, group_size: int) -> list[float]:
    """
    Tokens a second of all ranks together, round by round. A group's round ends when its last rank has ended it.

    Args:
        marks (`Sequence[Sequence[float]]`):
            For each rank the times at which its rounds began and ended.
        tokens (`int`):
            Tokens of one rank in one round.
        group_size (`int`):
            Consecutive ranks that meet in every round; groups that never meet have rounds of their own.

    Returns:
        `list[float]`: For each round.
    """
    rates = [0.0] * (len(marks[0]) - 1)
    for first in range(0, len(marks), group_size):
        ends = [max(column) for column in zip(*marks[first : first + group_size], strict=True)]
        for index in range(len(rates)):
            rates[index] += group_size * tokens / (ends[index + 1] - ends[index])
    return rates


def times_of_calls(calls: Sequence[Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """
    Args:
        calls (`Sequence[Sequence[Sequence[float]]]`):
            For each rank and round the seconds of the call that may average after each step.

    Returns:
        `dict[str, list[float]]`: Two fields of [`Turn`]: of each round the last call, and all of them together, on the rank that
        waited least.
    """
    rounds = list(zip(*calls, strict=True))
    return {
        "border_seconds": [min(seconds[-1] for seconds in ranks) for ranks in rounds],
        "standstill_seconds": [min(sum(seconds) for seconds in ranks) for ranks in rounds],
    }


def _keep_busy(world: World, contender: Contender) -> None:
    """
    Groups that never meet do not end together, and the last one would have the machine for itself: whoever is done trains
    on, unmeasured, until all are. Told through the rendezvous store, and decided by the first rank of each group, so that
    the group stays together.
    """
    store = dist.distributed_c10d._get_default_store()
    world.num_meetings += 1
    key = f"turn_{world.num_meetings}"
    leads = world.local_rank == 0
    if leads:
        store.add(key, 1)
    while True:
        done = torch.tensor([leads and store.add(key, 0) == world.layout.num_groups], dtype=torch.int32)
        dist.all_reduce(done, group=world.federation.group)
        if done.item():
            return
        contender.step()


def plan_turn(
    variant: Variant, world: World, rounds_per_turn: int, turn_seconds: float, rate: float | None
) -> TurnPlan:
    """
    Args:
        variant ([`Variant`]):
            Who trains.
        world ([`World`]):
            Where.
        rounds_per_turn (`int`):
            Measured rounds.
        turn_seconds (`float`):
            How long a turn of a synchronous variant should take. Its steps are all alike, so none need be made for their
            number.
        rate (`float`, *optional*):
            Its tokens a second, where they were measured before; equal on all ranks.

    Returns:
        [`TurnPlan`]: The turn.
    """
    every = world.workload.sync_every
    if not variant.is_synchronous:
        return TurnPlan(rounds_per_turn, every, num_lead_in=int(variant.overlapped))
    if rate is None:
        return TurnPlan(rounds_per_turn, 1)
    step_seconds = world.size * world.workload.step_tokens / rate
    steps = round(turn_seconds / rounds_per_turn / step_seconds)
    return TurnPlan(rounds_per_turn, min(max(steps, 1), every))

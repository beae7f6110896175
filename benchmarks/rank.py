"""
What every rank runs, started by [`benchmarks.launcher`] with torchrun:

    torchrun ... -m benchmarks.rank JOB_FILE
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .contenders import Contender, make_contender
from .learning import learn
from .memory import measure_memory, resident_bytes
from .network import Link
from .records import Records, rounds_done
from .statistics import select
from .turns import Turn, plan_turn, run_turn
from .variants import CEILING, VARIANTS
from .workload import Workload, load_blocks
from .world import World


@dataclass(frozen=True)
class Job:
    """
    What one world of processes measures.

    Args:
        task (`str`):
            `"turns"`, `"learning"` or `"memory"`.
        shape (`str`):
            Shape of the world.
        folder (`str`):
            Output folder.
        session (`str`):
            The run of the benchmark.
        workload (`dict[str, Any]`):
            Fields of [`Workload`].
        blocks (`dict[str, list[str]]`):
            For each rate, as a text, the names of the variants.
        num_rounds (`int`):
            Least number of rounds of each variant.
        rounds_per_turn (`int`):
            Of them in a turn.
        turn_seconds (`float`):
            How long a turn of a synchronous variant should take.
        learning_runs (`list[tuple[int, str, int]]`):
            Runs of the learning part: seed, variant, steps.
        eval_every (`int`):
            Steps between two evaluations there.
        link (`dict[str, Any]`, *optional*):
            Fields of [`Link`]; `None` in plain mode.
        addresses (`list[str]`):
            Of the nodes.
    """

    task: str
    shape: str
    folder: str
    session: str
    workload: dict[str, Any]
    blocks: dict[str, list[str]]
    num_rounds: int
    rounds_per_turn: int
    turn_seconds: float
    link: dict[str, Any] | None
    addresses: list[str]
    learning_runs: list[tuple[int, str, int]] = field(default_factory=list)
    eval_every: int = 16


def say(text: str) -> None:
    """
    Progress, from one rank.

    Args:
        text (`str`):
            A line.
    """
    if dist.get_rank() == 0:
        print(text, flush=True)


class Measurement:
    """
    Runs the blocks of a job: in each the variants take turns, the ceiling before and after all others.

    Args:
        job ([`Job`]):
            What to measure.
        world ([`World`]):
            Where.
    """

    def __init__(self, job: Job, world: World) -> None:
        self.job = job
        self.world = world
        self.records = Records(Path(job.folder))
        self.contenders: dict[str, Contender] = {}
        self.failed: set[str] = set()
        self.rates: dict[tuple[int, str], float] = {}

    def run(self) -> None:
        """All blocks, in the order of the job."""
        for rate, names in self.job.blocks.items():
            self.run_block(int(rate), names)
        for contender in self.contenders.values():
            contender.close()

    def run_block(self, rate: int, names: list[str]) -> None:
        """
        All turns at one rate.

        Args:
            rate (`int`):
                Mbit/s; 0 in plain mode.
            names (`list[str]`):
                Variants.
        """
        missing = self._missing(rate, names)
        if not any(missing.values()):
            say(f"[{self.job.shape}, {rate} Mbit/s] measured already")
            return
        for name in [CEILING, *(name for name in names if missing.get(name))]:
            self._build(name)
        missing = {name: turns for name, turns in missing.items() if name in self.contenders}
        if not any(missing.values()):
            return
        self.world.set_rate(rate or None)
        for cycle in range(max(missing.values())):
            for name in [CEILING, *(name for name, turns in missing.items() if turns > cycle)]:
                self._take_turn(rate, name, cycle)
        self._take_turn(rate, CEILING, max(missing.values()))
        self.world.set_rate(None)

    def _missing(self, rate: int, names: list[str]) -> dict[str, int]:
        """Turns that each variant still needs, by the files as rank 0 sees them, so that all ranks agree."""
        told: list[Any] = [None]
        if self.world.rank == 0:
            turns = self.records.read("turns")
            per_turn = self.job.rounds_per_turn
            done = {name: rounds_done(select(turns, self.job.shape, rate, name)) for name in names if name != CEILING}
            told[0] = {name: max(-(-(self.job.num_rounds - count) // per_turn), 0) for name, count in done.items()}
        dist.broadcast_object_list(told, src=0)
        return dict(told[0])

    def _build(self, name: str) -> None:
        """
        Makes a variant and warms it up on the unlimited link. One that fails does so on all ranks, is reported, and left
        out.
        """
        if name in self.contenders or name in self.failed:
            return
        variant, problem = VARIANTS[name], ""
        try:
            contender = make_contender(variant, self.world)
            for _ in range(2 if variant.is_synchronous else self.world.workload.sync_every):
                contender.step()
            self.contenders[name] = contender
        except Exception:
            problem = traceback.format_exc()
        problems: list[Any] = [None] * self.world.size
        dist.all_gather_object(problems, problem)
        if any(problems):
            self.contenders.pop(name, None)
            self.failed.add(name)
            if self.world.rank == 0:
                first = next(text for text in problems if text)
                self.records.append("failures", {"shape": self.job.shape, "variant": name, "problem": first})
                say(f"[{self.job.shape}] {name} failed and is left out: {first.strip().splitlines()[-1]}")

    def _take_turn(self, rate: int, name: str, cycle: int) -> None:
        variant = VARIANTS[name]
        plan = plan_turn(
            variant, self.world, self.job.rounds_per_turn, self.job.turn_seconds, self.rates.get((rate, name))
        )
        found = run_turn(self.world, self.contenders[name], plan)
        speed = sorted(found["tokens_per_second"])[len(found["tokens_per_second"]) // 2]
        self.rates[rate, name] = speed
        if self.world.rank == 0:
            turn = Turn(self.job.shape, rate, name, self.job.session, cycle, **found)
            self.records.append("turns", turn.as_dict())
            megabytes = turn.link_bytes / turn.num_link_rounds / 1e6
            say(
                f"[{self.job.shape}, {rate} Mbit/s, turn {cycle}] {name:18} {speed:7.0f} tokens/s, "
                f"{megabytes:6.2f} MB a round of {turn.num_steps}, load {turn.load:.1f}"
            )


def main() -> None:
    """Runs the job of the file on the command line."""
    baseline_bytes = resident_bytes()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    # A step of FSDP2 over the slowest link takes seconds; a rank that is gone should not be waited for half an hour.
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    workload = Workload(**job.workload)
    link = None if job.link is None else Link(tuple(job.link["names"]), tuple(job.link["interfaces"]))
    blocks = load_blocks(Path(job.folder) / "blocks.pt", workload)
    started = time.perf_counter()
    world = World(workload, blocks, link, tuple(job.addresses))
    say(f"[{job.shape}] {world.size} ranks, {world.layout}, {time.perf_counter() - started:.1f} s to set up")
    if job.task == "turns":
        Measurement(job, world).run()
    elif job.task == "learning":
        worlds = {seed: world.with_seed(seed) for seed, _, _ in job.learning_runs}
        for seed, name, num_steps in job.learning_runs:
            learn(worlds[seed], VARIANTS[name], num_steps, job.eval_every, Records(Path(job.folder)), job.session, say)
    else:
        (name,) = next(iter(job.blocks.values()))
        measure_memory(world, VARIANTS[name], baseline_bytes, Records(Path(job.folder)), job.session, say)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Servers of other packages may leave threads behind that never end.
    os._exit(0)

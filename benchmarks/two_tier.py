"""Measures on a two-tier network, part by part: `python -m benchmarks.two_tier --output_dir runs/benchmark`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .arguments import PARTS, parse_arguments
from .launcher import run_side_by_side, run_world
from .network import NUM_NODES, TwoTierNetwork
from .records import Records
from .variants import CEILING, LEARNING, RATES, SHAPES, VARIANTS, choose, unavailable
from .workload import ROOT, Workload


LAUNCH_FILE = ROOT / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml"


class Benchmark:
    """
    One run of the benchmark.

    Args:
        args (`argparse.Namespace`):
            From [`parse_arguments`].
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder: Path = args.output_dir.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.records = Records(self.folder)
        self.workload = Workload(**{item.name: getattr(args, item.name) for item in fields(Workload)})
        self.records.check_workload(self.workload)
        self.session = time.strftime("%Y-%m-%dT%H:%M:%S")

    def run(self) -> None:
        """Everything that was asked for, each part by itself."""
        self._note_session()
        prepare = [sys.executable, "-m", "benchmarks.prepare", str(self.folder)]
        run_side_by_side([(prepare, {})], self._log("prepare"))
        for part in PARTS[:-1]:
            if part in self.args.parts:
                started = time.perf_counter()
                getattr(self, f"_{part}")()
                print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
        if "report" in self.args.parts:
            from .report import write_report

            write_report(self.folder)

    def _note_session(self) -> None:
        import accelerate
        import torch
        import transformers

        about = {
            "session": self.session,
            "command": " ".join(["python -m benchmarks.two_tier", *sys.argv[1:]]),
            "plain": self.args.plain,
            "num_cores": os.cpu_count(),
            "machine": f"{platform.system()}, {platform.machine()}",
            "load": os.getloadavg(),
            "versions": {module.__name__: module.__version__ for module in (torch, accelerate, transformers)},
        }
        self.records.append("sessions", about)

    def _variants(self, shape: str, rate: int) -> list[str]:
        """Names that can be measured; the others are noted with the reason."""
        names = []
        # A plain run stands for no rate; it takes what the slowest one has.
        for variant in choose(self.args.variants, shape, rate or min(RATES)):
            reason = unavailable(variant, self.workload.sync_every)
            if reason is None:
                names.append(variant.name)
            else:
                print(f"{variant.name} is not available: {reason}", flush=True)
                self.records.append("unavailable", {"variant": variant.name, "reason": reason})
        return names

    def _job(
        self, task: str, shape: str, blocks: dict[str, list[str]], network: TwoTierNetwork | None
    ) -> dict[str, Any]:
        return {
            "task": task,
            "shape": shape,
            "folder": str(self.folder),
            "session": self.session,
            "workload": asdict(self.workload),
            "blocks": blocks,
            "num_rounds": self.args.rounds,
            "rounds_per_turn": self.args.rounds_per_turn,
            "turn_seconds": self.args.turn_seconds,
            "eval_every": self.args.eval_every,
            "link": None if network is None else dataclasses.asdict(network.link),
            "addresses": ["127.0.0.1"] * NUM_NODES if network is None else network.addresses,
        }

    def _run_world(self, job: dict[str, Any], network: TwoTierNetwork | None) -> None:
        file = self.folder / f"job_{job['task']}.json"
        file.write_text(json.dumps(job, indent=2))
        num_processes = NUM_NODES * SHAPES[job["shape"]]
        run_world(network, num_processes, ["benchmarks.rank", str(file)], self._log(job["task"]))

    def _turns(self) -> None:
        for shape in self.args.shapes:
            blocks = {str(rate): self._variants(shape, rate) for rate in self.args.rates}
            blocks = {rate: names for rate, names in blocks.items() if names != [CEILING]}
            if blocks:
                with ExitStack() as stack:
                    network = None if self.args.plain else stack.enter_context(TwoTierNetwork(rate="20gbit"))
                    self._run_world(self._job("turns", shape, blocks, network), network)

    def _learning(self) -> None:
        done = {(run["seed"], run["variant"], tuple(run["steps"])) for run in self.records.learning_runs()}
        chosen = [name for name in self._variants("2x2", 0) if name in LEARNING]
        seeds = range(self.workload.seed, self.workload.seed + self.args.learning_seeds)
        # Seed by seed: what a run that is broken off leaves can be compared.
        runs = [
            (seed, name, num_steps)
            for seed in seeds
            for name in chosen
            if (seed, name, self._evaluated_steps(num_steps := LEARNING[name] * self.args.learning_steps)) not in done
        ]
        if not runs:
            return
        job = self._job("learning", "2x2", {}, None)
        job["learning_runs"] = runs
        # No slow link: the loss after a step depends on none.
        self._run_world(job, None)

    def _evaluated_steps(self, num_steps: int) -> tuple[int, ...]:
        """The steps after which a run of the learning part is evaluated, as its record has them."""
        return tuple(range(0, num_steps + 1, self.args.eval_every))

    def _memory(self) -> None:
        done = {(record["shape"], record["variant"]) for record in self.records.read("memory")}
        for shape in self.args.shapes:
            for name in self._variants(shape, 0):
                if (shape, name) not in done:
                    self._run_world(self._job("memory", shape, {"0": [name]}, None), None)

    def _own_time(self) -> None:
        done = {record["way"] for record in self.records.read("own_time")}
        for way in ("Trainer", "loop"):
            if way in done:
                continue
            file = self.folder / "job_own_time.json"
            job = {"way": way, "folder": str(self.folder), "session": self.session, "workload": asdict(self.workload)}
            file.write_text(json.dumps(job))
            self._launch("own_time", file)

    def _saving(self) -> None:
        if self.records.read("saving"):
            return
        file = self.folder / "job_saving.json"
        job = {"folder": str(self.folder), "session": self.session, "workload": asdict(self.workload)}
        file.write_text(json.dumps(job))
        # Full state dicts, the file's, would be gathered and written by one rank.
        self._launch("saving", file, "--fsdp_state_dict_type", "SHARDED_STATE_DICT")

    def _launch(self, part: str, job: Path, *options: str) -> None:
        """Runs the module of a part on the processes of a launch file, as users start theirs."""
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH_FILE), *options]
        command = [*launch, "--main_process_port", "0", "-m", f"benchmarks.{part}", str(job)]
        run_side_by_side([(command, {})], self._log(part))

    def _log(self, part: str) -> Path:
        return self.folder / f"{part}.log"


def main() -> None:
    """Runs the benchmark."""
    words = sys.argv[1:]
    if "--list" in words:
        for variant in VARIANTS.values():
            print(f"{variant.name:18} {variant.label:32} {unavailable(variant) or 'available'}")
        return
    # Ranks and namespaces are taken down also where a time limit ends the run.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    Benchmark(parse_arguments(words)).run()


if __name__ == "__main__":
    main()

"""Runs a study of outer loops: many settings of a federation, its groups one after another in this process.

    python recipes/sweep_outer.py --args_file recipes/presets/sweep-outer.yaml

Appends a JSON line for each run, and leaves out those that are there already, so it can be interrupted and started again.
`sweep_report.py` makes the tables.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from clm_arguments import DataArguments, ModelArguments
from recipe_arguments import parse_groups
from sweep_data import StudyData, prepare
from sweep_results import Result, append_result, read_results
from sweep_settings import Setting, describe, read_study
from sweep_training import Run, mean_loss


USAGE = "python recipes/sweep_outer.py --args_file FILE [option ...]"


@dataclass
class SweepArguments:
    """
    What is run and where the results go.

    Args:
        study (`str`):
            YAML file with the settings.
        results (`str`):
            File of JSON lines that is added to.
        stages (`list[str]`, *optional*):
            Stages to run. Defaults to all, in the order of the file.
        max_runs (`int`, *optional*):
            Stop after so many runs.
        num_threads (`int`, *optional*, defaults to 1):
            Threads of PyTorch.
        compile (`bool`, *optional*, defaults to `False`):
            Compile the loss, which pays from the third run on.
        data_seed (`int`, *optional*, defaults to 42):
            Seed of a hold-out at random.
    """

    study: str = field(metadata={"help": "YAML file with the settings."})
    results: str = field(metadata={"help": "File of JSON lines that is added to."})
    stages: list[str] | None = field(default=None, metadata={"help": "Stages to run. Default: all."})
    max_runs: int | None = field(default=None, metadata={"help": "Stop after so many runs."})
    num_threads: int = field(default=1, metadata={"help": "Threads of PyTorch."})
    compile: bool = field(default=False, metadata={"help": "Compile the loss."})
    data_seed: int = field(default=42, metadata={"help": "Seed of a hold-out at random."})


class StudyArguments(NamedTuple):
    """The argument groups."""

    model: ModelArguments
    data: DataArguments
    sweep: SweepArguments


def parse_arguments(args: Sequence[str] | None = None) -> StudyArguments:
    """
    Parses the command line.

    Args:
        args (`Sequence[str]`, *optional*):
            Arguments in place of those of the process.
    """
    groups = (ModelArguments, DataArguments, SweepArguments)
    return StudyArguments(*parse_groups(groups, USAGE, "Runs a study of outer loops.", args))


def still_to_run(args: SweepArguments) -> list[tuple[str, Setting]]:
    """
    The runs of a study that have no result yet, each once, with the name of their stage.

    Args:
        args ([`SweepArguments`]):
            The study, and which of its stages.

    Raises:
        ValueError: If there is no such stage.
    """
    stages = read_study(Path(args.study))
    names = [stage.name for stage in stages]
    unknown = sorted(set(args.stages or ()) - set(names))
    if unknown:
        raise ValueError(f"{args.study} has the stages {', '.join(names)}, got {', '.join(unknown)}.")
    results = Path(args.results)
    done = set(read_results([results])) if results.exists() else set()
    todo: dict[str, tuple[str, Setting]] = {}
    for stage in stages:
        if args.stages is None or stage.name in args.stages:
            for setting in stage.settings:
                if setting.key not in done:
                    todo.setdefault(setting.key, (stage.name, setting))
    return list(todo.values())


def run_study(args: StudyArguments, data: StudyData | None = None) -> list[Result]:
    """
    Runs what is missing.

    Args:
        args ([`StudyArguments`]):
            The study.
        data ([`StudyData`], *optional*):
            The blocks, if they are prepared already.

    Returns:
        `list[Result]`: Those of this call.
    """
    results: list[Result] = []
    loss = mean_loss
    torch.set_num_threads(args.sweep.num_threads)
    # Looked up anew after each run: the study may be changed meanwhile.
    while (todo := still_to_run(args.sweep)) and len(results) != args.sweep.max_runs:
        if data is None:
            data = prepare(args.model, args.data, args.sweep.data_seed)
        if args.sweep.compile and loss is mean_loss:
            loss = torch.compile(mean_loss, dynamic=False)
        stage, setting = todo[0]
        head = f"[{len(todo)} to do] {stage}: {describe(setting)}"
        assert args.model.config_name is not None, "a study trains from scratch"
        result = Run(setting, data, args.model.config_name, loss).train(Progress(head, setting.max_steps))
        append_result(Path(args.sweep.results), result)
        results.append(result)
        print(f"{head}: loss {result.eval_loss}, share {result.share:.3f}, {result.seconds:.0f} s", flush=True)
    return results


class Progress:
    """
    A line that is written anew on a terminal, and nothing elsewhere.

    Args:
        head (`str`):
            What is running.
        max_steps (`int`):
            Its steps.
    """

    every_seconds = 10.0

    def __init__(self, head: str, max_steps: int) -> None:
        self.head = head
        self.max_steps = max_steps
        self._told = time.perf_counter()

    def __call__(self, step: int, loss: float) -> None:
        """Told the number of steps behind and the loss of the last one."""
        now = time.perf_counter()
        if now - self._told >= self.every_seconds and sys.stderr.isatty():
            self._told = now
            print(f"{self.head}: step {step} of {self.max_steps}, loss {loss:.3f}", end="\r", file=sys.stderr)


if __name__ == "__main__":
    run_study(parse_arguments())

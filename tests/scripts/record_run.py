"""
Runs another script and records the collectives of its `Trainer.train()`.

    record_run.py OUTPUT_FOLDER SCRIPT [ARGUMENTS]

Each rank writes `rank<r>.json` into the folder. The script runs as it does by itself, under its own name and arguments.
"""

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from tests.harness.timeline import Timeline


folder, script, *arguments = sys.argv[1:]
stock_train = Trainer.train


class EpochEnds(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


@functools.wraps(stock_train)
def recorded_train(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    timeline, epochs = Timeline(num_groups=2), EpochEnds()
    trainer.add_callback(epochs)
    with timeline.of(trainer):
        result = stock_train(trainer, *args, **kwargs)
    found = {
        "steps": trainer.state.global_step,
        "borders": timeline.borders,
        "epoch_ends": epochs.steps,
        "inside": len(timeline.inside_rounds()),
        "leaks": timeline.crossing_inside_rounds(),
        "crossing": sum(collective.crosses(timeline.group_of) for collective in timeline.collectives),
    }
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    return result


Trainer.train = recorded_train
sys.argv = [script, *arguments]
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")

"""Trains a tiny model, slowly, and writes down what became of it: `preempted_run.py FOLDER [resume] [workers]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_fedshard import shutdown
from tests.harness.checkpoint_runs import make_trainer, state_of


class Slow(TrainerCallback):
    """Takes its time at each step, and says who it is at the second one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            (self.folder / f"rank{dist.get_rank()}.pid").write_text(str(os.getpid()))
        time.sleep(0.3)


def main() -> None:
    folder = Path(sys.argv[1])
    trainer = make_trainer(
        str(folder),
        callbacks=(Slow(folder),),
        sync_every=4,
        enable_jit_checkpoint=True,
        dataloader_num_workers=1 if "workers" in sys.argv else 0,
    )
    trainer.train(resume_from_checkpoint="resume" in sys.argv)
    # Not reached by a run that was told to end.
    torch.save(state_of(trainer)["model"], folder / f"finished{dist.get_rank()}.pt")
    shutdown()


if __name__ == "__main__":
    main()

"""Runs that end otherwise: broken off from the keyboard, or with nowhere to write."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from tests.harness.launch import kill_tree, launch_command, start_tree
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes, tiny_trainer
from tests.test_trainer_lifecycle import is_one_model, num_rounds, run


class Interrupt(TrainerCallback):
    """Ctrl-C, which the launcher hands on to all ranks."""

    def __init__(self, event: str) -> None:
        self.event = event
        self.times = 1

    def _interrupt(self, event: str, state: Any) -> None:
        if event == self.event and state.global_step == 4 and self.times:
            self.times -= 1
            raise KeyboardInterrupt

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._interrupt("step", state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._interrupt("save", state)


def interrupted(folder: str, event: str) -> Any:
    forget_meshes()
    trainer = tiny_trainer(
        folder, sync_every=2, after=(lambda: Interrupt(event),), save_strategy="steps", save_steps=4
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    kind = type(trainer.accelerator.state.parallelism_config).__name__
    gathered = trainer.accelerator.gather(torch.tensor([dist.get_rank()])).tolist()
    trainer.train(resume_from_checkpoint=True)
    return kind, gathered, is_one_model(trainer), num_rounds(trainer), trainer.state.global_step


@pytest.mark.parametrize("event", ["step", "save"])
def test_keyboard_interrupt(world4: WorkerPool, tmp_path: Path, event: str) -> None:
    """The Trainer is as before, and goes on from the last checkpoint."""
    for found in run(world4, interrupted, str(tmp_path), event):
        assert found == ("ParallelismConfig", [0, 1, 2, 3], True, 3, 6)


SCRIPT = """
import pathlib, sys
from transformers import TrainerCallback
from hf_fedshard import shutdown
from tests.harness.tiny_trainer import tiny_trainer
class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            pathlib.Path(sys.argv[1], "training").touch()
tiny_trainer(sys.argv[1], max_steps=100000, after=(Tell,)).train()
shutdown()
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_launch(root: Path, tmp_path: Path) -> None:
    import psutil

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    config = root / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml"
    with tempfile.TemporaryFile() as log:
        process = start_tree(launch_command(config, script, str(tmp_path)), log.fileno())
        try:
            deadline = time.monotonic() + 150
            while not (tmp_path / "training").exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            family = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGINT)
            code = process.wait(60)
            _, alive = psutil.wait_procs(family, timeout=10)
        finally:
            kill_tree(process)
        log.seek(0)
        output = log.read().decode(errors="replace")
    assert (tmp_path / "training").exists(), output[-3000:]
    assert code != 0
    assert not alive


def nowhere_to_write(folder: str, saving: bool) -> Any:
    forget_meshes()
    trainer = tiny_trainer(folder, save_strategy="steps" if saving else "no", save_steps=4)
    trainer.train()
    return is_one_model(trainer), num_rounds(trainer)


def test_read_only_output_folder(world4: WorkerPool) -> None:
    """Found out before the first step, on every rank; a run that saves nothing needs no folder."""
    folder = "/sys/kernel"  # exists, and nobody can make anything in it, root included
    if not Path(folder).is_dir():
        pytest.skip("needs a folder in which root cannot write")
    env = fsdp_launch_env(2, 2)
    for error in world4.run_failing(nowhere_to_write, folder, True, env=env, limit_seconds=60):
        assert error.type_name == "CheckpointError"
        assert "Nothing can be written to output_dir='/sys/kernel'" in error.message
        assert "save_strategy='no'" in error.message
    for found in run(world4, nowhere_to_write, folder, False):
        assert found == (True, 2)

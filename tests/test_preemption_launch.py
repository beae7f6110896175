"""`accelerate launch` is told to end: the launcher, which hands the signal on, or one of the ranks."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from hf_fedshard.checkpoint_choice import list_checkpoints
from hf_fedshard.manifest import find_damage
from tests.harness.checkpoint_runs import differences, train
from tests.harness.launch import accelerate_launch, free_port, kill_tree, launch_command, start_tree
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "rank 0", "rank 3", "launcher, workers"])
def test_launch(world4: WorkerPool, root: Path, tmp_path: Path, whom: str) -> None:
    # The launcher's signal goes to the process group of a rank, which has to live on without the workers of its data.
    workers = ["workers"] if "workers" in whom else []
    config = root / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml"
    script = root / "tests" / "scripts" / "preempted_run.py"
    port = ["--main_process_port", str(free_port())]
    command = launch_command(config, script, str(tmp_path / "run"), *workers, options=port)
    pids = [tmp_path / "run" / f"rank{rank}.pid" for rank in range(4)]
    with tempfile.TemporaryFile() as log:
        process = start_tree(command, log.fileno(), cwd=root)
        try:
            deadline = time.monotonic() + 90
            while not all(path.exists() and path.read_text() for path in pids):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            told = process.pid if "launcher" in whom else int(pids[int(whom[-1])].read_text())
            os.kill(told, signal.SIGTERM)
            code = process.wait(60)
        finally:
            kill_tree(process)
            log.seek(0)
            print(log.read().decode(errors="replace")[-6000:])
    assert code != 0, "a launcher must not report a run as complete that was ended"
    assert not list((tmp_path / "run").glob("finished*"))
    newest = list_checkpoints(tmp_path / "run")[0]
    assert newest.name in ("checkpoint-4", "checkpoint-8", "checkpoint-1", "checkpoint-5")
    assert find_damage(newest) == [] and not list((tmp_path / "run").glob(".*"))

    accelerate_launch(config, script, str(tmp_path / "run"), "resume", *workers, cwd=root, limit_seconds=120).check()
    whole = world4.run(
        train,
        str(tmp_path / "whole"),
        env=fsdp_launch_env(2, 2),
        init_group=False,
        limit_seconds=60,
        sync_every=4,
    )
    for rank in range(4):
        resumed = torch.load(tmp_path / "run" / f"finished{rank}.pt", weights_only=True)
        assert not differences(whole[rank]["model"], resumed)

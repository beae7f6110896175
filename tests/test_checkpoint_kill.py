"""Killed at any moment of a save, and started again: the run goes on from a whole checkpoint, to the same end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from hf_fedshard import checkpoint_folder, tensor_store
from hf_fedshard.checkpoint_choice import list_checkpoints
from hf_fedshard.manifest import find_damage
from tests.harness.checkpoint_runs import checkpoints, differences, make_trainer, state_of
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.reports import WorldTimeoutError
from tests.harness.tiny_trainer import forget_meshes


# Where, and which rank; `None` for all of them.
Fault = tuple[str, int | None]
POINTS: list[Fault] = [
    ("weights half written", 1),
    ("inside a round", None),
    ("optimizer half written", 2),
    ("before the rename", 0),
    ("inside a round", 3),
    ("between the renames", 0),
    ("after the rename", 0),
    ("during rotation", 0),
    ("weights half written", None),
    ("optimizer half written", None),
]


class Killer(TrainerCallback):
    """Ends this process without a word at a point of the training or of a save."""

    def __init__(self, point: str, step: int) -> None:
        self.point = point
        self.step = step
        self.now = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now = state.global_step
        if self.point == "inside a round" and self.now == self.step - 1:
            self.kill()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def install(self) -> None:
        part = {"weights half written": "/model/", "optimizer half written": "/group_"}.get(self.point)
        true_write, true_place = tensor_store._CountingStream.write, checkpoint_folder.put_in_place
        true_rename, true_rmtree = os.rename, checkpoint_folder.shutil.rmtree

        def write(stream: Any, data: Any) -> int:
            if part and self.now == self.step and part in str(stream.file.name) and stream.tell():
                stream.file.flush()
                self.kill()
            return true_write(stream, data)

        def put_in_place(folder: Path, final: Path) -> None:
            at = self.now == self.step
            if at and self.point == "before the rename":
                self.kill()
            if at and self.point == "between the renames":
                # As if a checkpoint of this name were there, of an earlier run.
                final.mkdir()
            true_place(folder, final)
            if at and self.point == "after the rename":
                self.kill()

        def rename(old: Any, new: Any) -> None:
            true_rename(old, new)
            if self.now == self.step and ".removing-" in str(new) and self.point == "between the renames":
                self.kill()

        def rmtree(path: Any, **kwargs: Any) -> None:
            if self.now == self.step and ".removing-" in str(path) and self.point == "during rotation":
                files = [file for file in Path(path).rglob("*") if file.is_file()]
                if files:
                    files[0].unlink()
                    self.kill()
            true_rmtree(path, **kwargs)

        tensor_store._CountingStream.write = write  # type: ignore[method-assign]
        checkpoint_folder.put_in_place = put_in_place
        checkpoint_folder.os.rename = rename  # type: ignore[assignment]
        checkpoint_folder.shutil.rmtree = rmtree  # type: ignore[assignment]


def train(folder: str, fault: Fault | None, step: int, **options: Any) -> dict[str, Any]:
    """Continues if there is something to continue, as the script of a user does. In processes that nobody uses later."""
    forget_meshes()
    killer = Killer(fault[0], step) if fault and fault[1] in (None, dist_rank()) else None
    trainer = make_trainer(folder, save_total_limit=2, save_steps=2, callbacks=(killer,) if killer else (), **options)
    if killer:
        killer.install()
    trainer.train(resume_from_checkpoint=bool(list_checkpoints(Path(folder))))
    state = state_of(trainer)
    dist.barrier()
    return state


def dist_rank() -> int:
    return int(os.environ["RANK"])


def check_all_points(pool: WorkerPool, folder: Path, faults: list[Fault], **options: Any) -> None:
    env = fsdp_launch_env(2, 2)
    settings = {"env": env, "init_group": False, "limit_seconds": 1800.0, "max_steps": 2 * len(faults) + 4, **options}
    (folder / "whole").mkdir()
    expected = pool.run(train, str(folder / "whole"), None, 0, **settings)
    broken = folder / "broken"
    broken.mkdir()
    for index, fault in enumerate(faults):
        step = 2 * index + 4
        with pytest.raises(WorldTimeoutError, match="died with exit code -9"):
            pool.run(train, str(broken), fault, step, **settings)
        whole = [path for path in list_checkpoints(broken) if not find_damage(path)]
        complete = fault[0] in ("after the rename", "during rotation")
        assert whole and all(not find_damage(path) for path in list_checkpoints(broken)), fault
        assert whole[0].name == f"checkpoint-{step if complete else step - 2}", fault
    result = pool.run(train, str(broken), None, 0, **settings)
    assert not differences(expected, result)
    last = 2 * len(faults) + 4
    assert checkpoints(broken) == sorted([f"checkpoint-{last}", f"checkpoint-{last - 2}"])


def test_short(tmp_path: Path) -> None:
    with contextlib.closing(WorkerPool(4)) as pool:
        check_all_points(pool, tmp_path, [POINTS[0], POINTS[3], POINTS[5], POINTS[7]])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_times(tmp_path: Path) -> None:
    with contextlib.closing(WorkerPool(4)) as pool:
        check_all_points(pool, tmp_path, 2 * POINTS, kind="large")

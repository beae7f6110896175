"""Time and size of a checkpoint, against Accelerate's own saving of as many bytes in the same run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

from tests.harness.checkpoint_runs import make_trainer
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(folder: str, repeats: int) -> dict[str, Any]:
    forget_meshes()
    trainer = make_trainer(folder, kind="large", max_steps=2, save_strategy="no")
    found: dict[str, Any] = {"ours": [], "stock": []}

    def timed(kind: str, save: Any, target: Path) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
        dist.barrier()
        start = time.perf_counter()
        save()
        dist.barrier()
        found[kind].append(time.perf_counter() - start)
        found[f"{kind} bytes"] = size_of(target)

    def stock(target: Path) -> None:
        accelerator = trainer.accelerator
        plugin = accelerator.state.fsdp_plugin
        target.mkdir(exist_ok=True)
        save_fsdp_model(plugin, accelerator, trainer.model, str(target))
        save_fsdp_optimizer(plugin, accelerator, trainer.optimizer, trainer.model, str(target))

    original = trainer._maybe_log_save_evaluate

    def at_border(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 2:
            for _ in range(repeats):
                timed("stock", lambda: stock(Path(folder) / "stock"), Path(folder) / "stock")
                timed("ours", lambda: trainer._save_checkpoint(trainer.model, None), Path(folder) / "checkpoint-2")
        return original(*args, **kwargs)

    trainer._maybe_log_save_evaluate = at_border  # type: ignore[method-assign]
    trainer.train()
    dist.barrier()
    return found


@pytest.mark.slow
def test_time_and_size(world4: WorkerPool, tmp_path: Path) -> None:
    env = fsdp_launch_env(2, 2, state_dict_type="SHARDED_STATE_DICT")
    found = world4.run(measure, str(tmp_path), 5, env=env, init_group=False, limit_seconds=280.0)[0]
    weights = 113.5e6
    ours, stock = min(found["ours"]) / found["ours bytes"], min(found["stock"]) / found["stock bytes"]
    print(found, f"seconds for a byte against stock: {ours / stock:.2f}")
    # Weights once, two moments for each of two groups. Stock: one group's moments.
    assert found["ours bytes"] == pytest.approx(5 * weights, rel=0.02)
    assert found["stock bytes"] == pytest.approx(3 * weights, rel=0.02)
    assert ours <= 1.2 * stock

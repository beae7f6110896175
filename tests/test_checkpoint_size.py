"""Size of a checkpoint, against Accelerate's own saving in the same run. `benchmarks.saving` measures the time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

from tests.harness.checkpoint_runs import make_trainer
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sizes(folder: str) -> dict[str, int]:
    forget_meshes()
    trainer = make_trainer(folder, kind="large", max_steps=2, save_steps=2)
    trainer.train()
    accelerator, stock = trainer.accelerator, Path(folder) / "stock"
    plugin = accelerator.state.fsdp_plugin
    stock.mkdir(exist_ok=True)
    save_fsdp_model(plugin, accelerator, trainer.model, str(stock))
    save_fsdp_optimizer(plugin, accelerator, trainer.optimizer, trainer.model, str(stock))
    dist.barrier()
    return {"ours": size_of(Path(folder) / "checkpoint-2"), "stock": size_of(stock)}


@pytest.mark.slow
def test_size(world4: WorkerPool, tmp_path: Path) -> None:
    env = fsdp_launch_env(2, 2, state_dict_type="SHARDED_STATE_DICT")
    found = world4.run(sizes, str(tmp_path), env=env, init_group=False, limit_seconds=280.0)[0]
    weights = 113.5e6
    # Weights once, two moments for each of two groups. Stock: one group's moments.
    assert found["ours"] == pytest.approx(5 * weights, rel=0.02)
    assert found["stock"] == pytest.approx(3 * weights, rel=0.02)

"""Interrupted and resumed is uninterrupted, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.checkpoint_runs import differences, train
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.marks import quick_and_slow
from tests.harness.pool import WorkerPool


LIMIT = 240.0


def run(
    pool: WorkerPool, folder: Path, resume: Any = None, launch: dict[str, Any] | None = None, **options: Any
) -> Any:
    env = fsdp_launch_env(**{"dp_replicate": pool.world_size // 2, "dp_shard": 2, **(launch or {})})
    return pool.run(train, str(folder), resume, env=env, init_group=False, limit_seconds=LIMIT, **options)


def assert_resumes(pool: WorkerPool, folder: Path, step: int = 4, one_optimizer: bool = False, **options: Any) -> None:
    """Trains through, then from the checkpoint at a step with other initial weights, and compares what goes on."""
    whole = run(pool, folder / "whole", **options)
    # A moved folder, alone.
    (folder / "again").mkdir()
    shutil.copytree(folder / "whole" / f"checkpoint-{step}", folder / "again" / f"checkpoint-{step}")
    resumed = run(pool, folder / "again", resume=True, **options, seed=7)
    for before, after in zip(whole, resumed, strict=True):
        drawn = len(after["batches"])
        assert 0 < drawn < len(before["batches"])
        assert not differences(before.pop("batches")[-drawn:], after.pop("batches"))
        assert before.pop("rounds")[-len(after["rounds"]) :] == after.pop("rounds")
        assert not differences(before, after)
    moments = {str(rank["optimizer"]) for rank in whole}
    if one_optimizer:
        assert len(moments) == 1, "the groups must have the same moments"
    else:
        assert moments == {"{}"} or len(moments) == 2, "the groups must have different moments"


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "sharded": {"launch": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 9, "sync_every": 4},
    "lora": {"kind": "lora"},
    "frozen": {"kind": "frozen"},
    "tied": {"kind": "tied"},
    "dropout": {"kind": "dropout"},
    "buffers": {"kind": "batchnorm", "launch": {"wrap_cls": "TinyBlock"}, "per_device_train_batch_size": 2},
    "second epoch": {"step": 8},
    "second epoch by length": {"step": 8, "train_sampling_strategy": "group_by_length"},
    "second epoch unseeded": {"step": 8, "accelerator_config": {"use_seedable_sampler": False}},
    "adagrad": {"optim": "adagrad"},
    "end of an epoch": {"step": 6, "save_steps": 6},
    "by epochs": {"step": 8, "save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "sync_every": 4},
    "bf16": {"bf16": True},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "linear"},
    "rebuilt": {"restore_callback_states_from_checkpoint": True},
}

# One case of each thing that a checkpoint holds: weights in both formats, a counter inside a window, random states, buffers,
# the place in the data, a base that does not train.
QUICK = {"sharded", "dropout", "second epoch", "lora"}


@pytest.mark.parametrize("case", quick_and_slow(CASES, QUICK))
def test_fl_fsdp(world4: WorkerPool, case: str, tmp_path: Path) -> None:
    assert_resumes(world4, tmp_path, **CASES[case])


@pytest.mark.parametrize("case", quick_and_slow(["full", "sharded"], {"full"}))
def test_fl_hsdp(world8: WorkerPool, case: str, tmp_path: Path) -> None:
    assert_resumes(world8, tmp_path, **CASES[case], num_groups=2)

"""A callback that keeps state of its own is built anew by Trainer on resume, and must not be lost with its federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_fedshard import FedAvgCallback
from tests.harness.checkpoint_runs import differences, make_model, state_of
from tests.harness.data import ListDataset, collate, token_samples
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes


class Counting(FedAvgCallback, ExportableState):
    """Counts the steps of all runs."""

    def __init__(self, num_groups: int | None = None, sync_every: int | None = None) -> None:
        super().__init__(num_groups=num_groups, sync_every=sync_every)
        self.num_steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps += 1

    def state(self) -> dict[str, Any]:
        return {
            # As if the run that was saved had had another period.
            "args": {"num_groups": self.config.num_groups, "sync_every": 3},
            "attributes": {"num_steps": self.num_steps},
        }


def train(folder: str, resume: bool, num_groups: int, twice: bool = False) -> dict[str, Any]:
    forget_meshes()
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        logging_strategy="no",
        save_strategy="steps",
        save_steps=2,
        max_steps=6,
        restore_callback_states_from_checkpoint=True,
    )
    trainer = Trainer(
        model=make_model("llama"),
        args=args,
        train_dataset=ListDataset(token_samples(24)),
        data_collator=collate,
        callbacks=[Counting(num_groups, 2)],
    )
    for _ in range(2 if twice else 1):
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    (callback,) = [item for item in trainer.callback_handler.callbacks if isinstance(item, Counting)]
    dist.barrier()
    return {**state_of(trainer), "num_steps": callback.num_steps, "sync_every": callback.config.sync_every}


def test_rebuilt_callback_is_bound(world4: WorkerPool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env": fsdp_launch_env(2, 2), "init_group": False, "limit_seconds": 60}
    whole = world4.run(train, str(tmp_path), False, 2, **settings)
    # Twice: what was built anew is built anew again.
    again = world4.run(train, str(tmp_path), True, 2, twice=True, **settings)
    assert not differences(whole, again)
    assert [rank["num_steps"] for rank in again] == [6] * 4


def test_rebuilt_callback_of_one_group(world4: WorkerPool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env": fsdp_launch_env(2, 2), "init_group": False, "limit_seconds": 60}
    whole = world4.run(train, str(tmp_path), False, 1, **settings)
    assert not differences(whole, world4.run(train, str(tmp_path), True, 1, **settings))

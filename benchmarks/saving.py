"""
Time and bytes of a checkpoint, against Accelerate's own saving of model and optimizer in the same run, by turns:

    accelerate launch --config_file accelerate_configs/cpu_fl_fsdp_4proc.yaml \\
        --fsdp_state_dict_type SHARDED_STATE_DICT -m benchmarks.saving JOB_FILE

Ours holds the weights once and each group's optimizer state; Accelerate's, wrong for a federated run, one group's. So they
are compared by the seconds that a byte takes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


NUM_SAVES = 5
WIDER = 2
"""How many times as wide and as deep as elsewhere the model is: of a small one a checkpoint is names and no bytes."""


def timed_save(save: Callable[[], Any], folder: Path) -> tuple[float, int]:
    """
    Saves once. Collective over the world.

    Args:
        save (`Callable`):
            Writes the folder.
        folder (`Path`):
            Removed before.

    Returns:
        `tuple[float, int]`: Seconds until all ranks are done, and bytes in the folder.
    """
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    started = time.perf_counter()
    save()
    dist.barrier()
    seconds = time.perf_counter() - started
    return seconds, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(folder: Path, blocks: torch.Tensor, workload: Any) -> dict[str, list[tuple[float, int]]]:
    """
    Trains one round and saves at its border.

    Args:
        folder (`Path`):
            Where Trainer may write.
        blocks (`torch.Tensor`):
            Sequences.
        workload ([`Workload`]):
            What is trained.

    Returns:
        `dict[str, list[tuple[float, int]]]`: Seconds and bytes of each save, `"ours"` and `"stock"`.
    """
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_fedshard import FedAvgCallback

    from .workload import make_model

    found: dict[str, list[tuple[float, int]]] = {"ours": [], "stock": []}

    def stock() -> None:
        accelerator = trainer.accelerator
        plugin, target = accelerator.state.fsdp_plugin, folder / "stock"
        target.mkdir(exist_ok=True)
        save_fsdp_model(plugin, accelerator, trainer.model, str(target))
        save_fsdp_optimizer(plugin, accelerator, trainer.optimizer, trainer.model, str(target))

    def ours() -> None:
        model: Any = trainer.model
        trainer._save_checkpoint(model, None)

    class Saves(TrainerCallback):
        # After Trainer's own save, which has warmed up whatever is made once.
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            for _ in range(NUM_SAVES):
                found["stock"].append(timed_save(stock, folder / "stock"))
                found["ours"].append(timed_save(ours, folder / f"checkpoint-{workload.sync_every}"))

    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=workload.sync_every,
        per_device_train_batch_size=workload.batch_size,
        save_steps=workload.sync_every,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows: Any = [{"input_ids": block, "labels": block} for block in blocks.long()]
    callbacks = [FedAvgCallback(num_groups=2, sync_every=workload.sync_every), Saves()]
    trainer = Trainer(model=make_model(workload), args=args, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return found


def main() -> None:
    """Measures, and notes the saves."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)

    from hf_fedshard import shutdown

    from .records import Records
    from .workload import Workload, load_blocks

    workload = Workload(**job["workload"])
    larger = {name: WIDER * getattr(workload, name) for name in ("hidden_size", "num_layers", "intermediate_size")}
    wide = dataclasses.replace(workload, **larger)
    folder = Path(job["folder"])
    blocks = load_blocks(folder / "blocks.pt", workload).train[: 64 * workload.batch_size]
    found = measure(folder / "saving", blocks, wide)
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "saving")
        Records(folder).append("saving", {"session": job["session"], **found})
        for name, saves in found.items():
            seconds, num_bytes = min(saves)
            print(f"[saving] {name}: {num_bytes / 1e6:.1f} MB in {seconds:.2f} s", flush=True)
    shutdown()


if __name__ == "__main__":
    main()

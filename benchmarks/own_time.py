"""
The package's own time inside a round, measured in the process, under Trainer and in a loop:

    accelerate launch --config_file accelerate_configs/cpu_fl_fsdp_4proc.yaml -m benchmarks.own_time JOB_FILE

Everything of the package that runs between two borders is called through a method that it has put in the place of one of
Trainer's or Accelerate's, or through its hook on optimizers, or by `fedavg.step`. A clock runs while such a call runs, and
stands still while that calls what was there before, and in the collectives that stay in the group in place of Accelerate's,
where a rank waits for others either way.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


NUM_ROUNDS = 5


class OwnClock:
    """Time in calls that are ours, less the time in calls of others that these make."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stack: list[bool] = []
        self._since = 0.0

    def ours(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """
        Args:
            function (`Callable`):
                A function of the package.

        Returns:
            `Callable`: The same, timed.
        """
        return self._timed(function, own=True)

    def theirs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """
        Args:
            function (`Callable`):
                A function that the package calls for somebody else.

        Returns:
            `Callable`: The same, with the clock standing still.
        """
        return self._timed(function, own=False)

    def _timed(self, function: Callable[..., Any], own: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch(lambda: self._stack.append(own))
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(self._stack.pop)

        return timed

    def _switch(self, change: Callable[[], Any]) -> None:
        now = time.perf_counter()
        if self._stack and self._stack[-1]:
            self.seconds += now - self._since
        change()
        self._since = time.perf_counter()


def watch_package(clock: OwnClock) -> None:
    """
    Puts the clock into the package: before any of it is installed in a Trainer.

    Args:
        clock ([`OwnClock`]):
            The clock.
    """
    from hf_fedshard import group_ops, guard, seams

    replace = seams.Patches.replace

    def timed_replace(self: Any, instance: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        replace(self, instance, name, lambda original: clock.ours(make(clock.theirs(original))))

    seams.Patches.replace = timed_replace  # type: ignore[method-assign]
    guard._check = clock.ours(guard._check)
    # Collectives of the group where Trainer asks for the world's: with or without the package a rank waits there for others.
    for name in group_ops.ACCELERATOR_SEAMS:
        setattr(group_ops.GroupOps, name, clock.theirs(getattr(group_ops.GroupOps, name)))


def shares_inside_rounds(marks: list[tuple[float, float]], sync_every: int) -> list[float]:
    """
    Args:
        marks (`list[tuple[float, float]]`):
            At the beginning of each step: the time, and what the clock of the package showed.
        sync_every (`int`):
            H: the step that ends a round is a border's, and left out. So is the first of all, which warms up.

    Returns:
        `list[float]`: The package's share of each step inside a round.
    """
    shares = []
    for index in range(1, len(marks) - 1):
        if (index + 1) % sync_every == 0:
            continue
        seconds, own = (after - before for before, after in zip(marks[index], marks[index + 1], strict=True))
        shares.append(own / seconds)
    return shares


@dataclass(frozen=True)
class TimedTraining:
    """
    Trains with a clock in the package. Both ways return marks, see [`shares_inside_rounds`].

    Args:
        clock ([`OwnClock`]):
            The clock.
        blocks (`torch.Tensor`):
            Sequences.
        workload ([`Workload`]):
            What is trained.
    """

    clock: OwnClock
    blocks: Any
    workload: Any

    def with_trainer(self, folder: str) -> list[tuple[float, float]]:
        """
        With Trainer and `FedAvgCallback`.

        Args:
            folder (`str`):
                Where Trainer may write.
        """
        clock, blocks, workload = self.clock, self.blocks, self.workload
        from transformers import Trainer, TrainerCallback, TrainingArguments

        from hf_fedshard import FedAvgCallback

        from .workload import make_model

        marks: list[tuple[float, float]] = []

        class Marks(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                marks.append((time.perf_counter(), clock.seconds))

        rows = [{"input_ids": block, "labels": block} for block in blocks.long()]
        args = TrainingArguments(
            output_dir=folder,
            max_steps=NUM_ROUNDS * workload.sync_every,
            per_device_train_batch_size=workload.batch_size,
            learning_rate=workload.learning_rate,
            logging_steps=workload.sync_every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        callbacks = [Marks(), FedAvgCallback(num_groups=2, sync_every=workload.sync_every)]
        dataset: Any = rows
        Trainer(model=make_model(workload), args=args, train_dataset=dataset, callbacks=callbacks).train()
        return marks

    def in_loop(self) -> list[tuple[float, float]]:
        """With `FederatedFSDPPlugin` in a loop."""
        clock, blocks, workload = self.clock, self.blocks, self.workload
        from accelerate import Accelerator
        from torch.utils.data import DataLoader

        from hf_fedshard import FederatedFSDPPlugin

        from .workload import make_model, make_optimizer

        plugin = FederatedFSDPPlugin(num_groups=2, sync_every=workload.sync_every)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=plugin.parallelism_config)
        model: Any = make_model(workload)
        loader = DataLoader(blocks, batch_size=workload.batch_size)
        model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, workload), loader)
        fedavg = plugin.federate(accelerator, model)
        step = clock.ours(fedavg.step)
        marks: list[tuple[float, float]] = []
        for index, batch in enumerate(loader):
            marks.append((time.perf_counter(), clock.seconds))
            if index == NUM_ROUNDS * workload.sync_every:
                break
            loss = model(input_ids=batch.long(), labels=batch.long()).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step(loss, tokens=batch.numel())
        fedavg.finish()
        return marks


def main() -> None:
    """Runs one way of training, and notes the shares of all ranks."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)

    from hf_fedshard import shutdown

    from .records import Records
    from .workload import Workload, load_blocks

    clock = OwnClock()
    watch_package(clock)
    workload = Workload(**job["workload"])
    world_size = 4
    needed = (NUM_ROUNDS * workload.sync_every + 1) * workload.batch_size * world_size
    blocks = load_blocks(Path(job["folder"]) / "blocks.pt", workload).train[:needed]
    training = TimedTraining(clock, blocks, workload)
    if job["way"] == "Trainer":
        marks = training.with_trainer(str(Path(job["folder"]) / "trainer"))
    else:
        marks = training.in_loop()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, shares_inside_rounds(marks, workload.sync_every))
    if dist.get_rank() == 0:
        shares = [share for rank in everybody for share in rank]
        Records(Path(job["folder"])).append(
            "own_time", {"way": job["way"], "session": job["session"], "shares": shares}
        )
        print(f"[own time] {job['way']}: {100 * sorted(shares)[len(shares) // 2]:.3f} % of a step", flush=True)
    shutdown()


if __name__ == "__main__":
    main()

"""A slow group delays the others at borders only: their steps do not wait for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes, tiny_trainer


DELAY_SECONDS = 6.0
SYNC_EVERY = 5


class Clock(TrainerCallback):
    """
    Notes when steps end, on a clock that all processes of a machine share; and makes group 1 sleep once.

    Args:
        slow_step (`int`):
            `global_step` after which group 1 sleeps.
    """

    def __init__(self, slow_step: int) -> None:
        self.ends: list[float] = []
        self.slow_step = slow_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.slow_step and dist.get_rank() >= dist.get_world_size() // 2:
            time.sleep(DELAY_SECONDS)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.monotonic())


def timed(folder: str, slow_step: int) -> Any:
    forget_meshes()
    clock = Clock(slow_step)
    # Logging at each step and token counts would both gather over the world under stock Trainer.
    trainer = tiny_trainer(
        folder,
        sync_every=SYNC_EVERY,
        max_steps=2 * SYNC_EVERY,
        before=(clock,),
        logging_strategy="steps",
        logging_steps=1,
        include_num_input_tokens_seen=True,
    )
    trainer.train()
    waits = [row["fedshard/wait_seconds"] for row in trainer.state.log_history if "fedshard/wait_seconds" in row]
    return clock.ends, waits


def test_a_slow_group_delays_borders_only(world4: WorkerPool, tmp_path: Path) -> None:
    slow_step = 1  # in mid-round: after the first of 5 steps
    results = world4.run(timed, str(tmp_path), slow_step, env=fsdp_launch_env(2, 2), limit_seconds=120)
    fast, slow = [results[rank][0] for rank in (0, 1)], [results[rank][0] for rank in (2, 3)]
    # Group 1 is at its second step when it falls asleep; group 0 ends all steps of the round meanwhile.
    for ends in fast:
        assert ends[SYNC_EVERY - 1] < slow[0][slow_step] - 0.2 * DELAY_SECONDS
        assert max(b - a for a, b in zip(ends[: SYNC_EVERY - 1], ends[1:SYNC_EVERY], strict=True)) < DELAY_SECONDS / 2
        # Then its border waits for group 1.
        assert ends[SYNC_EVERY] > slow[0][SYNC_EVERY - 1]
    for ends in slow:
        assert ends[slow_step] - ends[slow_step - 1] >= DELAY_SECONDS
    assert results[0][1][0] > 0.5 * DELAY_SECONDS  # what the log says of it

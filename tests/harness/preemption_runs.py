"""Runs of a Trainer that are told to end, each group at a step of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from hf_fedshard import TrainingPreempted

from .checkpoint_runs import make_trainer, state_of
from .data import BatchRecorder
from .tiny_trainer import forget_meshes


def wait_for(condition: Callable[[], Any], seconds: float = 40.0) -> None:
    """
    Waits until something is so.

    Args:
        condition (`Callable`):
            Says whether.
        seconds (`float`, *optional*, defaults to 40.0):
            How long at most.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Pause(TrainerCallback):
    """
    Makes a group slow once.

    Args:
        first_rank (`int`):
            This rank and those after it are.
        step (`int`):
            In which step.
        seconds (`float`):
            How long it lasts.
    """

    def __init__(self, first_rank: int, step: int, seconds: float) -> None:
        self.first_rank = first_rank
        self.step = step
        self.seconds = seconds

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step and dist.get_rank() >= self.first_rank:
            time.sleep(self.seconds)


class Ending(TrainerCallback):
    """
    Sends SIGTERM to this process at the end of a step; other groups wait in a step until the first has begun to save alone.

    Args:
        folder (`str`):
            The output folder.
        signal_rank (`int`):
            Who gets the signal.
        signal_step (`int`):
            At the end of which step.
        waits (`dict[int, int]`):
            For each rank that waits, the step in which it does.
    """

    def __init__(self, folder: str, signal_rank: int, signal_step: int, waits: dict[int, int]) -> None:
        self.folder = Path(folder)
        self.signal_step = signal_step if dist.get_rank() == signal_rank else None
        self.wait_step = waits.get(dist.get_rank())
        self.waiting = [self.folder / f"waiting-{rank}" for rank in waits]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.signal_step:
            wait_for(lambda: all(path.exists() for path in self.waiting))
            os.kill(os.getpid(), signal.SIGTERM)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.wait_step:
            (self.folder / f"waiting-{dist.get_rank()}").touch()
            wait_for(lambda: list(self.folder.glob(".saving-checkpoint-*/*/*")))
            time.sleep(0.25)  # longer than the store is left in peace


def train(
    folder: str,
    resume: Any = None,
    ending: tuple[int, int, dict[int, int]] | None = None,
    grace_seconds: float | None = None,
    callbacks: tuple[Any, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """
    Trains, and may be told to end.

    Args:
        folder (`str`):
            Output folder.
        resume (`Any`, *optional*):
            `resume_from_checkpoint`.
        ending (`tuple`, *optional*):
            Arguments of [`Ending`].
        grace_seconds (`float`, *optional*):
            `preemption_grace_seconds`.
        callbacks (`tuple`, *optional*):
            More callbacks.
        options (`Any`):
            Of [`make_trainer`].

    Returns:
        `dict`: What the run has come to: the state, the batches drawn, losses by step; `preempted` with checkpoint, step and
        exit code if it was ended.
    """
    forget_meshes()
    if grace_seconds is not None:
        os.environ["FEDSHARD_PREEMPTION_GRACE_SECONDS"] = str(grace_seconds)
    before = signal.getsignal(signal.SIGTERM)
    make_ending = (lambda: Ending(folder, *ending)) if ending else None
    trainer = make_trainer(
        folder,
        callbacks=callbacks,
        **{"enable_jit_checkpoint": True, "logging_strategy": "steps", "logging_steps": 2, **options},
    )
    if make_ending is not None:
        trainer.add_callback(make_ending())
    recorder = BatchRecorder(trainer.model)  # type: ignore[arg-type]
    preempted = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except TrainingPreempted as ended:
        preempted = {"checkpoint": ended.checkpoint, "step": ended.global_step, "code": ended.code}
    assert signal.getsignal(signal.SIGTERM) == before
    history = trainer.state.log_history
    result = {
        **state_of(trainer),
        "batches": recorder.batches,
        "losses": {row["step"]: row["loss"] for row in history if "loss" in row},
        "evaluated": {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row},
        "rounds": [row["fedshard/round"] for row in history if "fedshard/round" in row],
        "best": os.path.basename(trainer.state.best_model_checkpoint or ""),
        "preempted": preempted,
        "train_loss": (history or [{}])[-1].get("train_loss"),
    }
    if preempted is None:
        dist.barrier()
    return result

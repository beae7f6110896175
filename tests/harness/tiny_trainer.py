"""A Trainer of a tiny Llama on CPU, and what a run of it left in its history."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, _redistribute
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fedshard import FedAvgCallback, guard

from .data import ListDataset, collate, token_samples
from .models import tiny_llama


def tiny_arguments(folder: str, **changes: Any) -> TrainingArguments:
    """
    Args:
        folder (`str`):
            Output folder, the same on all ranks.
        changes (`Any`):
            Arguments of `TrainingArguments`.

    Returns:
        `TrainingArguments`: For CPU, quiet, one sample a rank.
    """
    defaults: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-2,
        "logging_strategy": "no",
        "save_strategy": "no",
        "max_steps": 6,
    }
    return TrainingArguments(**{**defaults, **changes})


def tiny_trainer(
    folder: str,
    *,
    num_groups: int | None = 2,
    sync_every: int = 4,
    trainer_class: type[Trainer] = Trainer,
    train_dataset: Any = None,
    eval_samples: int = 0,
    before: tuple[Any, ...] = (),
    after: tuple[Any, ...] = (),
    model: Any = None,
    args: TrainingArguments | None = None,
    federated: bool = True,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """
    Args:
        folder (`str`):
            Output folder.
        num_groups (`int`, *optional*, defaults to 2):
            Federation groups.
        sync_every (`int`, *optional*, defaults to 4):
            Steps in a round.
        trainer_class (`type`, *optional*):
            Class of the Trainer.
        train_dataset (`Any`, *optional*):
            Defaults to 24 samples: with 4 ranks 6 steps in an epoch.
        eval_samples (`int`, *optional*, defaults to 0):
            Samples to evaluate on.
        before (`tuple`, *optional*):
            Callbacks, or what makes them, listed ahead of ours.
        after (`tuple`, *optional*):
            The same, listed behind it.
        model (`torch.nn.Module`, *optional*):
            Defaults to a tiny Llama.
        args (`TrainingArguments`, *optional*):
            Taken as they are, in place of `changes`.
        federated (`bool`, *optional*, defaults to `True`):
            Whether to give our callback.
        options (`dict`, *optional*):
            More arguments of the Trainer.
        changes (`Any`):
            Arguments of `TrainingArguments`.

    Returns:
        `Trainer`: The Trainer.
    """
    ours = [FedAvgCallback(num_groups=num_groups, sync_every=sync_every)] if federated else []

    def made(callbacks: tuple[Any, ...]) -> list[TrainerCallback]:
        return [callback if isinstance(callback, TrainerCallback) else callback() for callback in callbacks]

    return trainer_class(
        model=tiny_llama() if model is None and "model_init" not in (options or {}) else model,
        args=tiny_arguments(folder, **changes) if args is None else args,
        train_dataset=ListDataset(token_samples(24)) if train_dataset is None else train_dataset,
        eval_dataset=ListDataset(token_samples(eval_samples, seed=1)) if eval_samples else None,
        data_collator=collate,
        callbacks=[*made(before), *ours, *made(after)],
        **(options or {}),
    )


def forget_meshes() -> None:
    """To be called first by a body: the process has run others, whose process groups are gone."""
    guard.reset()
    # Redistributions and output specs are cached by the content of a mesh, and hold the groups of the first one.
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


class History(TrainerCallback):
    """At which steps what happened."""

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.evaluated: list[int] = []
        self.saved: list[int] = []
        self.epoch_ends: list[int] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logged.append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epoch_ends.append(state.global_step)

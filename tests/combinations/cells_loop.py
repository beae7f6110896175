"""Cells: the loop around the steps, and subclasses of Trainer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from tests.harness.data import IGNORED_LABEL
from tests.harness.models import tiny_llama

from .cell import Cell, even_samples
from .cells_optimizers import evaluation


class TooLarge(TrainerCallback):
    """As if a batch of the first size did not fit."""

    def __init__(self) -> None:
        self.times = 1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.times:
            self.times -= 1
            raise RuntimeError("CUDA out of memory. Tried to allocate more than there is.")


def too_large() -> dict[str, Any]:
    return {"callbacks": [TooLarge()]}


def train_and_tell_size(trainer: Any) -> int:
    trainer.train()
    return int(trainer._train_batch_size)


def make_tiny() -> Any:
    return tiny_llama()


def candidates() -> dict[str, Any]:
    return {"model_init": make_tiny, **evaluation()}


def search(trainer: Any) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-2, 1e-5])},
        n_trials=2,
        direction="minimize",
        backend="optuna",
        compute_objective=lambda metrics: metrics["eval_loss"],
        sampler=optuna.samplers.GridSampler({"learning_rate": [1e-5, 1e-2]}, seed=0),
    )
    found = [None if best is None else (best.objective, best.hyperparameters)]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    # What people do next: the best one is trained.
    trainer.args.learning_rate = found[0][1]["learning_rate"]
    trainer.hp_search_backend = None
    trainer.train()
    return found[0][1]


def train_twice(trainer: Any) -> None:
    trainer.train()
    trainer.train()


def stops_early() -> dict[str, Any]:
    return {"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)], **evaluation()}


EARLY = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "eval_loss",
    # The loss falls, so the first one stays the best.
    "greater_is_better": True,
}


def train_and_tell_step(trainer: Any) -> int:
    trainer.train()
    return int(trainer.state.global_step)


def stopped_at_4(trainer: Any) -> None:
    assert trainer.state.global_step == 4


class OwnTrainer(Trainer):
    """Overrides what people override."""

    def get_train_dataloader(self) -> Any:
        self.asked_for_data = True
        return super().get_train_dataloader()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        inputs = {**inputs, "labels": inputs["labels"].clone()}
        inputs["labels"][:, 5] = IGNORED_LABEL
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 1e-3 * outputs["logits"].float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "of_mine": 1.0}, *args, **kwargs)


def own_trainer() -> dict[str, Any]:
    return {"trainer_class": OwnTrainer}


def was_overridden(trainer: Any) -> None:
    assert trainer.asked_for_data
    assert any("of_mine" in row for row in trainer.state.log_history)


def train_in_a_spaced_folder(trainer: Any) -> None:
    folder = Path(trainer.args.output_dir).parent / "a folder" / Path(trainer.args.output_dir).name
    trainer.args.output_dir = str(folder)
    trainer.train()
    trainer.save_model()
    dist.barrier()
    assert (folder / "model.safetensors").is_file()


def has_checkpoints(trainer: Any) -> None:
    assert (Path(trainer.args.output_dir) / "checkpoint-4" / "federation" / "manifest.json").is_file()


def shift_labels(trainer: Any) -> None:
    """FSDP2 renames the model's class, and stock Trainer no longer knows a causal language model by it."""
    trainer.label_smoother = functools.partial(trainer.label_smoother, shift_labels=True)


SAVING = {"save_strategy": "steps", "save_steps": 4}

LOOP_CELLS = [
    Cell(
        "auto_find_batch_size",
        "`auto_find_batch_size=True`",
        {"auto_find_batch_size": True, "per_device_train_batch_size": 4},
        options=too_large,
        train=train_and_tell_size,
        reference_args={"train_sampling_strategy": "sequential"},
    ),
    Cell(
        "hyper-parameter search",
        "`hyperparameter_search(backend='optuna')`",
        {"eval_strategy": "steps", "eval_steps": 5},
        data=even_samples,
        options=candidates,
        train=search,
        needs=("optuna",),
    ),
    Cell("several train() calls", "`trainer.train()` twice", train=train_twice),
    Cell(
        "early stopping",
        "`EarlyStoppingCallback`",
        EARLY,
        data=even_samples,
        options=stops_early,
        train=train_and_tell_step,
        check=stopped_at_4,
        steps=9,
        fast=True,
    ),
    Cell(
        "label smoothing",
        "`label_smoothing_factor=0.1`",
        {"label_smoothing_factor": 0.1},
        mend=shift_labels,
        limit="labels are shifted, as without FSDP; stock Trainer forgets to under FSDP2",
        fast=True,
    ),
    Cell(
        "a subclass of Trainer",
        "overrides `training_step`, `compute_loss`, `log`, `get_train_dataloader`",
        {"logging_strategy": "steps", "logging_steps": 1},
        options=own_trainer,
        check=was_overridden,
    ),
    Cell("an output folder with a space", "`output_dir='a folder/run'`", train=train_in_a_spaced_folder),
    Cell(
        "sharded checkpoints",
        "`fsdp_state_dict_type: SHARDED_STATE_DICT`",
        SAVING,
        launch={"state_dict_type": "SHARDED_STATE_DICT"},
        check=has_checkpoints,
        reference_args={"save_strategy": "no"},
    ),
]

"""Cells: optimizers and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer

from tests.harness.data import ListDataset, token_samples
from tests.harness.models import tiny_llama

from .cell import Cell, even_samples


def matrices_of_layers() -> nn.Module:
    """Muon takes matrices only, and is meant for those inside the model."""
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.ndim == 2 and "layers" in name)
    return model


def muon() -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (torch.optim.Muon, {"lr": 0.02, "momentum": 0.9})}


def steps_with(name: str) -> Any:
    def check(trainer: Any) -> None:
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        assert type(optimizer).__name__ == name

    return check


def is_fused(trainer: Any) -> None:
    assert all(group["fused"] for group in trainer.optimizer.param_groups)


class OwnOptimizer(Trainer):
    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self._created_lr_scheduler = True
        return self.lr_scheduler


def own_optimizer() -> dict[str, Any]:
    return {"trainer_class": OwnOptimizer}


def given_optimizer() -> dict[str, Any]:
    model = tiny_llama()
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.5), None)}


def evaluation() -> dict[str, Any]:
    return {"eval_dataset": ListDataset(token_samples(8, uneven=False, seed=1))}


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"mode": "max", "patience": 0, "factor": 0.5},
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "eval_loss",
}


def train_and_tell_rates(trainer: Any) -> list[float]:
    trainer.train()
    return [group["lr"] for group in trainer.optimizer.param_groups]


def rate_was_reduced(trainer: Any) -> None:
    assert trainer.optimizer.param_groups[0]["lr"] < 1e-2


OPTIMIZER_CELLS = [
    Cell("fused AdamW", "`optim='adamw_torch_fused'`", {"optim": "adamw_torch_fused"}, check=is_fused),
    Cell("SGD", "`optim='sgd'`", {"optim": "sgd", "learning_rate": 1.0}, check=steps_with("SGD")),
    Cell("Adagrad", "`optim='adagrad'`", {"optim": "adagrad"}, check=steps_with("Adagrad")),
    Cell("RMSprop", "`optim='rmsprop'`", {"optim": "rmsprop"}, check=steps_with("RMSprop")),
    Cell(
        "8-bit AdamW of torchao",
        "`optim='adamw_torch_8bit'`",
        {"optim": "adamw_torch_8bit"},
        check=steps_with("AdamW8bit"),
        needs=("torchao",),
    ),
    Cell(
        "4-bit AdamW of torchao",
        "`optim='adamw_torch_4bit'`",
        {"optim": "adamw_torch_4bit"},
        check=steps_with("AdamW4bit"),
        needs=("torchao",),
    ),
    Cell(
        "8-bit AdamW of bitsandbytes",
        "`optim='adamw_bnb_8bit'`",
        {"optim": "adamw_bnb_8bit"},
        needs=("bitsandbytes",),
        error="optim=adamw_bnb_8bit",
        stock_error="bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy registered",
        limit="the optimizer itself fails under FSDP2",
    ),
    Cell("Muon", "`torch.optim.Muon`", model=matrices_of_layers, options=muon, check=steps_with("Muon")),
    Cell(
        "Adafactor",
        "`optim='adafactor'`",
        {"optim": "adafactor"},
        error="optim=adafactor",
        stock_error="got mixed torch.Tensor and DTensor",
        limit="the optimizer itself fails under FSDP2",
    ),
    Cell(
        "an optimizer and a schedule of one's own",
        "overrides `create_optimizer` and `create_scheduler`",
        options=own_optimizer,
        check=steps_with("SGD"),
    ),
    Cell(
        "an optimizer that is given",
        "`Trainer(optimizers=(optimizer, None))`",
        options=given_optimizer,
        error="Passing `optimizers` is not allowed if PyTorch FSDP is enabled",
        stock_error="Passing `optimizers` is not allowed if PyTorch FSDP is enabled",
        limit="Trainer refuses it under FSDP",
    ),
    Cell("no clipping", "`max_grad_norm=0`", {"max_grad_norm": 0.0}),
    Cell("warm-up and cosine", "`lr_scheduler_type='cosine'`", {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    Cell(
        "ReduceLROnPlateau",
        "`lr_scheduler_type='reduce_lr_on_plateau'`",
        PLATEAU,
        data=even_samples,
        options=evaluation,
        train=train_and_tell_rates,
        check=rate_was_reduced,
    ),
]

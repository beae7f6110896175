"""Runs of a Trainer that save and resume, and what is compared between them: everything that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hf_fedshard import FedAvgCallback, FederationConfig

from .data import BatchRecorder, ListDataset, collate, feature_samples, token_samples
from .models import add_lora, tiny_batchnorm, tiny_llama
from .tiny_trainer import forget_meshes, tiny_arguments


def make_model(kind: str, seed: int = 0) -> nn.Module:
    """
    Args:
        kind (`str`):
            `"llama"`, `"large"` (113 MB), `"small"` (one layer), `"bfloat16"`, `"dropout"`, `"tied"`, `"lora"`, `"frozen"`
            or `"batchnorm"`.
        seed (`int`, *optional*, defaults to 0):
            Seed of the trained weights.

    Returns:
        `torch.nn.Module`: The model.
    """
    if kind == "batchnorm":
        return tiny_batchnorm(seed=seed)
    if kind == "large":
        return tiny_llama(seed=seed, num_layers=12, hidden_size=512)
    if kind in ("small", "bfloat16"):
        return tiny_llama(seed=seed, num_layers=1, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    model = tiny_llama(tied=kind == "tied", seed=0 if kind == "lora" else seed)
    if kind == "lora":
        return add_lora(model, seed=seed)
    if kind == "frozen":
        model.model.embed_tokens.weight.requires_grad_(False)  # type: ignore[union-attr]
    if kind == "dropout":
        model.config.attention_dropout = 0.3  # type: ignore[union-attr]
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
    return model


def make_trainer(
    folder: str,
    kind: str = "llama",
    num_groups: int = 2,
    sync_every: int | str = 2,
    seed: int = 0,
    callbacks: tuple[Any, ...] = (),
    trainer_class: type[Trainer] = Trainer,
    options: dict[str, Any] | None = None,
    rule: str | None = None,
    processing_class: Any = None,
    data: Any = None,
    **changes: Any,
) -> Trainer:
    """
    Args:
        folder (`str`):
            Output folder.
        kind (`str`, *optional*):
            See [`make_model`].
        num_groups (`int`, *optional*, defaults to 2):
            Federation groups.
        sync_every (`int` or `str`, *optional*, defaults to 2):
            Steps in a round.
        seed (`int`, *optional*, defaults to 0):
            Seed of the weights.
        callbacks (`tuple`, *optional*):
            More callbacks.
        trainer_class (`type`, *optional*):
            Class of the Trainer.
        options (`dict`, *optional*):
            More arguments of the Trainer.
        rule (`str`, *optional*):
            `optimizer_on_reshape`.
        processing_class (`Any`, *optional*):
            A tokenizer.
        data (`Any`, *optional*):
            In place of the samples that go with the kind.
        changes (`Any`):
            Arguments of `TrainingArguments`, or settings of the federation.

    Returns:
        `Trainer`: 10 steps in epochs of 6, saved every 4.
    """
    defaults: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 4,
        "max_steps": 10,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    settings = {name: changes.pop(name) for name in FederationConfig.names() if name in changes}
    samples = feature_samples(24) if kind == "batchnorm" else token_samples(24)
    return trainer_class(
        model=make_model(kind, seed),
        args=tiny_arguments(folder, **{**defaults, **changes}),
        train_dataset=ListDataset(samples) if data is None else data,
        eval_dataset=ListDataset(samples[:8]),
        data_collator=collate,
        processing_class=processing_class,
        callbacks=[
            FedAvgCallback(num_groups=num_groups, sync_every=sync_every, optimizer_on_reshape=rule, **settings),
            *(callback() if isinstance(callback, type) else callback for callback in callbacks),
        ],
        **(options or {}),
    )


def state_of(trainer: Trainer, full: bool = True) -> dict[str, Any]:
    """
    Everything with which a run goes on.

    Args:
        trainer (`Trainer`):
            After training.
        full (`bool`, *optional*, defaults to `True`):
            Whether whole tensors, gathered inside the group, or this rank's shards.

    Returns:
        `dict`: Weights and buffers, optimizer state by parameter, schedule, steps, rates of the next step.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, DTensor):
            return (value.full_tensor() if full else value.to_local()).detach().clone()
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    model: Any = trainer.model
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    from hf_fedshard.shards import reshard

    reshard(model)
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        "model": {name: plain(value) for name, value in model.state_dict().items()},
        "optimizer": {
            names[id(param)]: {key: plain(value) for key, value in state.items()}
            for param, state in optimizer.state.items()
        },
        "rates": [group["lr"] for group in optimizer.param_groups],
        "schedule": trainer.lr_scheduler.state_dict(),  # type: ignore[union-attr]
        "global_step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
    }


def train(folder: str, resume: Any = None, **options: Any) -> dict[str, Any]:
    """
    Trains.

    Args:
        folder (`str`):
            Output folder.
        resume (`Any`, *optional*):
            `resume_from_checkpoint`.
        options (`Any`):
            Of [`make_trainer`].

    Returns:
        `dict`: [`state_of`], and the batches that this rank drew.
    """
    forget_meshes()
    trainer = make_trainer(folder, **options)
    recorder = BatchRecorder(trainer.model)  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=resume)
    rounds = [row["fedshard/round"] for row in trainer.state.log_history if "fedshard/round" in row]
    result = {**state_of(trainer), "batches": recorder.batches, "rounds": rounds}
    dist.barrier()
    return result


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """
    Compares two nested structures bit by bit.

    Args:
        one (`Any`):
            Dictionaries, lists, tensors, numbers.
        other (`Any`):
            The same.
        where (`str`, *optional*):
            Prefix of the names.

    Returns:
        `list[str]`: Where they differ.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{where}/{key} only once" for key in set(one) ^ set(other)]
        return found + [
            line for key in one if key in other for line in differences(one[key], other[key], f"{where}/{key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)} against {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{where}[{index}]")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [where]
    return [] if one == other else [f"{where}: {one} against {other}"]


def checkpoints(folder: Path) -> list[str]:
    """
    Args:
        folder (`Path`):
            An output folder.

    Returns:
        `list[str]`: Names of its checkpoints and of anything left aside.
    """
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and "checkpoint-" in path.name)

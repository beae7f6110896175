"""The files of a checkpoint beside the weights that make it a model: configuration, generation configuration, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .checkpoint import model_tensors


def gather_adapters(model: Any) -> dict[str, torch.Tensor]:
    """
    The whole adapters of a PEFT model, on CPU: small, and worth a second copy in a form that PEFT can load. Collective
    over the group, whose ranks hold the shards.

    Args:
        model (`nn.Module`):
            The prepared model.

    Returns:
        `dict[str, torch.Tensor]`: By name; empty if it is no PEFT model.
    """
    if not getattr(model, "peft_config", None):
        return {}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
        for name, tensor in model_tensors(model).items()
    }


def write_model_files(model: Any, folder: Path, adapters: dict[str, torch.Tensor]) -> None:
    """
    Writes what [`export_checkpoint`] needs to know of a model, on one rank.

    Args:
        model (`nn.Module`):
            The prepared model.
        folder (`Path`):
            The checkpoint.
        adapters (`dict[str, torch.Tensor]`):
            From [`gather_adapters`].
    """
    if adapters:
        model.save_pretrained(str(folder), state_dict=adapters)
        return
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        # FSDP2 renames the class of what it shards.
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(str(folder))
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(str(folder))

"""Combinations that fail below this package, with or without it: refused at start, with the way out."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


_BITSANDBYTES = ("bnb", "8bit", "paged", "lion", "ademamix")
_TORCH_LOW_BIT = ("adamw_torch_8bit", "adamw_torch_4bit")
_OPTIMIZERS = "adamw_torch, adamw_torch_fused, adamw_torch_8bit (of torchao), adagrad, rmsprop or sgd"


def check_upstream_limits(state: AcceleratorState, optim: str, model: nn.Module | None) -> None:
    """
    Refuses what is known to fail in the tested versions, before it fails later and elsewhere.

    Args:
        state (`AcceleratorState`):
            Accelerate's state, FSDP2 in force.
        optim (`str`):
            `TrainingArguments.optim`.
        model (`nn.Module`, *optional*):
            The model, not prepared; `None` if it is not made yet.

    Raises:
        ValueError: The message names the setting, its value, and what is allowed.
    """
    plugin: Any = state.fsdp_plugin
    sizes: dict[str, Any] = state.parallelism_config._sizes if state.parallelism_config is not None else {}
    if state.device.type == "cpu":
        if plugin.cpu_offload and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
            raise ValueError(
                "fsdp_offload_params=True on CPU: the parameters are there already, and PyTorch pins memory for them, "
                "which needs an accelerator. Set fsdp_offload_params to false."
            )
        if sizes.get("cp", 1) > 1:
            raise ValueError(
                f"cp_size={sizes['cp']} on CPU: PyTorch's context parallel has no attention for CPU. Set cp_size to 1 "
                "there; on accelerators it may be larger."
            )
    if optim == "adafactor" or (optim not in _TORCH_LOW_BIT and any(part in optim for part in _BITSANDBYTES)):
        raise ValueError(
            f"optim={optim} cannot step parameters that FSDP2 has sharded: it has no rules for DTensors. Use "
            f"{_OPTIMIZERS}."
        )
    if model is not None:
        _check_model(model, sizes.get("tp", 1))
        _check_wrapping(model, plugin)


def _check_model(model: nn.Module, tp_size: int) -> None:
    if tp_size > 1 and any(isinstance(param, DTensor) for param in model.parameters()):
        module = importlib.import_module("transformers.integrations.tensor_parallel")
        if not hasattr(module, "ReplicateParallel"):
            raise ValueError(
                f"tp_size={tp_size}: this Accelerate prepares tensor parallel models with ReplicateParallel of "
                "Transformers, which the installed Transformers no longer has. Give a model that is not split "
                "(tp_size=1) and more dp_shard_size."
            )
    for name, param in model.named_parameters():
        if type(param).__name__ == "Int8Params":
            raise ValueError(
                f"load_in_8bit=True: FSDP2 replaces the parameter {name}, and bitsandbytes loses its scales with it. Load "
                "in 4 bit, load_in_4bit=True with bnb_4bit_quant_storage=torch.float32 (or bfloat16), or without "
                "quantisation."
            )
        if is_traceable_wrapper_subclass(param) and not isinstance(param, DTensor) and not _can_be_split(param):
            raise ValueError(
                f"FSDP2 cannot shard weights of the class {type(param.data).__name__} ({name}): they cannot be split. Load "
                "the base in 4 bit of bitsandbytes with bnb_4bit_quant_storage=torch.float32 (or bfloat16), or without "
                "quantisation."
            )


def _can_be_split(param: torch.Tensor) -> bool:
    try:
        torch.chunk(param.detach(), 2, dim=0)
    except NotImplementedError:
        return False
    return True


def _check_wrapping(model: nn.Module, plugin: Any) -> None:
    """Accelerate wraps by size whatever is large enough, and FSDP2 takes no module that has no `forward`."""
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    if getattr(policy, "__name__", "") != "size_based_auto_wrap_policy":
        return
    for name, module in model.named_modules():
        size = sum(param.numel() for param in module.parameters())
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and size > plugin.min_num_params:
            raise ValueError(
                f"fsdp_min_num_params={plugin.min_num_params} would shard {name}, a {type(module).__name__} of {size} "
                "parameters, as one unit, and FSDP2 takes no container without a forward. Use "
                "fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP, which shards layer by layer."
            )

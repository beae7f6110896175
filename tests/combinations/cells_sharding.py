"""Cells: precision, memory, how the model is wrapped, and axes inside a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.harness.data import ListDataset, token_samples
from tests.harness.models import tiny_llama

from .cell import Cell


def bf16_llama() -> nn.Module:
    return tiny_llama(dtype=torch.bfloat16)


def computes_in_bf16(trainer: Any) -> None:
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    seen: list[torch.dtype] = []
    handle = trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.no_grad():
        trainer.model(input_ids=torch.arange(3, 11)[None])
    handle.remove()
    assert seen == [torch.bfloat16]


def is_bf16(trainer: Any) -> None:
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}


def units(trainer: Any) -> set[str]:
    """Names of the classes that FSDP2 has wrapped one by one, `fully_shard([...])` of several not counted."""
    return {type(module).__mro__[2].__name__ for module in trainer.model.modules() if isinstance(module, FSDPModule)}


def layers_are_wrapped(trainer: Any) -> None:
    assert "LlamaDecoderLayer" in units(trainer)
    assert layer_reshards(trainer)


def layer_reshards(trainer: Any) -> bool:
    state = trainer.model.model.layers[0]._get_fsdp_state()
    return state._fsdp_param_group.post_forward_mesh_info is not None


def layers_stay_gathered(trainer: Any) -> None:
    assert not layer_reshards(trainer)


def no_layer_is_wrapped(trainer: Any) -> None:
    assert "LlamaDecoderLayer" not in units(trainer)


def fsdp_recomputes(trainer: Any) -> None:
    assert any(isinstance(module, CheckpointWrapper) for module in trainer.model.modules())


def trainer_recomputes(trainer: Any) -> None:
    assert trainer.model.is_gradient_checkpointing


def is_compiled(trainer: Any) -> None:
    from torch._dynamo.utils import counters

    assert hasattr(trainer.model_wrapped, "_orig_mod") or hasattr(trainer.model, "_orig_mod")
    assert counters["stats"]["unique_graphs"] > 0


def long_samples() -> Any:
    # The length must divide by twice the context parallel size.
    return ListDataset(token_samples(240, length=16, uneven=False))


def tensor_parallel_llama() -> nn.Module:
    """Split by PyTorch's own functions, as Accelerate's guide has it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    plan = {"up_proj": ColwiseParallel(), "gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    model = tiny_llama()
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, plan)
    return model


SHARDING_CELLS = [
    Cell("plain", "`reshard_after_forward: true` (ZeRO-3)", check=layers_are_wrapped),
    Cell(
        "reshard_after_forward off",
        "`fsdp_reshard_after_forward: false` (ZeRO-2)",
        launch={"reshard_after_forward": False},
        check=layers_stay_gathered,
    ),
    Cell("bf16 mixed precision", "`bf16=True`", {"bf16": True}, check=computes_in_bf16, fast=True),
    Cell(
        "fp16 mixed precision on CPU",
        "`fp16=True`",
        launch={"mixed_precision": "fp16"},
        error="mixed_precision=fp16 on CPU gets neither autocast nor a gradient scaler from Accelerate. Use bf16",
        limit="without the callback it computes in fp16 with neither autocast nor a scaler",
    ),
    Cell(
        "fp32 master weights of a bf16 model",
        "a model loaded with `dtype=torch.bfloat16`, `bf16=True`",
        {"bf16": True},
        model=bf16_llama,
        check=computes_in_bf16,
        limit="Accelerate keeps what trains in fp32",
    ),
    Cell(
        "bf16 throughout",
        "a model loaded with `dtype=torch.bfloat16`",
        model=bf16_llama,
        check=is_bf16,
        limit="averaged in fp32, then rounded",
    ),
    Cell(
        "gradient accumulation",
        "`gradient_accumulation_steps=3`",
        {"gradient_accumulation_steps": 3},
    ),
    Cell(
        "gradient checkpointing of Trainer",
        "`gradient_checkpointing=True`",
        {"gradient_checkpointing": True},
        check=trainer_recomputes,
    ),
    Cell(
        "activation checkpointing of FSDP",
        "`fsdp_activation_checkpointing: true`",
        launch={"activation_checkpointing": True},
        check=fsdp_recomputes,
    ),
    Cell(
        "CPU offload on CPU",
        "`fsdp_offload_params: true`",
        launch={"offload_params": True},
        error="fsdp_offload_params=True on CPU",
        stock_error="Cannot access accelerator device when none is available",
        limit="PyTorch pins memory for it, which needs an accelerator",
    ),
    Cell(
        "torch.compile",
        "`torch_compile=True`, `torch_compile_backend='aot_eager'`",
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        check=is_compiled,
    ),
    Cell(
        "torch.compile with inductor",
        "`torch_compile=True`",
        {"torch_compile": True},
        check=is_compiled,
        limit="tried with FL+FSDP only: eight processes compile for minutes",
        sizes=(4,),
    ),
    Cell(
        "wrap by size",
        "`fsdp_auto_wrap_policy: SIZE_BASED_WRAP`",
        launch={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2500, "wrap_cls": None},
        error="fsdp_min_num_params=2500 would shard model.layers, a ModuleList",
        stock_error="fully_shard does not support containers that do not implement forward",
        limit="FSDP2 shards no `ModuleList`, and Accelerate asks for it where one has more parameters than the limit",
    ),
    Cell(
        "wrap by size, above the layers",
        "`SIZE_BASED_WRAP`, `fsdp_min_num_params` above that of all layers",
        launch={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10**6, "wrap_cls": None},
        check=no_layer_is_wrapped,
    ),
    Cell("no wrap", "`fsdp_auto_wrap_policy: NO_WRAP`", launch={"wrap_cls": None}, check=no_layer_is_wrapped),
    Cell(
        "cpu_ram_efficient_loading",
        "`fsdp_cpu_ram_efficient_loading: true`",
        launch={"cpu_ram_efficient_loading": True},
    ),
    Cell(
        "context parallel on CPU",
        "`cp_size: 2` inside a group",
        inner={"cp": 2},
        data=long_samples,
        error="cp_size=2 on CPU",
        stock_error="_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy",
        limit="PyTorch's context parallel has no attention for CPU",
        sizes=(8, 16),
    ),
    Cell(
        "tensor parallel",
        "`tp_size: 2` inside a group",
        inner={"tp": 2},
        model=tensor_parallel_llama,
        error="tp_size=2",
        stock_error="cannot import name 'ReplicateParallel'",
        limit="Accelerate 1.15 prepares it with a class that Transformers 5.24 no longer has",
        sizes=(8, 16),
    ),
    Cell(
        "sequence parallel",
        "`sp_size: 2` inside a group",
        inner={"sp": 2},
        error="sp_size=2 is not supported: it belongs to DeepSpeed",
        stock_error="No module named 'deepspeed'",
        limit="Accelerate has it with DeepSpeed only",
        sizes=(8, 16),
    ),
]

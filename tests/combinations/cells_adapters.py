"""Cells: adapters, on bases of several precisions."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.harness.models import add_lora, tiny_llama

from .cell import Cell
from .cells_models import seeded


def peft_model(config: Any, base: Any = tiny_llama) -> nn.Module:
    from peft import get_peft_model

    return seeded(lambda: get_peft_model(base(), config))


def lora_config(**options: Any) -> Any:
    from peft import LoraConfig

    targets = ["q_proj", "v_proj"]
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        | options
    )


def lora() -> nn.Module:
    return add_lora(tiny_llama())


def bf16_lora() -> nn.Module:
    return peft_model(lora_config(), lambda: tiny_llama(dtype=torch.bfloat16))


def dora() -> nn.Module:
    return peft_model(lora_config(use_dora=True))


def lora_and_head() -> nn.Module:
    return peft_model(lora_config(modules_to_save=["lm_head"]))


def prompt_tuning() -> nn.Module:
    from peft import PromptTuningConfig

    return peft_model(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def only_adapters_train(trainer: Any) -> None:
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name or "modules_to_save" in name or "prompt" in name for name in trained)


def bf16_base_fp32_adapters(trainer: Any) -> None:
    only_adapters_train(trainer)
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in trainer.model.parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}


def torchao_lora() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def base() -> nn.Module:
        model = tiny_llama()
        quantize_(model.model, Int8WeightOnlyConfig())
        return model

    return peft_model(lora_config(), base)


def bnb_lora(bits: int, storage: torch.dtype = torch.float32) -> nn.Module:
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    config = (
        BitsAndBytesConfig(load_in_8bit=True)
        if bits == 8
        else BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_storage=storage
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(hidden_size=64).save_pretrained(folder)
        return peft_model(
            lora_config(),
            lambda: LlamaForCausalLM.from_pretrained(
                folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
            ),
        )


def bnb4_lora() -> nn.Module:
    return bnb_lora(4)


def bnb4_whole_lora() -> nn.Module:
    return bnb_lora(4, torch.uint8)


def bnb8_lora() -> nn.Module:
    return bnb_lora(8)


def quanto_lora() -> nn.Module:
    from optimum.quanto import freeze, qint8, quantize

    def base() -> nn.Module:
        model = tiny_llama()
        quantize(model.model, weights=qint8)
        freeze(model.model)
        return model

    return peft_model(lora_config(), base)


def base_has_4_bits(trainer: Any) -> None:
    only_adapters_train(trainer)
    base = trainer.model.base_model.model.model.layers[0].mlp.up_proj
    assert base.weight.numel() * base.weight.element_size() * 2 == base.in_features * base.out_features


def base_is_whole(trainer: Any) -> None:
    base_has_4_bits(trainer)
    base = trainer.model.base_model.model.model.layers[0].mlp.up_proj
    assert not isinstance(base.weight, DTensor)


def base_is_restored(trainer: Any) -> None:
    only_adapters_train(trainer)
    base = trainer.model.base_model.model.model.layers[0].mlp.up_proj
    assert type(base).__name__ == "QLinear"
    assert type(base.weight.to_local()) is torch.Tensor
    assert base.weight.dtype == torch.float32


ADAPTER_CELLS = [
    Cell("LoRA", "`get_peft_model(model, LoraConfig(...))`", model=lora, check=only_adapters_train, fast=True),
    Cell(
        "LoRA on a bf16 base",
        "the base loaded with `dtype=torch.bfloat16`, `bf16=True`",
        {"bf16": True},
        model=bf16_lora,
        check=bf16_base_fp32_adapters,
    ),
    Cell("LoRA and a trained head", "`modules_to_save`", model=lora_and_head, check=only_adapters_train),
    Cell("DoRA", "`LoraConfig(use_dora=True)`", model=dora, check=only_adapters_train),
    Cell(
        "prompt tuning", "`PromptTuningConfig`", {"learning_rate": 0.3}, model=prompt_tuning, check=only_adapters_train
    ),
    Cell(
        "LoRA on int8 of torchao",
        "`Int8WeightOnlyConfig`",
        model=torchao_lora,
        needs=("torchao",),
        error="FSDP2 cannot shard weights of the class Int8Tensor",
        stock_error="Int8Tensor dispatch: attempting to run unimplemented operator",
        limit="the class cannot be split",
    ),
    Cell(
        "LoRA on 4 bit of bitsandbytes",
        "`load_in_4bit=True`, `bnb_4bit_quant_storage` of a floating-point type",
        model=bnb4_lora,
        check=base_has_4_bits,
        needs=("bitsandbytes",),
    ),
    Cell(
        "LoRA on 4 bit of bitsandbytes, not sharded",
        "`load_in_4bit=True` and nothing else",
        model=bnb4_whole_lora,
        check=base_is_whole,
        needs=("bitsandbytes",),
        limit="Accelerate leaves such a base whole on each rank",
    ),
    Cell(
        "LoRA on 8 bit of bitsandbytes",
        "`load_in_8bit=True`",
        model=bnb8_lora,
        needs=("bitsandbytes",),
        error="load_in_8bit=True",
        stock_error="'Parameter' object has no attribute 'CB'",
        limit="FSDP2 replaces the parameters, and bitsandbytes loses its scales with them",
    ),
    Cell(
        "LoRA on int8 of quanto",
        "`quantize(weights=qint8)`",
        model=quanto_lora,
        check=base_is_restored,
        needs=("optimum",),
        limit="FSDP2 splits it by turning it back into fp32, so no memory is saved",
    ),
]

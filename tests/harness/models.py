"""Tiny models: small enough that a step costs milliseconds, real enough that every mechanism is exercised."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_fedshard.shards import reshard


VOCAB_SIZE = 96
NUM_FEATURES = 8
NUM_CLASSES = 4


def tiny_llama(
    tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, num_layers: int = 2, hidden_size: int = 32
) -> nn.Module:
    """
    A randomly initialised `LlamaForCausalLM`.

    Args:
        tied (`bool`, *optional*, defaults to `False`):
            Whether input and output embeddings are one parameter.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Type of the parameters.
        seed (`int`, *optional*, defaults to 0):
            Seed of the weights. The caller's random state is left alone.
        num_layers (`int`, *optional*, defaults to 2):
            Decoder layers.
        hidden_size (`int`, *optional*, defaults to 32):
            Hidden size.

    Returns:
        `torch.nn.Module`: The model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(config)
        return model.to(dtype)


class TinyBatchNorm(nn.Module):
    """
    A classifier with batch normalisation: its running statistics are buffers which every rank updates alone.

    Args:
        width (`int`, *optional*, defaults to 16):
            Hidden size.
    """

    # Trainer passes token counts to models that take keyword arguments; the loss of this one is a plain mean.
    accepts_loss_kwargs = False
    _no_split_modules = ["TinyBlock"]

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TinyBlock(NUM_FEATURES, width), TinyBlock(width, width)])
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """
        Args:
            inputs (`torch.Tensor` of shape `(batch, 8)`):
                Features.
            labels (`torch.Tensor` of shape `(batch,)`, *optional*):
                Classes.

        Returns:
            `dict[str, torch.Tensor]`: `logits`, and `loss` if there are labels.
        """
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class TinyBlock(nn.Module):
    """
    Linear, batch normalisation, ReLU.

    Args:
        num_inputs (`int`):
            Input features.
        num_outputs (`int`):
            Output features.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)
        self.norm = nn.BatchNorm1d(num_outputs)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(batch, num_inputs)`):
                Input.

        Returns:
            `torch.Tensor` of shape `(batch, num_outputs)`: Output.
        """
        return torch.relu(self.norm(self.linear(hidden)))


def tiny_batchnorm(dtype: torch.dtype = torch.float32, seed: int = 0) -> TinyBatchNorm:
    """
    A [`TinyBatchNorm`] with weights of a fixed seed.

    Args:
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Type of the parameters.
        seed (`int`, *optional*, defaults to 0):
            Seed of the weights.

    Returns:
        `TinyBatchNorm`: The model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyBatchNorm().to(dtype)


def add_lora(model: nn.Module, rank: int = 4, seed: int = 0) -> nn.Module:
    """
    Wraps a tiny Llama with LoRA adapters on two projections of its attention.

    Args:
        model (`torch.nn.Module`):
            The base model, frozen by this.
        rank (`int`, *optional*, defaults to 4):
            Rank of the adapters.
        seed (`int`, *optional*, defaults to 0):
            Seed of the adapters. Both factors are random, or half of the gradients would be zero in the first step.

    Returns:
        `torch.nn.Module`: The PEFT model.
    """
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, config)


def shard_layers(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """
    Applies FSDP2 to each decoder layer and to the root, as Accelerate does for a Llama.

    Args:
        model (`torch.nn.Module`):
            A [`tiny_llama`]; changed in place.
        mesh (`DeviceMesh`):
            One axis for FSDP, two for HSDP.

    Returns:
        `torch.nn.Module`: The model.
    """
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """
    Args:
        model (`torch.nn.Module`):
            A sharded model.

    Returns:
        `dict[str, torch.Tensor]`: Parameters as this rank's replica holds them, and this rank's persistent buffers.
    """
    reshard(model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in named.items()
    }

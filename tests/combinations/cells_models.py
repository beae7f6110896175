"""Cells: kinds of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.harness.models import VOCAB_SIZE, tiny_llama

from .cell import NUM_GROUPS, Cell


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = make()
        return model


def mixtral(balanced: bool = False) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=balanced,
        max_position_embeddings=64,
        use_cache=False,
    )
    return seeded(lambda: MixtralForCausalLM(config))


def balanced_mixtral() -> nn.Module:
    return mixtral(balanced=True)


def weigh_balance_as_the_whole_launch(trainer: Any) -> None:
    # Trainer multiplies the loss by the number of processes to undo FSDP's mean. What is divided by the tokens of all
    # processes comes out right; the router's loss counts as often as there are processes, of all groups here.
    trainer.model.router_aux_loss_coef *= NUM_GROUPS


def tied() -> nn.Module:
    return tiny_llama(tied=True)


def is_tied(trainer: Any) -> None:
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight


def frozen() -> nn.Module:
    model = tiny_llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def frozen_are_untouched(trainer: Any) -> None:
    for (name, before), after in zip(tiny_llama().named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(before, after.full_tensor()) == (not after.requires_grad), name


def dropout() -> nn.Module:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
        layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(0.2))
    return model


MODEL_CELLS = [
    Cell("mixture of experts", "Mixtral", launch={"wrap_cls": "MixtralDecoderLayer"}, model=mixtral),
    Cell(
        "mixture of experts, balanced",
        "`output_router_logits=True`",
        launch={"wrap_cls": "MixtralDecoderLayer"},
        model=balanced_mixtral,
        mend=weigh_balance_as_the_whole_launch,
        limit="Trainer weighs the router's loss by the number of processes, as without the callback",
    ),
    Cell("tied embeddings", "`tie_word_embeddings: true`", model=tied, check=is_tied),
    Cell("frozen layers", "`requires_grad_(False)`", model=frozen, check=frozen_are_untouched),
    Cell("dropout", "dropout in the model", model=dropout),
    Cell("NEFTune", "`neftune_noise_alpha=5`", {"neftune_noise_alpha": 5.0}),
]

"""Folders as users have them: tiny models with their tokenizers, and texts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


WORDS = [
    "the",
    "people",
    "of",
    "this",
    "union",
    "have",
    "in",
    "all",
    "years",
    "asked",
    "their",
    "congress",
    "for",
    "peace",
    "and",
    "fair",
    "roads",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(folder: Path, kind: str = "llama", num_labels: int = 2) -> Path:
    """
    Saves a model of 2 layers with random weights, and a byte tokenizer that fits it.

    Args:
        folder (`Path`):
            Where to.
        kind (`str`, *optional*, defaults to `"llama"`):
            `"llama"`, a causal language model with a chat template, or `"bert"` or `"distilbert"`, masked ones.
        num_labels (`int`, *optional*, defaults to 2):
            Classes that the configuration names.

    Returns:
        `Path`: The folder.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        DistilBertConfig,
        DistilBertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        set_seed,
    )

    special = ["<pad>", "<s>", "</s>", "<mask>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[], unk_token="<unk>")
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "mask_token", "unk_token"), special, strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, model_max_length=128, sep_token="</s>", cls_token="<s>", **names
    )
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_labels": num_labels,
    }
    set_seed(0)
    torch.set_num_threads(1)
    if kind == "distilbert":
        model: Any = DistilBertForMaskedLM(DistilBertConfig(dim=32, hidden_dim=64, n_layers=2, n_heads=2, **sizes))
    elif kind == "bert":
        model = BertForMaskedLM(BertConfig(**sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **sizes))
        tokenizer.chat_template = CHAT_TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sentences(number: int, seed: int = 0, length: int = 12) -> list[str]:
    """
    Args:
        number (`int`):
            How many.
        seed (`int`, *optional*, defaults to 0):
            Seed.
        length (`int`, *optional*, defaults to 12):
            Words in each.

    Returns:
        `list[str]`: Random sentences.
    """
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=length)) for _ in range(number)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """
    Args:
        path (`Path`):
            A `.jsonl` file.
        rows (`list[dict[str, Any]]`):
            Its lines.

    Returns:
        `Path`: The file.
    """
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

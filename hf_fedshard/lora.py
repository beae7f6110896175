"""
Low-rank adapters, and how they may be averaged. The mean of the factors is not the factor of the mean: `mean(B) mean(A)`
differs from `mean(B A)` by the covariance of the two over the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .selection import Selection, plain_name


LORA_RULES = ("factors", "product", "freeze_a")


def adapter_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """
    The factors A and B of each adapter, by PEFT's names.

    Args:
        names (`Iterable[str]`):
            Names of parameters.

    Returns:
        `list[tuple[str, str]]`: Names of A and B, in the order of the model.
    """
    names = list(names)
    known = set(names)
    pairs = []
    for name in names:
        parts = name.split(".")
        kinds = [index for index, part in enumerate(parts) if part in ("lora_A", "lora_embedding_A")]
        if kinds:
            parts[kinds[-1]] = parts[kinds[-1]][:-1] + "B"
            if ".".join(parts) in known:
                pairs.append((name, ".".join(parts)))
    return pairs


def freeze_first_factors(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[], None]:
    """
    Freezes the factor A of every adapter (FFA-LoRA, arXiv 2403.12313): with one A in all groups the mean of the products
    is the product of the means. A is what it was initialised to, so B alone is trained.

    Args:
        model (`nn.Module`):
            The prepared model.
        optimizers (`Iterable[torch.optim.Optimizer]`):
            The inner optimizers, which may have been made for both factors.

    Returns:
        `Callable[[], None]`: To be called when it is over: A trains again, if it did.
    """
    parameters = dict(model.named_parameters())
    firsts = [parameters[first] for first, _ in adapter_pairs(parameters)]
    trained = [param for param in firsts if param.requires_grad]
    frozen = {id(param.requires_grad_(False)) for param in firsts}

    def drop_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # FSDP2 goes on reducing gradients of what trained in an earlier forward, an evaluation say.
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in frozen:
                    param.grad = None

    handles = [optimizer.register_step_pre_hook(drop_gradients) for optimizer in optimizers]

    def remove() -> None:
        for handle in handles:
            handle.remove()
        for param in trained:
            param.requires_grad_(True)

    return remove


def trained_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """
    The adapters of a model that train, as [`adapter_pairs`].

    Args:
        model (`nn.Module`):
            The prepared model.

    Raises:
        ValueError: If there is none, or one that is no pair of matrices.
    """
    parameters = dict(model.named_parameters())
    pairs = [pair for pair in adapter_pairs(parameters) if any(parameters[name].requires_grad for name in pair)]
    if not pairs:
        raise ValueError(
            "lora_average is set, but the model has no LoRA adapter that trains (parameters lora_A and lora_B). Add one "
            "with peft before preparing the model, or leave lora_average at 'factors'."
        )
    for pair in pairs:
        for name in pair:
            if parameters[name].ndim != 2:
                raise ValueError(
                    f"lora_average takes adapters of matrices, but {plain_name(name)} has the shape "
                    f"{tuple(parameters[name].shape)}. Leave lora_average at 'factors'."
                )
    return pairs


def check_adapters(model: nn.Module, rule: str, selection: Selection) -> None:
    """
    Refuses a rule that the adapters of a model do not allow.

    Args:
        model (`nn.Module`):
            The prepared model.
        rule (`str`):
            `lora_average`.
        selection ([`Selection`]):
            What is averaged.

    Raises:
        ValueError: As [`trained_pairs`] and [`product_pairs`].
    """
    if rule == "product":
        product_pairs(model, selection)
    elif rule != "factors":
        trained_pairs(model)


def product_pairs(model: nn.Module, selection: Selection) -> list[tuple[str, str]]:
    """
    The adapters whose products are averaged, as [`adapter_pairs`].

    Args:
        model (`nn.Module`):
            The prepared model.
        selection ([`Selection`]):
            What is averaged.

    Raises:
        ValueError: If there is no adapter that trains, or of one a single factor is averaged.
    """
    averaged = []
    for pair in trained_pairs(model):
        chosen = [selection.is_averaged(name) for name in pair]
        if any(chosen) and not all(chosen):
            alone, other = (plain_name(pair[chosen.index(value)]) for value in (True, False))
            raise ValueError(
                f"lora_average='product' averages both factors of an adapter, but of {alone} and {other} only the first is "
                "averaged (include_parameters, exclude_parameters, local_parameters). Name both, or neither."
            )
        averaged += [pair] if all(chosen) else []
    return averaged

"""
Averages of low-rank adapters. The mean of the factors is not the factor of the mean: `mean(B) mean(A)` differs from
`mean(B A)` by the covariance of the two over the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from .mesh import Peers
from .selection import plain_name
from .shards import as_sharded


LORA_RULES = ("factors", "product", "freeze_a")
# Beyond it the factor A of the mean product is too near to singular to be kept.
_MAX_CONDITION = 1e4


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
        `Callable[[], None]`: To be called when it is over.
    """
    parameters = dict(model.named_parameters())
    frozen = {id(parameters[first].requires_grad_(False)) for first, _ in adapter_pairs(parameters)}

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


def refactor(
    first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], shares: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """
    The best factors of the mean product: of all pairs of this rank, the one nearest to `sum share B A`.

    The product of `m` by `n` is never formed: it is the product of `m` by `G r` and `G r` by `n`, of which QR
    decompositions leave a matrix of `G r` by `G r`. Of the many pairs with one product that is taken whose A is nearest
    to the mean of the groups' A: where they share one A, it stays as it is, B is the mean of theirs, and the inner
    optimizer's moments keep their meaning as far as they can.

    Args:
        first (`Sequence[torch.Tensor]`):
            A of each group, of shape `(r, n)`, float64.
        second (`Sequence[torch.Tensor]`):
            B of each group, of shape `(m, r)`, float64.
        shares (`Sequence[float]`):
            Of each group in the mean; their sum is 1.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, float]`: A, B, and the distance of their product from the mean product, relative
        to its norm: what no adapter of this rank can hold.
    """
    rank = first[0].shape[0]
    mean_first = sum(share * a for share, a in zip(shares, first, strict=True))
    mean_second = sum(share * b for share, b in zip(shares, second, strict=True))
    assert isinstance(mean_first, torch.Tensor) and isinstance(mean_second, torch.Tensor)
    tall = torch.cat([share * b for share, b in zip(shares, second, strict=True)], dim=1)
    left, inner = torch.linalg.qr(tall)
    right, outer = torch.linalg.qr(torch.cat(list(first)).T)
    u, values, vh = torch.linalg.svd(inner @ outer.T)
    norm = float(values.norm())
    if norm == 0:  # no adapter has moved from B = 0
        return mean_first, mean_second, 0.0
    error = float(values[rank:].norm()) / norm
    left, values, right = left @ u[:, :rank], values[:rank], right @ vh[:rank].T
    basis = mean_first @ right
    if float(torch.linalg.cond(basis)) <= _MAX_CONDITION:
        return basis @ right.T, torch.linalg.solve(basis.T, (left * values).T).T, error
    root = values.sqrt()
    return root[:, None] * right.T, left * root, error


def average_products(
    pairs: Sequence[tuple[str, str]],
    shards: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    gather: Callable[[Mapping[str, torch.Tensor]], None],
    weights: Sequence[float],
    mesh: Peers,
) -> tuple[float, float, float]:
    """
    Replaces adapters by factors of the mean of their products. All ranks compute the same factors from the same numbers,
    in float64.

    Args:
        pairs (`Sequence[tuple[str, str]]`):
            Names of A and B.
        shards (`Mapping[str, torch.Tensor]`):
            This rank's shards, written in place.
        parameters (`Mapping[str, torch.Tensor]`):
            The parameters, which say how they are sharded.
        gather (`Callable`):
            Sums tensors over the groups, in place. Collective over the world; after it, the factors of each group are put
            together by collectives inside this group, for one adapter after the other, the same on all ranks.
        weights (`Sequence[float]`):
            Of each group.
        mesh ([`Peers`]):
            The federation.

    Returns:
        `tuple[float, float, float]`: Squared distance of this rank's shards from the result, squared norm of the result,
        and the largest relative error of [`refactor`].
    """
    groups, total = mesh.layout.num_groups, sum(weights)
    # Each group fills a place of its own in zeros, so that the sum holds all of them, unchanged.
    tables = {}
    for name in (name for pair in pairs for name in pair):
        table = shards[name].new_zeros((groups, *shards[name].shape))
        if weights[mesh.group_index]:
            table[mesh.group_index] = shards[name]
        tables[name] = table
    gather(tables)
    shares = [weight / total for weight in weights]
    drift = norm = worst = 0.0
    for pair in pairs:
        factors = [
            [_whole(tables[name][group], parameters[name]).double() for group in range(groups) if weights[group]]
            for name in pair
        ]
        *found, error = refactor(factors[0], factors[1], [share for share in shares if share])
        worst = max(worst, error)
        for name, value in zip(pair, found, strict=True):
            own = _part(value, parameters[name])
            if weights[mesh.group_index]:
                drift += float((shards[name].double() - own).square().sum())
            norm += float(own.square().sum())
            shards[name].copy_(own)
    return drift, norm, worst


def _whole(shard: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return as_sharded(shard, param).full_tensor() if isinstance(param, DTensor) else shard


def _part(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's shard of what all ranks of the group hold."""
    if not isinstance(param, DTensor):
        return value
    replicated = [Replicate()] * param.device_mesh.ndim
    held_by_all = DTensor.from_local(value, param.device_mesh, replicated, run_check=False)
    return held_by_all.redistribute(placements=param.placements).to_local()

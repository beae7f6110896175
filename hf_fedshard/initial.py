"""One model to start from: broadcast of group 0's weights and buffers, and proof that all ranks hold them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .collectives import all_reduce, broadcast_from_first
from .config import FederationConfig
from .handshake import FederationMismatchError, agree
from .lora import check_adapters
from .mesh import FederationMesh
from .peers import Peers
from .selection import Selection
from .shards import check_trainable_parameters, local_shards, replicated_tensors, reshard
from .tensors import from_wire, to_wire


# Bytes that are checksummed at once: small tensors together, large ones in parts. Whole words.
_CHECKSUM_CHUNK = 2**22


def agree_on_model(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: FederationMesh, config: FederationConfig
) -> None:
    """
    The handshake about what is averaged: settings, and name, shape, dtype and role of every parameter and buffer.
    Collective over the world.

    Args:
        model (`nn.Module`):
            The prepared model, resharded.
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        mesh ([`FederationMesh`]):
            The federation.
        config ([`FederationConfig`]):
            Its settings.

    Raises:
        FederationMismatchError: On every rank, if anything differs between ranks.
        ValueError: On every rank, if the model of any cannot be federated.
    """
    error = None
    try:
        check_trainable_parameters(model)
        selection = Selection(config)
        selection.check(model)
        check_adapters(model, config.lora_average, selection)
        for optimizer in optimizers:
            _check_optimizer(optimizer)
        if mesh.layout.num_groups > 1:
            _check_is_stepped(model, optimizers, config, selection)
    except ValueError as problem:
        error = str(problem)
    described = [
        (name, tuple(param.shape), str(param.dtype), param.requires_grad) for name, param in model.named_parameters()
    ]
    described += [(name, tuple(buffer.shape), str(buffer.dtype), False) for name, buffer in model.named_buffers()]
    values = {**config.comparable(), "layout": str(mesh.layout), "number of parameters and buffers": len(described)}
    agree("the federated model", values, error)
    digest = zlib.crc32(repr(described).encode())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        # All ranks have the same digests and so take this way together; only here is the whole list worth sending.
        agree("the federated model", {name: rest for name, *rest in described})


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ValueError(
            f"{type(optimizer).__name__} swaps the model's weights with a copy of its own between train() and eval(). The "
            "copy would not be averaged, so the groups would hold different models. Use an optimizer that keeps the "
            "weights in the model, such as AdamW."
        )


def _check_is_stepped(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: FederationConfig, selection: Selection
) -> None:
    """Settings that concern the inner optimizers do nothing where none of those that were handed over steps what is averaged."""
    asked = {
        f"proximal_mu={config.proximal_mu}": config.proximal_mu > 0,
        f"inner_moments={config.inner_moments!r}": config.inner_moments != "keep",
        f"sync_steps_at_end={config.sync_steps_at_end}": config.sync_steps_at_end > 0,
    }
    stepped = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    averaged = [
        param for name, param in model.named_parameters() if param.requires_grad and selection.is_averaged(name)
    ]
    if any(asked.values()) and not any(id(param) in stepped for param in averaged):
        raise ValueError(
            f"{', '.join(name for name, given in asked.items() if given)} needs the inner optimizer, but "
            + (
                "none of those that were given steps a parameter that is averaged"
                if optimizers
                else "none was given and accelerator.prepare has seen none"
            )
            + ". Hand it over: `plugin.federate(accelerator, model, optimizer)`."
        )


def broadcast_initial_state(model: nn.Module, mesh: FederationMesh) -> None:
    """
    Gives every group the weights of group 0, replica 0, and every rank the buffers of rank 0, then verifies it.

    Without it unequal seeds make each rank's shard a different model, even inside a group.

    Collective over the world. Order on each rank: slow tier first (only replica 0 of each group takes part, so that
    the weights cross it once), then the replicas of the group, then what every rank holds whole: inside the group from
    its first rank, which has it from group 0.

    Args:
        model (`nn.Module`):
            The prepared model.
        mesh ([`FederationMesh`]):
            The federation.

    Raises:
        FederationMismatchError: If the ranks that hold the same shard do not hold the same bits afterwards.
    """
    reshard(model)
    shards = local_shards(model)
    for tensor in shards.values():
        wire = to_wire(tensor, mesh.device)
        if mesh.replicate_index == 0:
            dist.broadcast(wire, group_src=0, group=mesh.fed)
        if mesh.replicate is not None:
            dist.broadcast(wire, group_src=0, group=mesh.replicate)
        from_wire(tensor, wire)
    whole = replicated_tensors(model)
    for tensor in whole.values():
        wire = to_wire(tensor, mesh.device)
        broadcast_from_first(wire, mesh.fed, mesh.group)
        from_wire(tensor, wire)
    verify_one_model(shards, whole, mesh)


def verify_one_model(
    shards: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], mesh: FederationMesh
) -> None:
    """
    Compares checksums between all ranks that should hold the same bits.

    Args:
        shards (`Mapping[str, torch.Tensor]`):
            Local shards: equal over groups and replicas.
        whole (`Mapping[str, torch.Tensor]`):
            Tensors that are equal on every rank.
        mesh ([`FederationMesh`]):
            The federation.

    Raises:
        FederationMismatchError: On every rank, if a checksum differs anywhere.
    """
    if _differences(shards, whole, mesh):
        raise FederationMismatchError(
            "The federation groups do not hold one model: parameters or buffers differ between ranks that must hold the "
            "same bits. Nothing may write to the model between preparing it and the first step on some ranks only."
        )


def hold_the_same_bits(several: Sequence[Mapping[str, torch.Tensor]], mesh: Peers) -> bool:
    """
    Whether local shards are equal, bit for bit, over groups and replicas. Collective over the world.

    Args:
        several (`Sequence[Mapping[str, torch.Tensor]]`):
            Tensors sharded as the parameters are.
        mesh ([`Peers`]):
            The federation.
    """
    # Every rank gets the same answer for each of them, and so all stop after the same one.
    return not any(_differences(tensors, {}, mesh) for tensors in several)


def _differences(shards: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], mesh: Peers) -> int:
    differing = torch.zeros((), dtype=torch.int64, device=mesh.device)
    replicas = () if mesh.replicate is None else (mesh.replicate,)
    for tensors, groups in ((shards, (mesh.fed, *replicas)), (whole, (mesh.fed, mesh.group))):
        own = checksum(tensors, mesh.device)
        for group in groups:
            low, high = own.clone(), own.clone()
            all_reduce(low, group, "min")
            all_reduce(high, group, "max")
            differing += (low != high).sum()
    all_reduce(differing, mesh.group)
    all_reduce(differing, mesh.fed)
    return int(differing)


def checksum(tensors: Mapping[str, torch.Tensor], device: torch.device, non_blocking: bool = False) -> torch.Tensor:
    """
    A checksum of all bits, without communication.

    Args:
        tensors (`Mapping[str, torch.Tensor]`):
            In an order that is the same wherever checksums are compared.
        device (`torch.device`):
            Where it is computed; tensors elsewhere are copied there one after the other.
        non_blocking (`bool`, defaults to `False`):
            Whether copies from pinned host memory are not waited for. The host must not write to it until the checksum is read.

    Returns:
        `torch.Tensor`: Two int64 on the device, not waited for: the sum of all words of 8 bytes, and their sum weighted by
        where they stand. Integers wrap around.
    """
    plain = torch.zeros((), dtype=torch.int64, device=device)
    placed = torch.zeros((), dtype=torch.int64, device=device)
    position = 0
    for words in _words(tensors.values(), device, non_blocking):
        places = torch.arange(position, position + words.numel(), device=device)
        plain += words.sum()
        placed += (words * (2 * places + 1)).sum()
        position += words.numel()
    return torch.stack([plain, placed])


def _words(tensors: Iterable[torch.Tensor], device: torch.device, non_blocking: bool) -> Iterator[torch.Tensor]:
    """All bytes as words of 8, chunk by chunk. A model has many small tensors: each by itself would be a dozen kernels."""
    waiting: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        for part in to_wire(tensor, device, non_blocking).reshape(-1).view(torch.uint8).split(_CHECKSUM_CHUNK):
            if num_bytes + part.numel() > _CHECKSUM_CHUNK:
                yield _as_words(waiting)
                waiting, num_bytes = [], 0
            waiting.append(part)
            num_bytes += part.numel()
    if num_bytes:
        yield _as_words(waiting)


def _as_words(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    padding = torch.zeros(-sum(part.numel() for part in parts) % 8, dtype=torch.uint8, device=parts[0].device)
    # In memory of its own, which is aligned to words.
    return torch.cat([*parts, padding]).view(torch.int64)

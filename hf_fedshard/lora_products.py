"""
The mean of the products of low-rank adapters, factored again: the best adapter of their rank, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from .collectives import broadcast_from_first
from .initial import checksum
from .metrics import exchange_rows
from .peers import Peers
from .shards import as_sharded


# Beyond it the factor A of the mean product is too near to singular to be kept.
_MAX_CONDITION = 1e4


def refactor(
    first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], shares: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """
    The best factors of the mean product: of all pairs of this rank, the one nearest to `sum share B A`.

    The product of `m` by `n` is never formed: it is the product of `m` by `G r` and `G r` by `n`, of which QR
    decompositions leave a matrix of `G r` by `G r` at most. Of the many pairs with one product that is taken whose A is
    nearest to the mean of the groups' A: where they share one A, it stays as it is, B is the mean of theirs, and the inner
    optimizer's moments keep their meaning as far as they can.

    With the best product `L S R^T` of the rank `k <= r`, an A has a fitting B if its rows span those of `R^T`. The nearest
    to the mean `M` is `C R^T` and, where `k < r`, what `r - k` more dimensions can keep of the rest `N = M - C R^T`:
    `C = M R`, `A = C R^T + W W^T N` with the first left singular vectors `W` of `N`, and `B = L S P` with the `P` for which
    `P C = I` and `P W = 0`.

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
    mean_first = torch.stack([share * a for share, a in zip(shares, first, strict=True)]).sum(0)
    tall = torch.cat([share * b for share, b in zip(shares, second, strict=True)], dim=1)
    left, inner = torch.linalg.qr(tall)
    right, outer = torch.linalg.qr(torch.cat(list(first)).T)
    u, values, vh = torch.linalg.svd(inner @ outer.T, full_matrices=False)
    # Directions of what lies below the rounding of the sums are noise, which must not turn A.
    kept = min(rank, _num_above_noise(values, tall.shape[0] + right.shape[0], float(inner.norm() * outer.norm())))
    if not kept and mean_first.any():  # no adapter has moved from B = 0, say
        return mean_first, torch.zeros_like(second[0]), 0.0
    error = float(values[kept:].norm() / values.norm()) if kept else 0.0
    scaled, basis = left @ u[:, :kept] * values[:kept], right @ vh[:kept].T
    inside = mean_first @ basis
    rest = mean_first - inside @ basis.T
    w, lengths, _ = torch.linalg.svd(rest, full_matrices=False)
    beside = w[:, : min(rank - kept, _num_above_noise(lengths, sum(rest.shape), float(mean_first.norm())))]
    # How long the vectors beside are plays no part in P; as long as those inside, they tell whether there is one.
    frame = torch.cat([inside, beside * (float(inside.norm()) / kept**0.5 if kept else 1.0)], dim=1)
    if frame.shape[1] and float(torch.linalg.cond(frame)) <= _MAX_CONDITION:
        return inside @ basis.T + beside @ (beside.T @ rest), scaled @ torch.linalg.pinv(frame)[:kept], error
    # A mean of no use as a factor, of first factors that cancel each other, say: the product is divided evenly. What A has
    # beyond it keeps the usual length, since where A and B are both zero nothing would ever train.
    root = values[:kept].sqrt()
    length = sum(share * float(a.square().sum()) for share, a in zip(shares, first, strict=True)) / rank
    more = length**0.5 * (right @ vh[kept:rank].T).T
    empty = more.new_zeros(rank - kept - len(more), more.shape[1])
    new_first = torch.cat([root[:, None] * basis.T, more, empty])
    return new_first, nn.functional.pad(scaled / root, (0, rank - kept)), error


def _num_above_noise(values: torch.Tensor, size: int, scale: float) -> int:
    return int((values > torch.finfo(values.dtype).eps * size * scale).sum())


def average_products(
    pairs: Sequence[tuple[str, str]],
    shards: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    gather: Callable[[Mapping[str, torch.Tensor]], None],
    weights: Sequence[float],
    mesh: Peers,
    copies: Mapping[str, int],
) -> tuple[float, float, float]:
    """
    Replaces adapters by factors of the mean of their products. All ranks compute the same factors from the same numbers,
    in float64. On unlike hardware they may still come out unlike, and shards of two pairs of factors are no adapter: so
    checksums are compared, and where any differs all take rank 0's.

    Args:
        pairs (`Sequence[tuple[str, str]]`):
            Names of A and B.
        shards (`Mapping[str, torch.Tensor]`):
            This rank's shards, written in place.
        parameters (`Mapping[str, torch.Tensor]`):
            The parameters, which say how they are sharded.
        gather (`Callable`):
            Sums tensors over the groups, in place. Collective over the world; after it, the factors of each group are put
            together by collectives inside this group, for one adapter after the other, the same on all ranks, and
            checksums are exchanged over the world.
        weights (`Sequence[float]`):
            Of each group.
        mesh ([`Peers`]):
            The federation.
        copies (`Mapping[str, int]`):
            How many ranks of this group hold each element of a parameter.

    Returns:
        `tuple[float, float, float]`: This rank's part in the squared distance of the group from the result and in the squared
        norm of that, and the largest relative error of [`refactor`].
    """
    tables = _own_places(pairs, shards, weights, mesh)
    gather(tables)

    def refactored(pair: tuple[str, str]) -> tuple[torch.Tensor, torch.Tensor, float]:
        return _refactor_pair(pair, tables, parameters, weights)

    parts: dict[str, torch.Tensor] = {}
    bits, worst = torch.zeros((), dtype=torch.int64, device=mesh.device), 0.0
    for pair in pairs:
        *found, error = refactored(pair)
        worst = max(worst, error)
        for name, value in zip(pair, found, strict=True):
            bits = 31 * bits + checksum({name: value}, value.device)[1].to(mesh.device)
            parts[name] = _part(value, parameters[name])
    alike, worst = _compare_with_first(bits, worst, mesh)
    if not alike:  # the same on all ranks
        for pair in pairs:
            for name, value in zip(pair, refactored(pair)[:2], strict=True):
                wire = value.to(mesh.device).contiguous()
                broadcast_from_first(wire, mesh.fed, mesh.group)
                parts[name] = _part(wire.to(value.device), parameters[name])
    drift, norm = _take_parts(parts, shards, copies, counts=bool(weights[mesh.group_index]))
    return drift, norm, worst


def _own_places(
    pairs: Sequence[tuple[str, str]], shards: Mapping[str, torch.Tensor], weights: Sequence[float], mesh: Peers
) -> dict[str, torch.Tensor]:
    """Each group fills a place of its own in zeros, so that the sum over the groups holds all of them, unchanged."""
    tables = {}
    for name in (name for pair in pairs for name in pair):
        table = shards[name].new_zeros((mesh.layout.num_groups, *shards[name].shape))
        if weights[mesh.group_index]:
            table[mesh.group_index] = shards[name]
        tables[name] = table
    return tables


def _refactor_pair(
    pair: tuple[str, str],
    tables: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    weights: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """[`refactor`] on one adapter. Collective over the group, which puts the factors of each group together."""
    first, second = (
        [_whole(tables[name][group], parameters[name]).double() for group, weight in enumerate(weights) if weight]
        for name in pair
    )
    return refactor(first, second, [weight / sum(weights) for weight in weights if weight])


def _compare_with_first(bits: torch.Tensor, error: float, mesh: Peers) -> tuple[bool, float]:
    """
    Whether all ranks have computed the same, and rank 0's error. Collective over the world: what rank 0 has, then the small
    exchange of who has found anything else, so that all ranks hold one answer.
    """
    told = torch.stack([bits, torch.tensor(error, dtype=torch.float64, device=mesh.device).view(torch.int64)])
    own = told.clone()
    broadcast_from_first(told, mesh.fed, mesh.group)
    rows, _ = exchange_rows({"differs": float(not torch.equal(told, own))}, mesh)
    return not any(rows["differs"]), float(told[1].view(torch.float64))


def _take_parts(
    parts: Mapping[str, torch.Tensor], shards: Mapping[str, torch.Tensor], copies: Mapping[str, int], counts: bool
) -> tuple[float, float]:
    """Writes the new factors into the shards: the squared distance from the old ones, of a group that counts, and the norm."""
    drift = norm = 0.0
    for name, part in parts.items():
        if counts:
            drift += float((shards[name].double() - part).square().sum()) / copies[name]
        norm += float(part.square().sum()) / copies[name]
        shards[name].copy_(part)
    return drift, norm


def _whole(shard: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return as_sharded(shard, param).full_tensor() if isinstance(param, DTensor) else shard


def _part(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's shard of what all ranks of the group hold."""
    if not isinstance(param, DTensor):
        return value
    replicated = [Replicate()] * param.device_mesh.ndim
    held_by_all = DTensor.from_local(value, param.device_mesh, replicated, run_check=False)
    return held_by_all.redistribute(placements=param.placements).to_local()

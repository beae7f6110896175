"""
Exchange plans: who exchanges what with whom in an averaging. For each flat bucket the pieces of local tensors in it, the
process group that averages it, and how its slices come back together inside the group. A plan is made without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .collectives import Group
from .peers import Peers
from .tensors import accumulation_dtype
from .wire import Codec, find_codec


@dataclass(frozen=True)
class Piece:
    """Elements `start:stop` of the flattened local tensor `name`, at `offset` in its bucket."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """
    A contiguous run of pieces that are exchanged together, all accumulated in `dtype`.

    `numel` counts the padding that makes it a multiple of the number of replicas, so that each averages an equal
    slice; under a lossy format each peer sums whole blocks of a slice.
    """

    dtype: torch.dtype
    numel: int
    pieces: tuple[Piece, ...]

    def names(self) -> frozenset[str]:
        """Of the tensors that it has elements of."""
        return frozenset(piece.name for piece in self.pieces)


@dataclass(frozen=True)
class ExchangePlan:
    """
    Who exchanges what with whom.

    Args:
        buckets (`tuple[Bucket, ...]`):
            In the order of exchange, the same on all peers.
        slow (`ProcessGroup`):
            The ranks that average this rank's slice of each bucket.
        fast (`ProcessGroup`, *optional*):
            The ranks of this group among which the slices of a bucket are spread and put together again; `None` with a
            single replica, where a slice is the whole bucket.
        codec ([`Codec`], *optional*):
            The lossy format of what is exchanged; `None` for the buckets' own dtype.
    """

    buckets: tuple[Bucket, ...]
    slow: Group
    fast: Group | None
    codec: Codec | None = None

    @property
    def num_slices(self) -> int:
        """Slices into which each bucket is cut."""
        return 1 if self.fast is None else self.fast.size()

    @property
    def slice_index(self) -> int:
        """The slice that this rank averages."""
        return 0 if self.fast is None else self.fast.rank()

    def names(self) -> frozenset[str]:
        """Of the tensors with at least one element on this rank."""
        return frozenset(name for bucket in self.buckets for name in bucket.names())

    def slow_bytes(self) -> int:
        """
        Bytes this rank sends over the slow tier in one averaging. Of a slice of N bytes among P peers a ring all-reduce
        sends 2N(P-1)/P from each; so do, of encoded bytes, the exchange of N/P with each peer and the ring all-gather of
        what was summed.
        """
        peers = self.slow.size()
        return 2 * sum(self._slice_bytes(bucket) for bucket in self.buckets) * (peers - 1) // peers

    def _slice_bytes(self, bucket: Bucket) -> int:
        numel = bucket.numel // self.num_slices
        if self.codec is None:
            return numel * bucket.dtype.itemsize
        peers = self.slow.size()
        return peers * self.codec.row_bytes(numel // peers)


def plan_exchange(
    tensors: Mapping[str, torch.Tensor], mesh: Peers, bucket_size_bytes: int, wire_format: str = "fp32"
) -> ExchangePlan:
    """
    Packs local tensors into buckets. No communication: peers hold the same names, sizes and dtypes in the same order,
    which the start-up handshake has verified, and so arrive at the same plan.

    Args:
        tensors (`Mapping[str, torch.Tensor]`):
            This rank's local shards. Any size: one that is larger than a bucket is cut over several.
        mesh ([`Peers`]):
            Gives the process groups.
        bucket_size_bytes (`int`):
            Upper bound of a bucket, but that a block for each peer and replica is the least under a lossy format.
        wire_format (`str`, defaults to `"fp32"`):
            One of `WIRE_FORMATS`.

    Returns:
        [`ExchangePlan`]: The plan. Buckets hold one accumulation dtype each.
    """
    codec = find_codec(wire_format)
    # What a bucket's size is a multiple of.
    granule = mesh.layout.replicate_size
    if codec is not None:
        granule *= mesh.fed.size() * codec.granule
    by_dtype: dict[torch.dtype, list[tuple[str, int]]] = {}
    for name, tensor in tensors.items():
        by_dtype.setdefault(accumulation_dtype(tensor.dtype), []).append((name, tensor.numel()))
    buckets: list[Bucket] = []
    for dtype, sizes in by_dtype.items():
        # A multiple of it, so that only the last bucket of a dtype is padded.
        capacity = max(bucket_size_bytes // dtype.itemsize // granule, 1) * granule
        buckets.extend(_fill_buckets(sizes, dtype, capacity, granule))
    return ExchangePlan(tuple(buckets), mesh.fed, mesh.replicate, codec)


def join_plans(plans: Sequence[ExchangePlan]) -> ExchangePlan:
    """
    One plan for what several exchange one after another, in the same buckets.

    Args:
        plans (`Sequence[ExchangePlan]`):
            Of different tensors, among the same peers and in the same format; at least one.
    """
    return replace(plans[0], buckets=tuple(bucket for plan in plans for bucket in plan.buckets))


def _fill_buckets(sizes: Sequence[tuple[str, int]], dtype: torch.dtype, capacity: int, granule: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0

    def close() -> None:
        nonlocal pieces, used
        buckets.append(Bucket(dtype, -(-used // granule) * granule, tuple(pieces)))
        pieces, used = [], 0

    for name, numel in sizes:
        start = 0
        while start < numel:
            taken = min(numel - start, capacity - used)
            pieces.append(Piece(name, start, start + taken, used))
            start += taken
            used += taken
            if used == capacity:
                close()
    if pieces:
        close()
    return buckets

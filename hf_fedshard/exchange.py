"""
The averaging engine: weighted means of slices of local shards between federation groups.

It runs an *exchange plan* ([`ExchangePlan`]) with this rank's weight, and knows nothing of groups or algorithms. Formats of
fewer bits are exchanged by [`run_lossy_exchange`]; what every rank holds whole needs no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .collectives import Pending, all_gather, all_reduce, broadcast, start_all_reduce
from .exchange_plan import Bucket, ExchangePlan
from .peers import Peers
from .tensors import accumulation_dtype, from_wire, to_wire


@dataclass
class AveragingReport:
    """
    What one averaging found on this rank.

    Args:
        squared_drift (`torch.Tensor`):
            Scalar float64, squared distance of this rank's shards from their average: its part, where several ranks of the
            group hold the same elements.
        squared_norm (`torch.Tensor`):
            Scalar float64, squared norm of the average of this rank's shards, likewise.
    """

    squared_drift: torch.Tensor
    squared_norm: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device) -> AveragingReport:
        """Of nothing yet."""
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in range(2)))

    def take(self, held: torch.Tensor, mean: torch.Tensor, counts: bool, copies: int = 1) -> None:
        """
        Replaces what a rank holds by the average, and notes how far it was from it.

        Args:
            held (`torch.Tensor`):
                Written in place.
            mean (`torch.Tensor`):
                Of the same shape, in the dtype of the sums.
            counts (`bool`):
                Whether it has a part in the drift: what was left out of the average may be NaN.
            copies (`int`, defaults to `1`):
                How many ranks of the group hold these elements, and report them.
        """
        if counts:
            # In the memory of what is replaced, where its dtype is that of the sums: no temporary.
            self.squared_drift += held.to(mean).sub_(mean).norm().double().square() / copies
        self.squared_norm += mean.norm().double().square() / copies
        held.copy_(mean)


def run_exchange(
    plan: ExchangePlan,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    weight: float = 1.0,
    total_weight: float | None = None,
    copies: Mapping[str, int] | None = None,
) -> AveragingReport:
    """
    Replaces each tensor by its weighted mean over the slow group: sum of `weight * tensor` over `total_weight`.

    The sums are in the bucket's dtype, fp32 or more. Equal weights of 1 are not multiplied in, so values that are
    equal in all groups come out unchanged. A weight of 0 contributes zeros, not `tensor * 0`, which would be NaN for
    NaN. All ranks end with the same bits: each slice is summed by one all-reduce and handed on.

    Every rank of the world calls it together. Order of the collectives, the same on all ranks: all-reduce of bucket 0,
    all-reduce of bucket 1, all-gather of bucket 0, all-reduce of bucket 2, all-gather of bucket 1, ... The reductions
    use the slow communicator alone and the gathers the fast one alone, so neither can wait for a call that a peer has
    not reached.

    Args:
        plan ([`ExchangePlan`]):
            From [`plan_exchange`] over tensors of these names and sizes.
        tensors (`Mapping[str, torch.Tensor]`):
            This rank's shards, written in place.
        device (`torch.device`):
            Where the buckets live; shards elsewhere (CPU offload) are copied.
        weight (`float`, defaults to `1.0`):
            This group's weight.
        total_weight (`float`, *optional*):
            Sum of the weights of all groups. Defaults to the number of groups.
        copies (`Mapping[str, int]`, *optional*):
            How many ranks of this group hold each element of a tensor, for the report. Defaults to 1 each.

    Returns:
        [`AveragingReport`]: Distance of this rank's shards from the average.
    """
    assert plan.codec is None
    copies = copies or {}
    total = float(plan.slow.size() if total_weight is None else total_weight)
    flats = {name: Flat(tensor) for name, tensor in tensors.items()}
    report = AveragingReport.empty(device)
    buffers = _Buffers(plan, device)
    in_flight: list[tuple[Bucket, torch.Tensor, torch.Tensor, Pending]] = []
    for index, bucket in enumerate(plan.buckets):
        whole, part = buffers.take(index, bucket)
        _pack(bucket, flats, whole, weight)
        if part is not whole:
            part.copy_(whole.view(plan.num_slices, -1)[plan.slice_index])
        work = start_all_reduce(part, plan.slow)
        in_flight.append((bucket, whole, part, work))
        if len(in_flight) == 2:
            _finish(plan, flats, total, weight, copies, report, *in_flight.pop(0))
    for waiting in in_flight:
        _finish(plan, flats, total, weight, copies, report, *waiting)
    for flat in flats.values():
        flat.write_back()
    return report


class Flat:
    """A 1-D view of a tensor, or, where its memory is not contiguous, a 1-D copy that is written back at the end."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.view = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)

    def write_back(self) -> None:
        """Puts a copy back to where it was taken from."""
        if not self.tensor.is_contiguous():
            self.tensor.copy_(self.view.view(self.tensor.shape))


class _Buffers:
    """Two pairs of buffers (whole bucket, own slice) for each dtype, used in turns. A single slice is the bucket itself."""

    def __init__(self, plan: ExchangePlan, device: torch.device) -> None:
        self.slices = plan.num_slices
        largest: dict[torch.dtype, int] = {}
        for bucket in plan.buckets:
            largest[bucket.dtype] = max(largest.get(bucket.dtype, 0), bucket.numel)
        self.pairs: dict[tuple[torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for dtype, numel in largest.items():
            for turn in range(min(2, len(plan.buckets))):
                whole = torch.zeros(numel, dtype=dtype, device=device)
                part = whole if self.slices == 1 else whole.new_empty(numel // self.slices)
                self.pairs[dtype, turn] = whole, part

    def take(self, index: int, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        whole, part = self.pairs[bucket.dtype, index % 2]
        whole = whole[: bucket.numel]
        return whole, whole if self.slices == 1 else part[: bucket.numel // self.slices]


def _pack(bucket: Bucket, flats: Mapping[str, Flat], whole: torch.Tensor, weight: float) -> None:
    if weight == 0:
        whole.zero_()
        return
    for piece in bucket.pieces:
        target = whole[piece.offset : piece.offset + piece.stop - piece.start]
        target.copy_(flats[piece.name].view[piece.start : piece.stop])
    # What lies behind the last piece is padding: nobody reads it, but a stale NaN there would be reduced for nothing.
    last = bucket.pieces[-1]
    whole[last.offset + last.stop - last.start :].zero_()
    if weight != 1:
        whole.mul_(weight)


def _finish(
    plan: ExchangePlan,
    flats: Mapping[str, Flat],
    total: float,
    weight: float,
    copies: Mapping[str, int],
    report: AveragingReport,
    bucket: Bucket,
    whole: torch.Tensor,
    part: torch.Tensor,
    work: Pending,
) -> None:
    work.wait()
    part.div_(total)
    if plan.fast is not None:
        all_gather(whole, part, plan.fast)
    for piece in bucket.pieces:
        mean = whole[piece.offset : piece.offset + piece.stop - piece.start]
        held = flats[piece.name].view[piece.start : piece.stop]
        report.take(held, mean, counts=weight != 0, copies=copies.get(piece.name, 1))


def average_replicated(
    tensors: Mapping[str, torch.Tensor], mesh: Peers, weight: float, total: float, in_group: bool = False
) -> None:
    """
    Brings tensors that every rank holds whole, such as BatchNorm statistics, to one value: floating-point ones to the
    weighted mean over all ranks of all groups, integer ones to the value of group 0's first rank.

    The order is the same on all ranks: a sum inside the group, a sum over the groups by the first rank of each, and a
    broadcast inside the group. So the slow tier carries them once, and all ranks of a group get the same bits.

    Args:
        tensors (`Mapping[str, torch.Tensor]`):
            Names and tensors, the same names and shapes on all ranks, written in place.
        mesh ([`Peers`]):
            The federation.
        weight (`float`):
            This group's weight; one that is left out has 0, contributes zeros and takes the result.
        total (`float`):
            Sum of the weights of all groups.
        in_group (`bool`, defaults to `False`):
            Whether each group keeps a value of its own: the mean over its ranks, or its first rank's.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        by_dtype.setdefault(accumulation_dtype(tensor.dtype), []).append(tensor)
    crosses = mesh.group.rank() == 0 and not in_group
    if in_group:
        weight = total = 1.0
    for dtype, members in by_dtype.items():
        if dtype.is_floating_point:
            parts = [tensor.to(mesh.device, dtype).reshape(-1) for tensor in members]
        else:
            parts = [to_wire(tensor, mesh.device).reshape(-1) for tensor in members]
        flat = torch.cat(parts)
        if dtype.is_floating_point:
            if weight == 0:
                flat.zero_()
            elif weight != 1:
                flat.mul_(weight)
            all_reduce(flat, mesh.group)
            if crosses:
                all_reduce(flat, mesh.fed)
            flat.div_(total * mesh.group.size())
        elif crosses:
            broadcast(flat, mesh.fed)
        broadcast(flat, mesh.group)
        for tensor, part in zip(members, flat.split([part.numel() for part in parts]), strict=True):
            if dtype.is_floating_point:
                tensor.copy_(part.view(tensor.shape))
            else:
                from_wire(tensor, part)

"""
The averaging of values that cross the slow tier in a lossy format: fewer bytes, the same sums in fp32, and the same bits
on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .collectives import Pending, all_gather, start_all_to_all
from .exchange import AveragingReport, Flat
from .exchange_plan import Bucket, ExchangePlan, Piece


@dataclass(frozen=True)
class RoundStart:
    """
    The model with which the round began. Every group holds its bits, so that differences to it say all about a group.

    Args:
        anchors (`Mapping[str, torch.Tensor]`):
            Local shards by name, in fp32 or more, on any device.
        dtypes (`Mapping[str, torch.dtype]`):
            In what the parameters are stored: the round began with the anchor rounded to that.
    """

    anchors: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]

    def elements(self, piece: Piece, like: torch.Tensor) -> torch.Tensor:
        """
        Elements of a parameter as the round began with them.

        Args:
            piece ([`Piece`]):
                Which.
            like (`torch.Tensor`):
                Gives the dtype and the device.
        """
        anchor = self.anchors[piece.name].reshape(-1)[piece.start : piece.stop].to(like.device)
        return anchor.to(self.dtypes[piece.name]).to(like.dtype)


def run_lossy_exchange(
    plan: ExchangePlan,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    weight: float = 1.0,
    total_weight: float | None = None,
    start: RoundStart | None = None,
    residuals: Sequence[torch.Tensor] | None = None,
    copies: Mapping[str, int] | None = None,
) -> AveragingReport:
    """
    Replaces each tensor by its weighted mean over the slow group, as [`run_exchange`] does, through the plan's codec.

    For each bucket, with P peers in the slow group: every rank encodes its share, `weight / total_weight` times what its
    tensors differ from `start`, and hands peer `p` part `p` of it; peer `p` adds the decoded parts in the order of the
    peers, in the bucket's dtype (fp32 or more), encodes the sum, and hands it to all. Then *all* ranks, that peer too,
    decode the same bytes and add the result to `start`. So all end with the same bits, and each byte crosses the slow tier
    once. With several replicas in a group each does this for its slice, and they hand each other the encoded sums.

    **Error feedback** (arXiv 1901.09847, in both directions as in arXiv 1905.05957): what encoding a share has lost is added to the share of the next round, and what
    encoding a sum has lost to the next share of the rank that encoded it. So the sum over rounds of what arrives differs
    from that of what was trained by what the residuals hold at the end, and errors do not add up. A group with the weight 0
    sends zeros, and forgets its residuals.

    Every rank of the world calls it together; it may run in a thread of its own, beside no other exchange. Order of the
    collectives, the same on all ranks: all-to-all of bucket 0, all-to-all of bucket 1, all-gathers of bucket 0 (slow tier,
    then fast tier), all-to-all of bucket 2, all-gathers of bucket 1, ... Each communicator sees the same calls in the same
    order on all of its ranks, and none waits for a call behind one that a peer has not reached. While a bucket is packed or
    decoded, another one is on the wire.

    It takes, beside the tensors, two slices of a bucket for shares and what is decoded, four encoded slices and an encoded
    bucket, with several replicas one encoded slice more; for parameters of other dtypes and anchors on other devices
    their pieces.

    Args:
        plan ([`ExchangePlan`]):
            From [`plan_exchange`] over tensors of these names and sizes, with a lossy format.
        tensors (`Mapping[str, torch.Tensor]`):
            This rank's shards, written in place.
        device (`torch.device`):
            Where the buckets live.
        weight (`float`, defaults to `1.0`):
            This group's weight.
        total_weight (`float`, *optional*):
            Sum of the weights of all groups. Defaults to the number of groups.
        start ([`RoundStart`], *optional*):
            What differences are taken to. Without it the values themselves are sent.
        residuals (`Sequence[torch.Tensor]`, *optional*):
            One for each bucket of the plan, of this rank's slice of it, in the dtype of the bucket and on any device:
            written in place. Without them nothing is fed back.
        copies (`Mapping[str, int]`, *optional*):
            How many ranks of this group hold each element of a tensor, for the report. Defaults to 1 each.

    Returns:
        [`AveragingReport`]: Distance of this rank's shards from the average.
    """
    total = float(plan.slow.size() if total_weight is None else total_weight)
    exchange = _LossyExchange(plan, tensors, device, weight / total, start, copies or {})
    in_flight: list[_InFlight] = []
    for index, bucket in enumerate(plan.buckets):
        residual = None if residuals is None else residuals[index]
        in_flight.append(exchange.send(index, bucket, residual))
        if len(in_flight) == 2:
            exchange.finish(in_flight.pop(0))
    for waiting in in_flight:
        exchange.finish(waiting)
    for flat in exchange.flats.values():
        flat.write_back()
    return exchange.report


@dataclass(frozen=True)
class _InFlight:
    """A bucket whose shares are on the wire."""

    bucket: Bucket
    residual: torch.Tensor | None
    sent: torch.Tensor
    received: torch.Tensor
    work: Pending


class _LossyExchange:
    """One exchange: its arguments and its memory."""

    def __init__(
        self,
        plan: ExchangePlan,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        share: float,
        start: RoundStart | None,
        copies: Mapping[str, int],
    ) -> None:
        assert plan.codec is not None
        self.plan = plan
        self.codec = plan.codec
        self.peers = plan.slow.size()
        self.flats = {name: Flat(tensor) for name, tensor in tensors.items()}
        self.share = share
        self.start = start
        self.copies = copies
        self.report = AveragingReport.empty(device)
        self._values: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        for dtype in {bucket.dtype for bucket in plan.buckets}:
            largest = max(bucket.numel for bucket in plan.buckets if bucket.dtype == dtype) // plan.num_slices
            shares, decoded = (torch.empty(largest, dtype=dtype, device=device) for _ in range(2))
            self._values[dtype] = shares, decoded
        most = max((self._row_bytes(bucket) for bucket in plan.buckets), default=0) * self.peers
        turns = min(2, len(plan.buckets))
        self._sent, self._received = (
            [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(turns)] for _ in range(2)
        )
        # The sums of all slices. Where there are several, the own one is gathered apart.
        self._sums = torch.empty(most * plan.num_slices, dtype=torch.uint8, device=device)
        self._own_sums = self._sums if plan.fast is None else torch.empty(most, dtype=torch.uint8, device=device)

    def send(self, index: int, bucket: Bucket, residual: torch.Tensor | None) -> _InFlight:
        """Packs and encodes a bucket's own slice, hands the parts to the peers, and keeps what was lost."""
        shares, decoded = self._values_of(bucket)
        self._pack(bucket, shares)
        if residual is not None and self.share:
            shares.add_(residual.to(shares.device))
        size = self.peers * self._row_bytes(bucket)
        sent, received = (held[index % 2][:size].view(self.peers, -1) for held in (self._sent, self._received))
        rows, scratch = shares.view(self.peers, -1), decoded.view(self.peers, -1)
        self.codec.encode(rows, sent, scratch)
        work = start_all_to_all(received, sent, self.plan.slow)
        if residual is not None:
            self.codec.decode(sent, scratch)
            residual.copy_(rows.sub_(scratch).view(-1))
        return _InFlight(bucket, residual, sent, received, work)

    def finish(self, flight: _InFlight) -> None:
        """Sums the own part of a bucket's own slice, and takes the sums of all."""
        flight.work.wait()
        plan, bucket = self.plan, flight.bucket
        # What was sent has arrived: its memory is free for the encoded sum.
        own = flight.sent[:1]
        self._encode_sum(flight, own)
        size = self.peers * self._row_bytes(bucket)
        slices = self._sums[: size * plan.num_slices].view(plan.num_slices, self.peers, -1)
        gathered = self._own_sums[:size].view(self.peers, -1)
        all_gather(gathered, own, plan.slow)
        if plan.fast is not None:
            all_gather(slices, gathered.unsqueeze(0), plan.fast)
        _, decoded = self._values_of(bucket)
        for number in range(plan.num_slices):
            self.codec.decode(slices[number], decoded.view(self.peers, -1))
            for piece, part in _overlapping(bucket, number, decoded):
                if self.start is not None:
                    part.add_(self.start.elements(piece, part))
                held = self.flats[piece.name].view[piece.start : piece.stop]
                self.report.take(held, part, counts=self.share != 0, copies=self.copies.get(piece.name, 1))

    def _encode_sum(self, flight: _InFlight, own: torch.Tensor) -> None:
        total, scratch = (values.view(self.peers, -1)[:1] for values in self._values_of(flight.bucket))
        # In the order of the peers, so that the bits depend on nothing else.
        self.codec.decode(flight.received[:1], total)
        for peer in range(1, self.peers):
            self.codec.decode(flight.received[peer : peer + 1], scratch)
            total.add_(scratch)
        self.codec.encode(total, own, scratch)
        if flight.residual is not None:
            self.codec.decode(own, scratch)
            rows = flight.residual.view(self.peers, -1)
            rows[self.plan.slow.rank()].add_(total.sub_(scratch)[0].to(rows.device))

    def _pack(self, bucket: Bucket, shares: torch.Tensor) -> None:
        """This group's share of the own slice. Zeros, not products with 0, where its weight is 0, and in the padding."""
        shares.zero_()
        if self.share == 0:
            return
        for piece, part in _overlapping(bucket, self.plan.slice_index, shares):
            part.copy_(self.flats[piece.name].view[piece.start : piece.stop])
            if self.start is not None:
                part.sub_(self.start.elements(piece, part))
        if self.share != 1:
            shares.mul_(self.share)

    def _values_of(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        numel = bucket.numel // self.plan.num_slices
        shares, decoded = self._values[bucket.dtype]
        return shares[:numel], decoded[:numel]

    def _row_bytes(self, bucket: Bucket) -> int:
        return self.codec.row_bytes(bucket.numel // self.plan.num_slices // self.peers)


def _overlapping(bucket: Bucket, number: int, values: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The pieces of one slice of a bucket, cut where it begins and ends, with their places in its values."""
    first = number * values.numel()
    for piece in bucket.pieces:
        begin = max(piece.offset, first)
        end = min(piece.offset + piece.stop - piece.start, first + values.numel())
        if begin < end:
            start = piece.start + begin - piece.offset
            yield Piece(piece.name, start, start + end - begin, begin), values[begin - first : end - first]

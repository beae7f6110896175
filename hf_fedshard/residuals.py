"""What a rank still owes the others: the residuals of error feedback, between rounds and in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from .collectives import all_gather
from .exchange_plan import Bucket, ExchangePlan
from .outer_memory import OuterMemory


class Residuals:
    """
    What encoding has lost so far on this rank, see [`run_lossy_exchange`]. In the unit of the parameters and in their
    accumulation dtype: 4 bytes for each element that this rank exchanges, which is its slice of its shards.

    They are kept plan by plan: fragments of a model, whose turns alternate, each keep theirs. Plans that share a parameter,
    as those of a fragment and of the whole model do, are not held at a time: the one in use takes over what is owed. For that
    time whole shards of it are held where the residuals live, 4 bytes an element, and with replicas they are gathered inside
    the group.

    Args:
        memory ([`OuterMemory`]):
            Says where they live.
    """

    def __init__(self, memory: OuterMemory) -> None:
        self.memory = memory
        self._slices: list[tuple[ExchangePlan, list[torch.Tensor]]] = []
        self._device = torch.device("cpu")
        self._whole: dict[str, torch.Tensor] = {}
        """Whole shards of what no plan holds: from a checkpoint, or of parts of a plan that is no longer in use."""

    def __bool__(self) -> bool:
        """Whether there has been an exchange to owe something from, the same on all ranks."""
        return bool(self._slices or self._whole)

    @property
    def flats(self) -> list[torch.Tensor]:
        """This rank's slices of the buckets of all plans."""
        return [flat for _, flats in self._slices for flat in flats]

    def reset(self) -> None:
        """Nothing is owed."""
        self._slices, self._whole = [], {}

    def load(self, shards: Mapping[str, torch.Tensor]) -> None:
        """
        Takes what a checkpoint holds.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                Local shards by name, of any of the parameters; each is kept until a plan has it.
        """
        self.reset()
        self._whole = dict(shards)

    def of(self, plan: ExchangePlan, device: torch.device, known: Collection[str] = ()) -> list[torch.Tensor] | None:
        """
        The residuals of a plan's buckets, which the exchange writes. Where the plan takes over from others it is collective
        over the replicas of a shard. These hold the same shards and arrive at the same plans in the same order, so that
        all of them come here together or none.

        Args:
            plan ([`ExchangePlan`]):
                What is about to be exchanged.
            device (`torch.device`):
                Where its buckets live.
            known (`Collection[str]`, *optional*):
                Parameters of which it is still owed though they are not in the plan: of fragments whose turn comes later.

        Returns:
            `list[torch.Tensor]` or `None`: For each bucket that of this rank's slice; `None` if the format has none.
        """
        if plan.codec is None or not plan.codec.feeds_back:
            return None
        for held, flats in self._slices:
            if held == plan:  # by value: what is made anew for the same parameters cuts them in the same way
                return flats
        here, self._device = plan.names(), device
        kept = []
        for held, flats in self._slices:
            names = held.names()
            if names & here:
                self._whole.update(self._gather(held, flats))
            elif any(name in known for name in names):
                kept.append((held, flats))
        own = [self._cut(plan, bucket, self._whole) for bucket in plan.buckets]
        self._slices = [*kept, (plan, own)]
        self._whole = {name: shard for name, shard in self._whole.items() if name in known and name not in here}
        return own

    def by_name(self) -> dict[str, torch.Tensor]:
        """
        Local shards of what is owed, as long as those of the parameters and 1-D; of the replicas of a shard all together,
        the same in each. Collective over these.
        """
        found = dict(self._whole)
        for plan, flats in self._slices:
            found.update(self._gather(plan, flats))
        return found

    def _gather(self, plan: ExchangePlan, flats: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        sizes = {piece.name: piece.stop for bucket in plan.buckets for piece in bucket.pieces}
        for bucket, flat in zip(plan.buckets, flats, strict=True):
            whole = flat
            if plan.fast is not None:
                part = flat.to(self._device)
                whole = part.new_empty(bucket.numel)
                all_gather(whole, part, plan.fast)
            for piece in bucket.pieces:
                shard = found.setdefault(piece.name, flat.new_empty(sizes[piece.name]))
                shard[piece.start : piece.stop] = whole[piece.offset : piece.offset + piece.stop - piece.start]
        return found

    def _cut(self, plan: ExchangePlan, bucket: Bucket, owed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The own slice of a bucket, zeros for what is not owed."""
        device = torch.device("cpu") if self.memory.offload else self._device
        whole = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
        for piece in bucket.pieces:
            if piece.name in owed:
                target = whole[piece.offset : piece.offset + piece.stop - piece.start]
                target.copy_(owed[piece.name].reshape(-1)[piece.start : piece.stop])
        own = whole.view(plan.num_slices, -1)[plan.slice_index]
        return self.memory.copy(own, self._device)

"""What a rank still owes the others: the residuals of error feedback, between rounds and in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from .collectives import all_gather
from .exchange import Bucket, ExchangePlan
from .outer_memory import OuterMemory


class Residuals:
    """
    What encoding has lost so far on this rank, see [`run_lossy_exchange`]. In the unit of the parameters and in their
    accumulation dtype: 4 bytes for each element that this rank exchanges, which is its slice of its shards.

    Args:
        memory ([`OuterMemory`]):
            Says where they live.
    """

    def __init__(self, memory: OuterMemory) -> None:
        self.memory = memory
        self.plan: ExchangePlan | None = None
        self.flats: list[torch.Tensor] = []
        self._device = torch.device("cpu")
        self._loaded: dict[str, torch.Tensor] = {}

    def __bool__(self) -> bool:
        """Whether there has been an exchange to owe something from, the same on all ranks."""
        return self.plan is not None or bool(self._loaded)

    def reset(self) -> None:
        """Nothing is owed."""
        self.plan, self.flats, self._loaded = None, [], {}

    def load(self, shards: Mapping[str, torch.Tensor]) -> None:
        """
        Takes what a checkpoint holds.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                Local shards by name, of any of the parameters; kept until the next exchange.
        """
        self.reset()
        self._loaded = dict(shards)

    def of(self, plan: ExchangePlan, device: torch.device, known: Collection[str] = ()) -> list[torch.Tensor] | None:
        """
        The residuals of a plan's buckets, which the exchange writes. Collective over the replicas of a shard where the plan
        is another one than before, which it is in all of them: parameters were unfrozen, or another fragment has its turn.

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
        if self.plan is not plan:
            owed = self.by_name()
            here = plan.names()
            self._loaded = {name: shard for name, shard in owed.items() if name in known and name not in here}
            self.plan, self._device = plan, device
            self.flats = [self._cut(plan, bucket, owed) for bucket in plan.buckets]
        return self.flats

    def by_name(self) -> dict[str, torch.Tensor]:
        """
        Local shards of what is owed, as long as those of the parameters and 1-D; of the replicas of a shard all together,
        the same in each. Collective over these.
        """
        found = dict(self._loaded)
        if self.plan is None:
            return found
        sizes: dict[str, int] = {}
        for bucket in self.plan.buckets:
            sizes.update({piece.name: piece.stop for piece in bucket.pieces})
        for bucket, flat in zip(self.plan.buckets, self.flats, strict=True):
            whole = flat
            if self.plan.fast is not None:
                part = flat.to(self._device)
                whole = part.new_empty(bucket.numel)
                all_gather(whole, part, self.plan.fast)
            for piece in bucket.pieces:
                shard = found.setdefault(piece.name, flat.new_empty(sizes[piece.name]))
                shard[piece.start : piece.stop] = whole[piece.offset : piece.offset + piece.stop - piece.start]
        return found

    def _cut(self, plan: ExchangePlan, bucket: Bucket, owed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The own slice of a bucket, zeros for what is not owed."""
        whole = torch.zeros(bucket.numel, dtype=bucket.dtype)
        for piece in bucket.pieces:
            if piece.name in owed:
                target = whole[piece.offset : piece.offset + piece.stop - piece.start]
                target.copy_(owed[piece.name].reshape(-1)[piece.start : piece.stop])
        own = whole.view(plan.num_slices, -1)[plan.slice_index]
        return self.memory.copy(own, self._device)

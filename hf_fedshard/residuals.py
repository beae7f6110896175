"""What a rank still owes the others: the residuals of error feedback, between rounds and in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from .collectives import all_gather
from .exchange_plan import Bucket, ExchangePlan
from .outer_memory import OuterMemory
from .tensors import note_reader


class Residuals:
    """
    What encoding has lost so far on this rank, see [`run_lossy_exchange`]. In the unit of the parameters and in their
    accumulation dtype: 4 bytes for each element that this rank exchanges, which is its slice of its shards.

    They are kept bucket by bucket, so that plans that have buckets in common share what is owed of them: the plan of a whole
    model is made of those of its fragments, whose turns alternate. Buckets that cut the same parameters in other places, since
    one was unfrozen say, take over what is owed. For that time whole shards of these parameters are held where the residuals
    live, 4 bytes an element, and with replicas they are gathered inside the group.

    Args:
        memory ([`OuterMemory`]):
            Says where they live.
    """

    def __init__(self, memory: OuterMemory) -> None:
        self.memory = memory
        self._slices: dict[Bucket, torch.Tensor] = {}
        self._plan: ExchangePlan | None = None
        """The last one: how buckets are sliced is the same in all."""
        self._device = torch.device("cpu")
        self._whole: dict[str, torch.Tensor] = {}
        """Whole shards of what is in no bucket: from a checkpoint, or of parts of a plan that is no longer in use."""

    def __bool__(self) -> bool:
        """Whether there has been an exchange to owe something from, the same on all ranks: one may hold no element."""
        return self._plan is not None or bool(self._whole)

    def reset(self) -> None:
        """Nothing is owed."""
        self._slices, self._plan, self._whole = {}, None, {}

    def load(self, shards: Mapping[str, torch.Tensor]) -> None:
        """
        Takes what a checkpoint holds.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                Local shards by name, of any of the parameters; each is kept until a bucket has it.
        """
        self.reset()
        self._whole = dict(shards)

    def of(self, plan: ExchangePlan, device: torch.device, known: Collection[str] = ()) -> list[torch.Tensor] | None:
        """
        The residuals of a plan's buckets, which the exchange writes. Where buckets take over from others it is collective
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
        self._plan, self._device = plan, device
        # By value: what is made anew for the same parameters cuts them in the same way.
        if missing := [bucket for bucket in plan.buckets if bucket not in self._slices]:
            self._take_over(plan, missing, known)
        return [self._slices[bucket] for bucket in plan.buckets]

    def by_name(self) -> dict[str, torch.Tensor]:
        """
        Local shards of what is owed, as long as those of the parameters: 1-D where it was cut into buckets, in the parameters'
        shapes where a checkpoint was read. Of the replicas of a shard all together, the same in each. Collective over these.
        """
        return {**self._whole, **self._gather(list(self._slices))}

    def _take_over(self, plan: ExchangePlan, missing: Sequence[Bucket], known: Collection[str]) -> None:
        """Makes the missing buckets of a plan from those that have cut the same parameters so far."""
        here, ending = plan.names(), self._cut_elsewhere(plan, missing)
        names = _names(ending)
        # A parameter may lie in a bucket that ends and in one that stays.
        taken = self._gather([bucket for bucket in self._slices if bucket.names() & names])
        self._whole |= {name: shard for name, shard in taken.items() if name in names}
        kept = {
            bucket: flat
            for bucket, flat in self._slices.items()
            if bucket not in ending and any(name in here or name in known for name in bucket.names())
        }
        slices = {**kept, **{bucket: self._cut(plan, bucket) for bucket in missing}}
        whole = {name: shard for name, shard in self._whole.items() if name in known and name not in here}
        # Borders cut on the stream of the steps, averagings beside the steps on that of their thread, and each drops what the
        # other has made, of which the copies that were just launched still read.
        note_reader(flat for bucket, flat in self._slices.items() if bucket not in slices)
        note_reader(shard for name, shard in self._whole.items() if name not in whole)
        self._slices, self._whole = slices, whole

    def _cut_elsewhere(self, plan: ExchangePlan, missing: Sequence[Bucket]) -> set[Bucket]:
        """The buckets that end: those outside of the plan that have a parameter in common with what is missing, or one another."""
        names = _names(missing)
        others, ending = set(self._slices) - set(plan.buckets), set[Bucket]()
        while met := {bucket for bucket in others - ending if bucket.names() & names}:
            ending |= met
            names |= _names(met)
        return ending

    def _gather(self, buckets: Sequence[Bucket]) -> dict[str, torch.Tensor]:
        """Shards of the parameters in some buckets, with what these hold of them. Collective over the replicas of a shard."""
        found: dict[str, torch.Tensor] = {}
        sizes: dict[str, int] = {}
        for piece in (piece for bucket in buckets for piece in bucket.pieces):
            sizes[piece.name] = max(piece.stop, sizes.get(piece.name, 0))
        for bucket in buckets:
            whole = flat = self._slices[bucket]
            assert self._plan is not None
            if self._plan.fast is not None:
                part = flat.to(self._device)
                whole = part.new_empty(bucket.numel)
                all_gather(whole, part, self._plan.fast)
            for piece in bucket.pieces:
                shard = found.setdefault(piece.name, flat.new_empty(sizes[piece.name]))
                shard[piece.start : piece.stop] = whole[piece.offset : piece.offset + piece.stop - piece.start]
        return found

    def _cut(self, plan: ExchangePlan, bucket: Bucket) -> torch.Tensor:
        """The own slice of a bucket, zeros for what is not owed."""
        device = torch.device("cpu") if self.memory.offload else self._device
        whole = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
        for piece in bucket.pieces:
            if piece.name in self._whole:
                target = whole[piece.offset : piece.offset + piece.stop - piece.start]
                target.copy_(self._whole[piece.name].reshape(-1)[piece.start : piece.stop])
        own = whole.view(plan.num_slices, -1)[plan.slice_index]
        return self.memory.copy(own, self._device)


def _names(buckets: Iterable[Bucket]) -> frozenset[str]:
    return frozenset(name for bucket in buckets for name in bucket.names())

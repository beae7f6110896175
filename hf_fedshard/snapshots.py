"""Copies of what is averaged, as it was at the end of a step, so that the steps can go on while it is exchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .averaging import ModelAverager
from .exchange_plan import ExchangePlan
from .held import Held
from .shards import find_parameters, persistent_buffers, reshard, shards_of
from .tensors import accumulation_dtype, all_finite, holds_floats, largest_magnitude


@dataclass
class Snapshot:
    """
    A fragment of the model, or all of it, at the end of a step.

    Args:
        shards (`dict[str, torch.Tensor]`):
            This rank's shards in fp32 or more. After a plain averaging the distance to the average stands here.
        means (`dict[str, torch.Tensor]`):
            Room for their averages.
        dtypes (`dict[str, torch.dtype]`):
            Of the parameters.
        buffers (`dict[str, torch.Tensor]`):
            The persistent buffers, with the last fragment.
        mean_buffers (`dict[str, torch.Tensor]`):
            Room for their averages.
        besides (`list[torch.Tensor]`):
            Scalars that are finite if all else is that has to be, left on the device.
        plans (`dict[str, ExchangePlan]`):
            How the shards are exchanged, see [`Held`].
        problems (`list[str]`):
            See [`Held`].
        copies (`dict[str, int]`):
            See [`Held`].
        ready (`torch.Event`, *optional*):
            On a device: when the copies are made.
        has_frozen (`bool`):
            Whether something that is averaged trains no more, in this fragment or another.
        modules (`dict[str, nn.Module]`):
            Those of the model: they are resharded before the outcome is taken in.
    """

    shards: dict[str, torch.Tensor]
    means: dict[str, torch.Tensor]
    dtypes: dict[str, torch.dtype]
    buffers: dict[str, torch.Tensor]
    mean_buffers: dict[str, torch.Tensor]
    besides: list[torch.Tensor]
    plans: dict[str, ExchangePlan]
    problems: list[str]
    copies: dict[str, int]
    ready: torch.Event | None
    has_frozen: bool
    modules: dict[str, nn.Module]

    def to_exchange(self) -> Held:
        """What a rank brings to the exchange, in which averages are formed. For the thread that exchanges."""
        for target, source in ((self.means, self.shards), (self.mean_buffers, self.buffers)):
            for name, tensor in source.items():
                target[name].copy_(tensor)
        finite = all_finite([*self.shards.values(), *self.besides])
        return Held(
            self.means, self.dtypes, self.means, {}, self.mean_buffers, self.plans, finite, self.problems, self.copies
        )


class Snapshots:
    """
    Takes snapshots and gives their outcome to the model.

    Memory: a snapshot takes 4 bytes for each element of this rank's shards (8 of float64), which are kept from round to
    round; while an exchange is in flight its averages take as much again. Both are made by the thread that trains, also
    where the other one writes them: on a device memory returns to the stream that it was made on, and so to the steps.

    Args:
        averager ([`ModelAverager`]):
            Of the model.
        device (`torch.device`):
            Of the training steps.
    """

    def __init__(self, averager: ModelAverager, device: torch.device) -> None:
        self.averager = averager
        self.device = device
        self._kept: dict[int | None, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def take(self, fragment: int | None, names: Collection[str] | None, with_buffers: bool) -> Snapshot:
        """
        Copies what is averaged, without communication and, on a device, without waiting for it. It keeps a Python thread from
        launching the next step for as long as it takes, so it walks over the modules once, over the parameters once, and from
        there on over the fragment's alone.

        Args:
            fragment (`int`, *optional*):
                Number of the fragment; `None` for the whole model. Its last snapshot is overwritten, so what came of that has
                to be in the model.
            names (`Collection[str]`, *optional*):
                Of its parameters; by default all.
            with_buffers (`bool`):
                Whether the buffers belong to it.

        Returns:
            [`Snapshot`]: The copies.
        """
        averager = self.averager
        modules = reshard(averager.model)
        found = averager.trained.survey()
        parameters = {name: param for name, param in found.averaged.items() if names is None or name in names}
        shards = shards_of(parameters)
        target = self._storage(fragment, shards)
        if shards:
            torch._foreach_copy_(list(target.values()), list(shards.values()), non_blocking=True)
        buffers = persistent_buffers(averager.model, modules) if with_buffers else {}
        besides = averager.tensors.checked_besides(found, buffers) if with_buffers else []
        return Snapshot(
            shards=target,
            means={name: self._room(shard) for name, shard in shards.items()},
            dtypes={name: shard.dtype for name, shard in shards.items()},
            buffers={name: buffer.clone() for name, buffer in buffers.items()},
            mean_buffers={name: torch.empty_like(buffer) for name, buffer in buffers.items()},
            besides=[largest_magnitude(tensor) for tensor in besides if holds_floats(tensor)],
            plans=averager.tensors.parameter_plans(target, fragment),
            problems=found.strays,
            copies=averager.tensors.copies(parameters),
            ready=self._record(),
            has_frozen=found.has_frozen,
            modules=modules,
        )

    def _storage(self, fragment: int | None, shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = self._kept.get(fragment)
        wanted = [(name, shard.shape, accumulation_dtype(shard.dtype)) for name, shard in shards.items()]
        if kept is None or [(name, tensor.shape, tensor.dtype) for name, tensor in kept.items()] != wanted:
            kept = self._kept[fragment] = {name: self._room(shard) for name, shard in shards.items()}
        return kept

    def _room(self, shard: torch.Tensor) -> torch.Tensor:
        """For a shard where it is exchanged; in host memory pinned, if it is copied from a GPU."""
        staged = self.averager.mesh.device.type == "cpu"
        return torch.empty(
            shard.shape,
            dtype=accumulation_dtype(shard.dtype),
            device="cpu" if staged else shard.device,
            pin_memory=staged and shard.device.type == "cuda",
        )

    def _record(self) -> torch.Event | None:
        """Notes, on the stream of the training steps, where all that was launched so far is done."""
        if self.device.type == "cpu":
            return None
        event = torch.Event(device=self.device)
        event.record()
        return event

    @torch.no_grad()
    def put(self, snapshot: Snapshot, share: float, replace: bool) -> None:
        """
        Gives the model, which is resharded, what came of a snapshot: `w + share (new - snapshot)`, so that the steps made
        meanwhile stay. Without communication. `new` is the anchor after the outer step, of plain averaging the average.

        What was exchanged in host memory comes to the device one parameter at a time, and nothing of the averages that the
        model does not need.

        Floating-point buffers take their average: they are statistics, and a difference could make a variance negative.
        Integer ones, which count, keep what was counted meanwhile.

        Args:
            snapshot ([`Snapshot`]):
                The snapshot, after the exchange and the outer step. Its content is lost.
            share (`float`):
                Of the way to the new model that is gone.
            replace (`bool`):
                Whether the new model is taken as it is, bit for bit.
        """
        averager = self.averager
        shards = shards_of(find_parameters(averager.model, snapshot.modules, snapshot.shards))
        plain = averager.outer.optimizer is None
        new = snapshot.means if plain else averager.outer.anchors
        for names in self._turns(snapshot, shards, new):
            own = [shards[name] for name in names]
            if replace:
                torch._foreach_copy_(own, [_bring(new[name], shards[name]) for name in names])
                continue
            distances = [_bring(snapshot.shards[name], shards[name]) for name in names]
            if not plain:
                torch._foreach_neg_(distances)
                torch._foreach_add_(distances, [_bring(new[name], shards[name]) for name in names])
            torch._foreach_add_(own, distances, alpha=share)
        for name, mean in snapshot.mean_buffers.items():
            buffer = averager.model.get_buffer(name)
            if replace or mean.dtype.is_floating_point:
                buffer.copy_(mean)
            elif mean.dtype != torch.bool and not mean.dtype.is_complex:
                # In int64: torch subtracts no unsigned integers of more than 8 bits.
                counted = mean.long() - snapshot.buffers[name].long()
                buffer.copy_(buffer.long() + counted)

    def _turns(
        self, snapshot: Snapshot, shards: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
    ) -> list[list[str]]:
        """Names of the parameters that are given theirs together: all, or each alone if it has to be brought from elsewhere."""
        names = list(snapshot.shards)
        if any(part[name].device != shards[name].device for name in names for part in (snapshot.shards, new)):
            return [[name] for name in names]
        return [names] if names else []

    def drop(self) -> None:
        """Frees the memory that is kept."""
        self._kept.clear()


@torch.no_grad()
def note_distance(snapshot: Snapshot) -> None:
    """
    Turns a snapshot into its distance to the averages, in place. For the thread that exchanges.

    Args:
        snapshot ([`Snapshot`]):
            The snapshot, after a plain averaging.
    """
    for name, shard in snapshot.shards.items():
        torch.sub(snapshot.means[name], shard, out=shard)


def _bring(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """From pinned memory without waiting for the steps: the copy is on their stream, ahead of what reads it."""
    return tensor.to(like.device, non_blocking=True)

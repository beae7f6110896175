"""Copies of what is averaged, as it was at the end of a step, so that the steps can go on while it is exchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from .averaging import ModelAverager
from .exchange_plan import ExchangePlan
from .held import Held
from .shards import accumulation_dtype, all_finite, local_shards, persistent_buffers, reshard


@dataclass
class Snapshot:
    """
    A fragment of the model, or all of it, at the end of a step.

    Args:
        shards (`dict[str, torch.Tensor]`):
            This rank's shards in fp32 or more. After a plain averaging the distance to the average stands here.
        dtypes (`dict[str, torch.dtype]`):
            Of the parameters.
        buffers (`dict[str, torch.Tensor]`):
            The persistent buffers, with the last fragment.
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
    """

    shards: dict[str, torch.Tensor]
    dtypes: dict[str, torch.dtype]
    buffers: dict[str, torch.Tensor]
    besides: list[torch.Tensor]
    plans: dict[str, ExchangePlan]
    problems: list[str]
    copies: dict[str, int]
    ready: torch.Event | None

    def hold(self) -> Held:
        """What is handed to the exchange: a second copy, in which averages are formed. For the thread that exchanges."""
        means = {name: shard.clone() for name, shard in self.shards.items()}
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        finite = all_finite([*self.shards.values(), *self.besides])
        return Held(means, self.dtypes, means, {}, buffers, self.plans, finite, self.problems, self.copies)


class Snapshots:
    """
    Takes snapshots and gives their outcome to the model.

    Memory: a snapshot takes 4 bytes for each element of this rank's shards (8 of float64), which are kept from round to
    round; while an exchange is in flight its averages take as much again.

    Args:
        averager ([`ModelAverager`]):
            Of the model.
    """

    def __init__(self, averager: ModelAverager) -> None:
        self.averager = averager
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def take(self, fragment: int, names: Collection[str] | None, with_buffers: bool) -> Snapshot:
        """
        Copies what is averaged, without communication and, on a device, without waiting for it.

        Args:
            fragment (`int`):
                Its number. Its last snapshot is overwritten, so what came of that has to be in the model.
            names (`Collection[str]`, *optional*):
                Of its parameters; by default all.
            with_buffers (`bool`):
                Whether the buffers belong to it.

        Returns:
            [`Snapshot`]: The copies.
        """
        averager = self.averager
        reshard(averager.model)
        averager.trained.note_trainable()
        everything = averager.trained.averaged_shards()
        held = {name: shard for name, shard in everything.items() if names is None or name in names}
        target = self._storage(fragment, held)
        if held:
            torch._foreach_copy_(list(target.values()), list(held.values()), non_blocking=True)
        buffers = persistent_buffers(averager.model) if with_buffers else {}
        besides = averager.trained.checked_besides(everything, buffers) if with_buffers else []
        return Snapshot(
            shards=target,
            dtypes={name: shard.dtype for name, shard in held.items()},
            buffers={name: buffer.clone() for name, buffer in buffers.items()},
            besides=[torch.linalg.vector_norm(part, ord=float("inf")) for part in besides if _has_floats(part)],
            plans=averager.tensors.parameter_plans(target, f"fragment {fragment}"),
            problems=averager.trained.strays(),
            copies=averager.tensors.copies(held),
            ready=_record(averager.mesh.device, held),
        )

    def _storage(self, fragment: int, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = self._kept.get(fragment)
        if kept is not None and _signature(kept) == [
            (n, t.shape, accumulation_dtype(t.dtype)) for n, t in held.items()
        ]:
            return kept
        staged = self.averager.mesh.device.type == "cpu"
        made = {}
        for name, shard in held.items():
            pin = staged and shard.device.type == "cuda"
            device = torch.device("cpu") if staged else shard.device
            made[name] = torch.empty(shard.shape, dtype=accumulation_dtype(shard.dtype), device=device, pin_memory=pin)
        self._kept[fragment] = made
        return made

    @torch.no_grad()
    def put(
        self,
        held: Held,
        snapshot: Snapshot,
        share: float,
        replace: bool,
        settle: Callable[[Held], None],
    ) -> None:
        """
        Gives the model what came of a snapshot: `w + share (new - snapshot)`, so that the steps made meanwhile stay. Without
        communication.

        Floating-point buffers take their average: they are statistics, and a difference could make a variance negative.
        Integer ones, which count, keep what was counted meanwhile.

        Args:
            held ([`Held`]):
                From [`~Snapshot.hold`], after the exchange.
            snapshot ([`Snapshot`]):
                The snapshot.
            share (`float`):
                Of the way to the new model that is gone.
            replace (`bool`):
                Whether the new model is taken as it is, bit for bit.
            settle (`Callable[[Held], None]`):
                Makes the new model of the averages, in `means`.
        """
        averager = self.averager
        reshard(averager.model)
        shards = local_shards(averager.model, plain=averager.mesh.in_process)
        _keep_until_done(held.means, held.buffers)
        own = [shards[name] for name in held.means]
        is_plain = averager.outer.optimizer is None
        devices = {name: shards[name].device for name in held.means}
        means = {name: mean.to(devices[name], non_blocking=True) for name, mean in held.means.items()}
        settle(dataclasses.replace(held, shards=means, means=means, buffers={}))
        if replace and own:
            torch._foreach_copy_(own, list(means.values()))
        elif own:
            distance = [part.to(devices[name], non_blocking=True) for name, part in snapshot.shards.items()]
            if not is_plain:
                # In the place of the averages, which are the new model by now.
                new = list(means.values())
                torch._foreach_sub_(new, distance)
                distance = new
            torch._foreach_add_(own, distance, alpha=share)
        buffers = persistent_buffers(averager.model)
        for name, mean in held.buffers.items():
            if replace or mean.dtype.is_floating_point:
                buffers[name].copy_(mean)
            elif mean.dtype != torch.bool:
                buffers[name].add_((mean - snapshot.buffers[name]).to(buffers[name].device))

    def drop(self) -> None:
        """Frees the memory that is kept."""
        self._kept.clear()


@torch.no_grad()
def note_distance(held: Held, snapshot: Snapshot) -> None:
    """
    Turns a snapshot into its distance to the averages, in place. For the thread that exchanges.

    Args:
        held ([`Held`]):
            After a plain averaging.
        snapshot ([`Snapshot`]):
            The snapshot.
    """
    for name, shard in snapshot.shards.items():
        torch.sub(held.means[name], shard, out=shard)


def _signature(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


def _has_floats(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.is_floating_point()


def _keep_until_done(*several: Mapping[str, torch.Tensor]) -> None:
    """The other thread's stream must not get this memory back before the stream of the steps has read it."""
    for tensor in (tensor for tensors in several for tensor in tensors.values()):
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.accelerator.current_stream())


def _record(device: torch.device, held: Mapping[str, torch.Tensor]) -> torch.Event | None:
    """Notes, on the stream of the training steps, where the copies are made."""
    kinds = {shard.device.type for shard in held.values()} - {"cpu"} | ({device.type} - {"cpu"})
    if not kinds:
        return None
    event = torch.Event(device=kinds.pop())
    event.record()
    return event

"""Parameters that a border has made one model of although it was not their turn to be stepped: they have left their anchor."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .outer_memory import OuterMemory


class Apart:
    """
    Which parameters have left their anchor, and what of their average they could not hold.

    At a border all groups get one model, and with fragments the outer optimizer steps only those that have not had their turn.
    The others become their average, in the parameters' dtype, and move on from there; in their next turn the optimizer is to see
    all that they have moved since the last one. What a dtype of fewer bits than fp32 has rounded off the average is part of that:
    where the groups move by less than a step of it, it is all of it. So it is kept until that turn, in the same dtype: another
    2 bytes an element of bfloat16, which leave 2^-18 of a parameter unseen where it was 2^-9.

    Args:
        memory ([`OuterMemory`]):
            Says where it lives.
    """

    def __init__(self, memory: OuterMemory) -> None:
        self.memory = memory
        self.names: set[str] = set()
        """Of those that are apart. The same on all ranks."""
        self.remainders: dict[str, torch.Tensor] = {}
        """What was rounded off, by name, the same bits in all groups; nothing of parameters in fp32 or more."""

    def leave(self, name: str, mean: torch.Tensor, shard: torch.Tensor | None) -> None:
        """
        Gives a parameter its average.

        Args:
            name (`str`):
                Of the parameter.
            mean (`torch.Tensor`):
                The average of what the groups hold. Its content is lost.
            shard (`torch.Tensor`, *optional*):
                This rank's, written in place; it may be `mean` itself.
        """
        self.names.add(name)
        self.complete(name, mean)
        self.remainders.pop(name, None)
        if shard is None or shard is mean:
            return
        shard.copy_(mean)
        if shard.dtype != mean.dtype:
            self.remainders[name] = self.memory.copy(mean.sub_(shard), shard.device, shard.dtype)

    def complete(self, name: str, mean: torch.Tensor) -> None:
        """
        Adds to an average what the groups have moved by beside what their parameters say.

        Args:
            name (`str`):
                Of the parameter.
            mean (`torch.Tensor`):
                The average, written in place. On any device.
        """
        if name in self.remainders:
            mean.add_(self.remainders[name].to(mean.device))

    def rejoin(self, names: Iterable[str]) -> None:
        """
        Told of parameters that are at their anchor again, or have none.

        Args:
            names (`Iterable[str]`):
                Of them, and perhaps of others.
        """
        for name in names:
            self.names.discard(name)
            self.remainders.pop(name, None)

    def clear(self) -> None:
        """All are at their anchor."""
        self.names.clear()
        self.remainders.clear()

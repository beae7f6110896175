"""
The collectives of an averaging: through `torch.distributed` between processes, or in memory between groups that one
process simulates. Everything above this module is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist


Reduction: TypeAlias = Literal["sum", "min", "max"]
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class InMemoryGroup(ABC):
    """A group of peers in one process, in the place of a `ProcessGroup`. All peers make the same calls in one order."""

    @abstractmethod
    def size(self) -> int:
        """The number of peers."""

    @abstractmethod
    def rank(self) -> int:
        """This peer."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction = "sum") -> None:
        """
        Replaces a tensor by the sum over the peers, or by the least or greatest of each element.

        Args:
            tensor (`torch.Tensor`):
                Of one shape on all peers, written in place.
            reduction (`str`, defaults to `"sum"`):
                `"sum"`, `"min"` or `"max"`.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, group_src: int) -> None:
        """
        Replaces a tensor by that of one peer.

        Args:
            tensor (`torch.Tensor`):
                Of one shape on all peers, written in place.
            group_src (`int`):
                The peer.
        """

    @abstractmethod
    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """
        Hands each peer its row.

        Args:
            received (`torch.Tensor`):
                Of shape `(P, N)`: what each peer has for this one, written in place.
            sent (`torch.Tensor`):
                Of the same shape: what this one has for each peer.
        """

    @abstractmethod
    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """
        Puts the parts of all peers together.

        Args:
            whole (`torch.Tensor`):
                Of shape `(P, N)`, written in place.
            part (`torch.Tensor`):
                Of shape `(1, N)`, this peer's.
        """


Group: TypeAlias = dist.ProcessGroup | InMemoryGroup


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Waits for its result."""


class _Done:
    def wait(self) -> None:
        """There is nothing to wait for."""


def start_all_reduce(tensor: torch.Tensor, group: Group) -> Pending:
    """
    Starts to replace a tensor by the sum over a group.

    Args:
        tensor (`torch.Tensor`):
            Written in place, to be left alone until the result has been waited for.
        group (`ProcessGroup` or [`InMemoryGroup`]):
            The peers.
    """
    if isinstance(group, InMemoryGroup):
        group.all_reduce(tensor)
        return _Done()
    return dist.all_reduce(tensor, group=group, async_op=True)


def all_reduce(tensor: torch.Tensor, group: Group, reduction: Reduction = "sum") -> None:
    """
    Replaces a tensor by the sum over a group, or by the least or greatest of each element.

    Args:
        tensor (`torch.Tensor`):
            Written in place.
        group (`ProcessGroup` or [`InMemoryGroup`]):
            The peers.
        reduction (`str`, defaults to `"sum"`):
            `"sum"`, `"min"` or `"max"`.
    """
    if isinstance(group, InMemoryGroup):
        group.all_reduce(tensor, reduction)
    else:
        dist.all_reduce(tensor, _REDUCE_OPS[reduction], group=group)


def start_all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Group) -> Pending:
    """
    Starts to hand each peer its row.

    Args:
        received (`torch.Tensor`):
            Of shape `(P, N)`, contiguous: row `p` is to be what peer `p` has for this one.
        sent (`torch.Tensor`):
            Of the same shape: row `p` is for peer `p`. Both to be left alone until the result has been waited for.
        group (`ProcessGroup` or [`InMemoryGroup`]):
            The P peers.
    """
    if isinstance(group, InMemoryGroup):
        group.all_to_all(received, sent)
        return _Done()
    return dist.all_to_all_single(received, sent, group=group, async_op=True)


def broadcast(tensor: torch.Tensor, group: Group, group_src: int = 0) -> None:
    """
    Replaces a tensor by that of one peer.

    Args:
        tensor (`torch.Tensor`):
            Written in place.
        group (`ProcessGroup` or [`InMemoryGroup`]):
            The peers.
        group_src (`int`, defaults to `0`):
            Which.
    """
    if isinstance(group, InMemoryGroup):
        group.broadcast(tensor, group_src)
    else:
        dist.broadcast(tensor, group_src=group_src, group=group)


def broadcast_from_first(tensor: torch.Tensor, fed: Group, group: Group) -> None:
    """
    Replaces a tensor by that of the first rank of group 0, on all ranks. Collective over the world: over the groups by the first
    rank of each alone, so that the slow tier carries it once, then inside each group.

    Args:
        tensor (`torch.Tensor`):
            Written in place.
        fed (`ProcessGroup` or [`InMemoryGroup`]):
            The ranks that stand where this one does in every group.
        group (`ProcessGroup` or [`InMemoryGroup`]):
            All ranks of this rank's group.
    """
    if group.rank() == 0:
        broadcast(tensor, fed)
    broadcast(tensor, group)


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: Group) -> None:
    """
    Puts the parts of all peers together.

    Args:
        whole (`torch.Tensor`):
            Contiguous, the parts along its first dim; written in place.
        part (`torch.Tensor`):
            This peer's.
        group (`ProcessGroup` or [`InMemoryGroup`]):
            The peers.
    """
    if isinstance(group, InMemoryGroup):
        group.all_gather(whole, part)
    else:
        dist.all_gather_single(whole, part, group=group)

"""Groups of one process as each other's peers: what meshes and process groups are between processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from .collectives import InMemoryGroup, Reduction
from .layout import FederationLayout


T = TypeVar("T")
_COMBINE: dict[Reduction, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Meeting:
    """
    Where the threads of the groups exchange tensors, while a round is closed.

    Args:
        num_peers (`int`):
            The groups.
    """

    def __init__(self, num_peers: int) -> None:
        self.barrier = threading.Barrier(num_peers)
        self.tensors: list[torch.Tensor | None] = [None] * num_peers
        self.result: torch.Tensor | None = None

    def hold(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """
        Has something done by all groups at once, each in a thread, since they wait for each other in it.

        Args:
            calls (`Sequence[Callable]`):
                One of each group.

        Returns:
            `list`: What each of them has returned. Raises what the first of those that failed by itself has raised.
        """
        self.barrier.reset()

        def called(call: Callable[[], T]) -> T:
            try:
                return call()
            except BaseException:
                # The others would wait for this one.
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(called, call) for call in calls]
        errors = [error for future in futures if (error := future.exception()) is not None]
        # A broken barrier follows from another group's error.
        causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (causes or errors)[0]
        return [future.result() for future in futures]


class InMemoryPeer(InMemoryGroup):
    """
    One group among all. Sums are formed in the order of the groups, so that they are the same in every run.

    Args:
        meeting ([`Meeting`]):
            Where it meets the others.
        rank (`int`):
            Its number.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self._rank = rank

    def size(self) -> int:
        """The number of peers."""
        return len(self.meeting.tensors)

    def rank(self) -> int:
        """This peer."""
        return self._rank

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction = "sum") -> None:
        """See [`InMemoryGroup`]."""

        def combine() -> torch.Tensor:
            total = self._deposited(0).clone()
            for peer in range(1, self.size()):
                _COMBINE[reduction](total, self._deposited(peer), out=total)
            return total

        self._meet(tensor, combine)

    def broadcast(self, tensor: torch.Tensor, group_src: int) -> None:
        """See [`InMemoryGroup`]."""
        self._meet(tensor, lambda: self._deposited(group_src).clone())

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See [`InMemoryGroup`]."""
        self._read(sent, lambda peer: received[peer].copy_(self._deposited(peer)[self._rank]))

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """See [`InMemoryGroup`]."""
        self._read(part, lambda peer: whole[peer].copy_(self._deposited(peer)[0]))

    def _read(self, tensor: torch.Tensor, take: Callable[[int], object]) -> None:
        # All have brought their tensor; each takes what it needs; only then may a tensor be changed.
        meeting = self.meeting
        meeting.tensors[self._rank] = tensor
        meeting.barrier.wait()
        for peer in range(self.size()):
            take(peer)
        meeting.barrier.wait()

    def _meet(self, tensor: torch.Tensor, combine: Callable[[], torch.Tensor]) -> None:
        # All have brought their tensor; the first one combines; all take the result; only then may the next call begin.
        meeting = self.meeting
        meeting.tensors[self._rank] = tensor
        meeting.barrier.wait()
        if self._rank == 0:
            meeting.result = combine()
        meeting.barrier.wait()
        assert meeting.result is not None
        tensor.copy_(meeting.result)
        meeting.barrier.wait()

    def _deposited(self, peer: int) -> torch.Tensor:
        tensor = self.meeting.tensors[peer]
        assert tensor is not None
        return tensor


class Alone(InMemoryGroup):
    """The only rank of a group."""

    def size(self) -> int:
        """The number of peers."""
        return 1

    def rank(self) -> int:
        """This peer."""
        return 0

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction = "sum") -> None:
        """See [`InMemoryGroup`]."""

    def broadcast(self, tensor: torch.Tensor, group_src: int) -> None:
        """See [`InMemoryGroup`]."""

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See [`InMemoryGroup`]."""
        received.copy_(sent)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """See [`InMemoryGroup`]."""
        whole.copy_(part)


class AtOnce:
    """
    In the place of the thread of the slow tier: an averaging is done where it is started, by all groups together, and what came
    of it lies ready until it is due.

    That is the averaging beside the steps to the bit. It works on snapshots, and what else it reads, the anchors of what it
    averages, changes only where outcomes are taken in: its own, and at a border, by which time it has ended in processes too.

    Args:
        device (`torch.device`):
            Where the models live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """
        Does a job, without gradients.

        Args:
            job (`Callable`):
                Meets the jobs of the other groups, in their threads.

        Returns:
            `Future`: Done. An exception of the job is raised here, so that the caller can let the others go.
        """
        future: Future[T] = Future()
        with torch.no_grad():
            future.set_result(job())
        return future


@dataclass(frozen=True)
class SimulatedPeers:
    """
    The place of a simulated group among the others: what [`FederationMesh`] is for processes.

    Args:
        layout ([`FederationLayout`]):
            G groups of one rank.
        fed (`InMemoryGroup`):
            All groups.
        group (`InMemoryGroup`):
            The group's only rank.
        device (`torch.device`):
            Where the models live.
    """

    layout: FederationLayout
    fed: InMemoryGroup
    group: InMemoryGroup
    device: torch.device
    replicate: None = None
    in_process: bool = True

    @property
    def worker(self) -> AtOnce:
        """Averages beside the steps."""
        return AtOnce(self.device)

    @property
    def host(self) -> SimulatedPeers:
        """These: there is no kernel that waits for others."""
        return self

    def wait(self) -> None:
        """Nothing to wait for: an averaging is over when it has been started."""

    @property
    def group_index(self) -> int:
        """g, this group."""
        return self.fed.rank()

    @property
    def is_main(self) -> bool:
        """Whether this group speaks for all."""
        return self.group_index == 0

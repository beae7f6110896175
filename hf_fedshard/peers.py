"""Whom a rank averages with, as the core asks it: of processes or of groups in one process, beside the steps or not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from .collectives import Group
from .layout import FederationLayout


T = TypeVar("T")


class Peers(Protocol):
    """
    What an averaging asks of a federation: who this rank's peers are. [`FederationMesh`] answers for processes,
    [`SimulatedPeers`] for groups that one process holds.
    """

    @property
    def layout(self) -> FederationLayout:
        """The sizes."""

    @property
    def fed(self) -> Group:
        """Those that hold this rank's shard in every group, in the order of the groups."""

    @property
    def replicate(self) -> Group | None:
        """Those of this group that hold the same shard; `None` with one replica."""

    @property
    def group(self) -> Group:
        """All ranks of this rank's group."""

    @property
    def group_index(self) -> int:
        """g, the group of this rank."""

    @property
    def device(self) -> torch.device:
        """Where buffers of collectives live."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that speaks for all, in logs say."""

    @property
    def in_process(self) -> bool:
        """Whether the groups are simulated in one process, where parameters are whole and plain tensors."""

    def wait(self) -> None:
        """Waits until no other thread of this rank uses the communicators."""


class Worker(Protocol):
    """What runs the averagings that are in flight, one after another."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Has a job done after all that were submitted before it."""

    @property
    def device(self) -> torch.device:
        """Of the training steps."""


class OverlapPeers(Peers, Protocol):
    """Peers that average beside the training steps: [`SlowTier`] of processes, [`SimulatedPeers`] of groups in one."""

    @property
    def worker(self) -> Worker:
        """Runs what is averaged beside the steps."""

    @property
    def host(self) -> Peers:
        """The same peers through host memory."""

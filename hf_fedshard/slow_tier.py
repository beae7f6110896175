"""The slow tier as a second set of communicators, and the one thread that uses it while training steps go on."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .layout import FederationLayout


logger = logging.getLogger(__name__)

SLOW_BACKENDS = ("gloo", "nccl")
# Streaming multiprocessors that a reduction over a slow link may hold while it waits: NCCL's kernels spin. A link between
# nodes needs no more.
MAX_CTAS = 4

T = TypeVar("T")
_workers: weakref.WeakSet[SlowTierWorker] = weakref.WeakSet()


class SlowTierWorker:
    """
    Runs jobs one after another in a thread of its own, in the order in which they are submitted.

    On a device the thread has a stream of its own, so that nothing it launches or waits for touches the stream of the
    training steps. The thread is a daemon and starts with the first job: a process that fails elsewhere does not wait for
    it.

    Args:
        device (`torch.device`):
            Of the collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        _workers.add(self)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """
        Has a job done after all that were submitted before it.

        Args:
            job (`Callable`):
                Runs without gradients.

        Returns:
            `Future`: Of what it returns; an exception of the job is raised by `result()`, as it is.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hf_fedshard slow tier", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def finish(self) -> None:
        """Waits for the jobs that were submitted, and ends the thread. The next job starts another."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)
            torch.accelerator.set_stream(torch.Stream(device=self.device))
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                with torch.no_grad():
                    result = job()
            except BaseException as error:  # whatever it is belongs to the thread that trains
                future.set_exception(error)
            else:
                future.set_result(result)
            # Not until the next job: tensors of the last one would live as long.
            del item, job, future


def finish_workers() -> None:
    """Waits for what all workers of this process are doing, and ends their threads."""
    for worker in list(_workers):
        worker.finish()


class SlowTier:
    """
    The peers of this rank on communicators that nobody else uses: between groups, between the replicas of a group, and
    inside a group. The thread that averages beside the training steps must not share one with them: two threads of one
    rank would issue collectives in an order of their own on each rank.

    Construction is collective over those ranks that share a communicator, in the same order on each: inside the group, its
    replicas, between groups.

    Args:
        layout ([`FederationLayout`]):
            The sizes.
        device_type (`str`):
            Of the mesh.
        group (`ProcessGroup`):
            All ranks of this rank's group.
        replicate (`ProcessGroup`, *optional*):
            Those of them that hold the same shard.
        fed (`ProcessGroup`):
            Those that hold it in all groups.
        backend (`str`, *optional*):
            `"gloo"` beside NCCL carries everything through host memory, without a kernel on the device; by default the
            backend of the device, NCCL with at most `MAX_CTAS` thread blocks.

    Attributes:
        group, replicate, fed (`ProcessGroup`): As the arguments, with communicators of its own.
        backend (`str` or `None`): As the argument.
        worker ([`SlowTierWorker`]): Runs what is averaged beside the steps.
    """

    def __init__(
        self,
        layout: FederationLayout,
        device_type: str,
        group: dist.ProcessGroup,
        replicate: dist.ProcessGroup | None,
        fed: dist.ProcessGroup,
        backend: str | None = None,
    ) -> None:
        self.layout = layout
        self.backend = backend
        self.device_type = "cpu" if backend == "gloo" else device_type
        if backend == "nccl" and device_type != "cuda":
            raise ValueError(
                f"slow_backend='nccl' needs NVIDIA GPUs, but this run trains on {device_type}. Leave slow_backend unset."
            )
        if self.device_type == "cuda":
            backend = "nccl"
        self.group = _twin(group, backend, "inside a group")
        self.replicate = None if replicate is None else _twin(replicate, backend, "replicas")
        self.fed = _twin(fed, backend, "between groups")
        self.group_index = self.fed.rank()
        self.worker = SlowTierWorker(self.device)

    @property
    def device(self) -> torch.device:
        """Where buffers of collectives live: host memory with gloo, else the current device of the mesh's type."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0."""
        return dist.get_rank() == 0

    @property
    def in_process(self) -> bool:
        """Never: these groups are processes."""
        return False

    def process_groups(self) -> list[dist.ProcessGroup]:
        """All of its communicators."""
        return [group for group in (self.group, self.replicate, self.fed) if group is not None]


def _twin(group: dist.ProcessGroup, backend: str | None, purpose: str) -> dist.ProcessGroup:
    """A communicator of the same ranks. Its members alone meet for it, not the world."""
    options: Any = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        if hasattr(getattr(options, "config", None), "max_ctas"):
            options.config.max_ctas = MAX_CTAS
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(
        ranks,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=f"hf_fedshard slow tier, {purpose}",
    )

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

from .collectives import all_gather, all_reduce, broadcast, start_all_to_all
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
    training steps. Also where the collectives run on the CPU: parameters, anchors and buffers are on the device all the
    same. The thread is a daemon and starts with the first job: a process that fails elsewhere does not wait for it.

    Args:
        device (`torch.device`):
            Of the training steps.
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

    def wait(self) -> None:
        """Waits until the jobs that were submitted are over, however they ended. Costs nothing before the first."""
        if self._thread is not None:
            self.submit(lambda: None).result()

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
            _do(*item)
            # Not until the next job: tensors of the last one would live as long.
            del item


def _do(job: Callable[[], Any], future: Future[Any]) -> None:
    """A function of its own: none of the job, its future and its result is held when it has returned."""
    try:
        with torch.no_grad():
            future.set_result(job())
    except BaseException as error:  # whatever it is belongs to the thread that trains
        future.set_exception(error)


def finish_workers() -> None:
    """Waits for what all workers of this process are doing, and ends their threads."""
    for worker in list(_workers):
        worker.finish()


def tier_backend(device_type: str, slow_backend: str | None) -> str | None:
    """
    The backend that a setting means. Tiers of one backend are the same.

    Args:
        device_type (`str`):
            Of the mesh.
        slow_backend (`str`, *optional*):
            The setting.

    Returns:
        `str` or `None`: `None` for torch's default on a device that is neither named nor NVIDIA's.
    """
    return "nccl" if slow_backend is None and device_type == "cuda" else slow_backend


class SlowTier:
    """
    The peers of this rank on communicators that nobody else uses: between groups, between the replicas of a group, and
    inside a group. The thread that averages beside the training steps must not share one with them: two threads of one
    rank would issue collectives in an order of their own on each rank.

    Construction is collective over the world. Communicators are made by all ranks in the same order, since torch names
    them by how many the world has made: named by their members alone, they would not meet where a script has made groups
    of some ranks before. Then each is used once, see [`~SlowTier._meet`].

    Args:
        layout ([`FederationLayout`]):
            The sizes.
        device_type (`str`):
            Of the mesh.
        backend (`str`, *optional*):
            `"gloo"` beside NCCL carries everything through host memory, without a kernel on the device; by default the
            backend of the device, NCCL with at most `MAX_CTAS` thread blocks.

    Attributes:
        group, replicate, fed (`ProcessGroup`):
            All ranks of this rank's group; those of them that hold the same shard (`None` with one replica); those that
            hold it in all groups.
        backend (`str` or `None`):
            See [`tier_backend`].
        host ([`SlowTier`]):
            The same peers through host memory, to wait for each other without a kernel that spins on the device.
        worker ([`SlowTierWorker`]):
            Runs what is averaged beside the steps.
    """

    def __init__(self, layout: FederationLayout, device_type: str, backend: str | None = None) -> None:
        self.layout = layout
        self.backend = tier_backend(device_type, backend)
        self.device_type = "cpu" if self.backend == "gloo" else device_type
        if self.backend == "nccl" and device_type != "cuda":
            raise ValueError(
                f"slow_backend='nccl' needs NVIDIA GPUs, but this run trains on {device_type}. Leave slow_backend unset."
            )
        ranks = torch.arange(layout.world_size).view(layout.num_groups, layout.replicate_size, -1)
        self.group = _subgroup(ranks.flatten(1), self.backend, "inside a group")
        self.replicate: dist.ProcessGroup | None = None
        if layout.replicate_size > 1:
            self.replicate = _subgroup(ranks.transpose(1, 2).flatten(0, 1), self.backend, "replicas")
        self.fed = _subgroup(ranks.flatten(1).t(), self.backend, "between groups")
        self.group_index = self.fed.rank()
        self.host = self if self.device_type == "cpu" else SlowTier(layout, device_type, "gloo")
        self.worker = SlowTierWorker(_device(device_type))
        self._meet()

    @property
    def device(self) -> torch.device:
        """Where buffers of collectives live: host memory with gloo, else the current device of the mesh's type."""
        return _device(self.device_type)

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0."""
        return dist.get_rank() == 0

    @property
    def in_process(self) -> bool:
        """Never: these groups are processes."""
        return False

    def wait(self) -> None:
        """Waits for the thread, which may be averaging for another federation."""
        self.worker.wait()

    def process_groups(self) -> list[dist.ProcessGroup]:
        """All of its communicators."""
        own = [group for group in (self.group, self.replicate, self.fed) if group is not None]
        return own if self.host is self else own + self.host.process_groups()

    def _meet(self) -> None:
        """
        One small collective of each kind on each communicator, in the thread that constructs. NCCL makes a communicator
        with its first collective and connects with the first of a kind; that allocates and waits for the device, which one
        thread must not do while another launches. Order: inside the group, its replicas, between groups, on all ranks.
        """
        for group in (self.group, self.replicate, self.fed):
            if group is None:
                continue
            part = torch.zeros(1, 1, device=self.device)
            parts, others = (torch.zeros(group.size(), 1, device=self.device) for _ in range(2))
            all_reduce(part, group)
            broadcast(part, group)
            all_gather(parts, part, group)
            start_all_to_all(others, parts, group).wait()
        if self.device_type != "cpu":
            torch.accelerator.current_stream().synchronize()


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _subgroup(ranks: torch.Tensor, backend: str | None, purpose: str) -> dist.ProcessGroup:
    """The communicator of that row of ranks which this rank is in. Collective over the world."""
    options: Any = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        if hasattr(getattr(options, "config", None), "max_ctas"):
            options.config.max_ctas = MAX_CTAS
        elif dist.get_rank() == 0:
            logger.warning(
                "This build of torch cannot limit NCCL's thread blocks (ncclConfig max_ctas): while an averaging waits for "
                "a slow link it takes more of the device from the training steps."
            )
    own, _ = dist.new_subgroups_by_enumeration(
        ranks.tolist(), backend=backend, pg_options=options, group_desc=f"hf_fedshard slow tier, {purpose}"
    )
    return own

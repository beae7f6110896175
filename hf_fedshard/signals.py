"""The request of a scheduler to end: SIGTERM, noted and nothing else, and kept from the workers of data loaders."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader


class TerminationSignal:
    """
    Notes when this process was told to end.

    The handler sets a number and does no work: it may run between any two lines of the training, in the middle of a step or
    of a save. What was installed before is called after it, so that nobody else's handler is lost, and comes back with
    [`~TerminationSignal.restore`].
    """

    def __init__(self) -> None:
        self.received_at: float | None = None
        """Time of the first signal, in seconds since the epoch: the processes of other nodes are told of it."""
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        """Takes SIGTERM over. In the main thread, as Python demands."""
        self.received_at = None
        if not self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def restore(self) -> None:
        """Puts the former handler back, unless somebody has taken SIGTERM over since."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received_at is None:
            self.received_at = time.time()
        if callable(self._previous):
            self._previous(number, frame)


class _Shielded:
    """A `worker_init_fn` that keeps SIGTERM from a worker, and calls the one that was there. Can be pickled, for `spawn`."""

    def __init__(self, original: Callable[[int], Any] | None) -> None:
        self.original = original

    def __call__(self, worker: int) -> None:
        if hasattr(signal, "sigwaitinfo"):  # not on macOS
            # Waited for and not ignored, since the rank itself ends workers with SIGTERM and then waits for them to go.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_for_the_rank, daemon=True).start()
        if self.original is not None:
            self.original(worker)


def shield_workers(dataloader: Any) -> None:
    """
    Has the workers of a data loader survive a SIGTERM that is not their rank's. Launchers send it to the process group of a
    rank, workers included; without them the rank could not make the steps that are left.

    Args:
        dataloader (`DataLoader`):
            Prepared or not; anything else is left alone. Workers that run already are not changed.
    """
    loader = getattr(dataloader, "base_dataloader", dataloader)  # what Accelerate has prepared reads from another one
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, _Shielded):
        loader.worker_init_fn = _Shielded(loader.worker_init_fn)


def _end_for_the_rank() -> None:
    parent = multiprocessing.parent_process()
    while parent is None or signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)

"""The request of a scheduler to end: SIGTERM, noted and nothing else."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any


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

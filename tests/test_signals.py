"""SIGTERM is noted, former handlers are called and come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from hf_fedshard.signals import TerminationSignal


@pytest.fixture(autouse=True)
def _keep_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_noted_and_chained() -> None:
    seen: list[int] = []

    def former(number: int, frame: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, former)
    noted = TerminationSignal()
    noted.install()
    assert noted.received_at is None
    before = time.time()
    os.kill(os.getpid(), signal.SIGTERM)
    first = noted.received_at
    assert first is not None and before <= first <= time.time()
    os.kill(os.getpid(), signal.SIGTERM)
    assert noted.received_at == first and seen == [signal.SIGTERM] * 2
    noted.restore()
    assert signal.getsignal(signal.SIGTERM) is former
    noted.install()
    assert noted.received_at is None, "a new training has not been told yet"
    noted.restore()


def test_a_later_handler_is_left_in_place() -> None:
    noted = TerminationSignal()
    noted.install()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    noted.restore()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN

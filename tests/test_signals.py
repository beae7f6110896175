"""SIGTERM is noted, former handlers are called and come back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from accelerate.data_loader import DataLoaderShard, skip_first_batches
from torch.utils.data import DataLoader

from hf_fedshard.signals import TerminationSignal, shield_workers


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


def seen_by(worker: int) -> None:
    os.environ["SEEN_BY"] = str(worker)


def read(index: list[int]) -> tuple[int, str]:
    time.sleep(0.05)
    return index[0], os.environ["SEEN_BY"]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_survive_a_signal_of_others(method: str) -> None:
    """The launcher's, as it is sent to a rank's process group; a rank's own still ends its workers."""
    loader = DataLoaderShard(
        range(40), num_workers=2, collate_fn=read, worker_init_fn=seen_by, multiprocessing_context=method
    )
    shield_workers(loader)
    shield_workers(loader)  # an evaluation's loader is handed out again
    inner = iter(skip_first_batches(loader, 3).base_dataloader)
    assert [next(inner), next(inner)] == [(3, "0"), (4, "1")], "both workers are there, with what their user gave them"
    workers = inner._workers  # type: ignore[attr-defined]
    for worker in workers:
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    time.sleep(0.3)
    assert [number for number, _ in inner][-1] == 39 and all(
        worker.is_alive() or worker.exitcode == 0 for worker in workers
    )
    again = iter(loader.base_dataloader)
    assert [next(again), next(again)] == [(0, "0"), (1, "1")]
    for worker in again._workers:  # type: ignore[attr-defined]
        worker.terminate()
        worker.join(5)
        assert worker.exitcode == 0


def test_loaders_without_workers_are_left_alone() -> None:
    loader = DataLoader(range(4))
    shield_workers(loader)
    shield_workers([1, 2])
    assert loader.worker_init_fn is None

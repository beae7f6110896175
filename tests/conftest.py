"""Fixtures of the whole suite. Nothing starts before a test asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness.environment import SERVER_ENV
from tests.harness.pool import WorkerPool


# Two cores, several processes: threads of the test process would only take time from the ranks. Set before torch,
# datasets and huggingface_hub read them.
for _name, _value in SERVER_ENV.items():
    os.environ.setdefault(_name, _value)

# Torch is imported already, through the harness, and does not look again.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def world4() -> Iterator[WorkerPool]:
    """Four ranks: 2 groups of 2. Starts in 3 s, once; an idle world costs no time and 50 MB a rank."""
    pool = WorkerPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def world8() -> Iterator[WorkerPool]:
    """Eight ranks: FL+HSDP with 2 groups of 2 replicas of 2 shards."""
    pool = WorkerPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def worlds(world4: WorkerPool, world8: WorkerPool) -> Iterator[dict[int, list[WorkerPool]]]:
    """Worlds by their number of ranks, for tests that need several of a size. A test adds what it lacks."""
    pools = {4: [world4], 8: [world8]}
    yield pools
    for pool in (pool for of_size in pools.values() for pool in of_size):
        if pool not in (world4, world8):
            pool.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Type of device for a body: the same body runs on both."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


@pytest.fixture(scope="session")
def netns() -> None:
    """Skips where network namespaces cannot be made."""
    from tests.harness.netns import unavailable_reason

    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT

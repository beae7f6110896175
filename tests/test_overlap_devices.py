"""Averaging beside the steps where the worker or the steps are late: on GPUs, whose streams that holds up, and on CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.harness.overlap_devices import CASES, check_buffers, check_cases
from tests.harness.pool import WorkerPool


QUICK = ("snapshots in turns",)


def test_whoever_is_late(world4: WorkerPool) -> None:
    """The bodies of the script for GPUs, so that it is known to run but for the device."""
    assert all(set(errors) == set(QUICK) for errors in world4.run(check_cases, "cpu", None, QUICK))
    world4.run(check_buffers, "cpu", None)


@pytest.mark.slow
def test_all_cases(world4: WorkerPool) -> None:
    for errors in world4.run(check_cases, "cpu", "gloo", limit_seconds=240):
        assert set(errors) == {name for name, case in CASES.items() if case.has_reference}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_on_gpus(backend: str) -> None:
    """Not run where this was written: needs 4 GPUs and `torchrun --nproc_per_node 4 tests/scripts/overlap_on_gpus.py`."""
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4"]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_LAUNCH_BLOCKING"}
    subprocess.run([*command, "tests/scripts/overlap_on_gpus.py", backend], check=True, timeout=300, env=env)

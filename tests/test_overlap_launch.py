"""How processes end that average beside their steps."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.launch import child_env


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["finish", "in flight", "error"])
def test_processes_end_in_order(root: Path, ending: str) -> None:
    script = root / "tests" / "scripts" / "overlap_run.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4", "--master_port", "0"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(script), ending],
        env=child_env({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(done.stderr[-3000:])
    if ending != "error":
        assert done.returncode == 0
        return
    # An averaging waits for a rank that sleeps, and the process that has failed does not wait for it.
    assert done.returncode == 1
    assert "KeyError: 'an error of the script'" in done.stderr
    assert "exitcode  : 1 " in done.stderr
    assert time.monotonic() - started < 200

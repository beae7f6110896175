"""One rank with another setting ends a whole launch, soon and with a message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness.launch import accelerate_launch


SCRIPT = """
import os, pathlib, sys
from hf_fedshard import shutdown
from tests.harness.tiny_trainer import tiny_trainer
wrong = os.environ["RANK"] == "1"
pathlib.Path(sys.argv[1], "started" + os.environ["RANK"]).touch()
if sys.argv[2] == "constructor":
    tiny_trainer(sys.argv[1], sync_every=0 if wrong else 8)
else:
    tiny_trainer(sys.argv[1], max_steps=7 if wrong else 8).train()
shutdown()
"""


@pytest.mark.parametrize(
    ("where", "message"),
    [
        # Its peers wait for it in the handshake, until the launcher ends them.
        pytest.param("constructor", "sync_every must be an integer of at least 1, a list", id="before the handshake"),
        pytest.param(
            "training", "max_steps: 8 on ranks 0, 2-3; 7 on rank 1", id="in the handshake", marks=pytest.mark.slow
        ),
    ],
)
def test_a_launch_with_one_wrong_rank_ends(root: Path, tmp_path: Path, where: str, message: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    config = root / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml"
    result = accelerate_launch(config, script, str(tmp_path), where, limit_seconds=150)
    ended = time.time()
    assert not result.timed_out
    assert result.code not in (0, -9)
    assert message in result.output
    # From there on: imports take their time on a busy machine, a wait for gloo's own timeout would take 30 minutes.
    started = max(path.stat().st_mtime for path in tmp_path.glob("started*"))
    assert ended - started < 60

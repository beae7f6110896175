"""Launches in subprocesses, their environment, two nodes with a slow link."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.launch import accelerate_launch, run_tree
from tests.harness.launch_env import fsdp_config, launch_env
from tests.harness.netns import TwoTierNetwork


SHOW_ENVIRONMENT = """
import json, os, sys
path = os.path.join(sys.argv[1], os.environ["RANK"] + ".json")
json.dump({k: v for k, v in os.environ.items()}, open(path, "w"))
"""


def test_launch_env_is_what_accelerate_sets(tmp_path: Path) -> None:
    import json

    config, script = tmp_path / "config.yaml", tmp_path / "show.py"
    config.write_text(yaml.safe_dump(fsdp_config(2, 1, mixed_precision="bf16", dp_note=1) | {"num_processes": 2}))
    script.write_text(SHOW_ENVIRONMENT)
    accelerate_launch(config, script, str(tmp_path)).check()
    seen = json.loads((tmp_path / "1.json").read_text())
    expected = launch_env(config)
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    assert {name: value for name, value in seen.items() if name.startswith(prefixes)} == expected
    assert expected["FSDP_VERSION"] == "2"
    assert expected["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert expected["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert seen["OMP_NUM_THREADS"] == "1"


# As torchrun does: a rank leads a session of its own.
START_RANK = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], start_new_session=True)
print("waiting", flush=True)
time.sleep(600)
"""


def test_limit_leaves_no_process(tmp_path: Path) -> None:
    import psutil

    mark = str(tmp_path)
    result = run_tree([sys.executable, "-c", START_RANK, mark], limit_seconds=2)
    assert result.timed_out
    with pytest.raises(AssertionError, match="(?s)no end after .*waiting"):
        result.check()
    assert not [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]


TALK = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
if sys.argv[1] == "inside":
    dist.all_reduce(torch.ones(250_000), group=inside)
else:
    dist.all_reduce(torch.ones(250_000))
dist.barrier(); dist.destroy_process_group()
"""


@pytest.mark.netns
def test_two_tier_network_counts_what_crosses(netns: None, tmp_path: Path) -> None:
    config, script = tmp_path / "config.yaml", tmp_path / "talk.py"
    config.write_text(yaml.safe_dump(fsdp_config(2, 2)))
    script.write_text(TALK)
    crossed = {}
    with TwoTierNetwork(rate="200mbit") as network:
        for where in ("inside", "across"):
            before = network.link_bytes()
            for result in network.launch(config, script, where):
                result.check()
            crossed[where] = network.link_bytes() - before
        failing = [(0, [sys.executable, "-c", "raise SystemExit(7)"], {}), (1, ["sleep", "60"], {})]
        codes = [result.code for result in network.run(failing, limit_seconds=20)]
    assert codes[0] == 7
    assert codes[1] != 0
    # 1 MB over 4 ranks of a ring: each of two links between the nodes carries 2 * 3/4 of it.
    assert crossed["inside"] < 200_000
    assert 1_000_000 < crossed["across"] - crossed["inside"] < 5_000_000

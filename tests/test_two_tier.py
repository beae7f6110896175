"""Bytes on the link between two nodes: next to none inside a round, and at a border what the metrics say."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import yaml

from tests.harness.launch_env import fsdp_config
from tests.harness.netns import TwoTierNetwork


MARKS = ("round_begins", "round_ends", "border_begins", "border_ends")
ROUND_SECONDS = 30.0
MAX_ROUND_BYTES = 100_000


def read_counters(network: TwoTierNetwork, folder: Path, seen: dict[str, tuple[float, int]]) -> None:
    """Reads the link's counter at each mark of the run, and lets the run go on."""
    for name in MARKS:
        deadline = time.monotonic() + 200
        while not (folder / name).exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        seen[name] = (time.monotonic(), network.link_bytes())
        (folder / name).unlink()


@pytest.mark.netns
@pytest.mark.slow
def test_bytes_on_the_link(netns: None, root: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(fsdp_config(2, 2)))
    seen: dict[str, tuple[float, int]] = {}
    with TwoTierNetwork(rate="200mbit") as network:
        reader = threading.Thread(target=read_counters, args=(network, tmp_path, seen), daemon=True)
        reader.start()
        script = root / "tests" / "scripts" / "two_tier_run.py"
        for result in network.launch(config, script, str(tmp_path), str(ROUND_SECONDS), limit_seconds=280):
            result.check()
        reader.join(timeout=5)
    told = json.loads((tmp_path / "told.json").read_text())
    assert list(seen) == list(MARKS)

    inside = seen["round_ends"][1] - seen["round_begins"][1]
    seconds = seen["round_ends"][0] - seen["round_begins"][0]
    border = seen["border_ends"][1] - seen["border_begins"][1]
    print(f"{inside} bytes in a round of {seconds:.0f} s; {border} at the border, {told}")
    assert seconds >= 0.9 * ROUND_SECONDS
    assert inside <= MAX_ROUND_BYTES

    # Each of 2 groups sends the whole model once, in fp32; both directions are on the counter.
    assert told["bytes_sent"] == pytest.approx(4 * told["elements"], rel=0.01)
    # Headers, acknowledgements and the metrics come on top.
    assert 1.0 <= border / (2 * told["bytes_sent"]) <= 1.15

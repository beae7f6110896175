"""The same equivalence as a user gets it: `accelerate launch`, one of our config files, the callback as a class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tests.harness.comparison import assert_matches, refer
from tests.harness.launch import accelerate_launch
from tests.harness.trainer_runs import MAX_GRAD_NORM
from tests.test_trainer_equivalence import native


@pytest.mark.parametrize(
    ("config", "env"),
    [
        pytest.param("cpu_fl_fsdp_4proc.yaml", {}, id="fl_fsdp"),
        pytest.param("cpu_fl_hsdp_8proc.yaml", {"FEDSHARD_NUM_GROUPS": "2"}, id="fl_hsdp", marks=pytest.mark.slow),
    ],
)
def test_launched_training_is_the_reference(config: str, env: dict[str, str], root: Path, tmp_path: Path) -> None:
    """20 AdamW steps of 2 micro-batches, in rounds of 3, clipped, with unequal token counts, in fp32 and float64."""
    file = root / "accelerate_configs" / config
    script = root / "tests" / "scripts" / "train_twice.py"
    env = {"FEDSHARD_SYNC_EVERY": "3", **env}
    # From another folder, as an installed package is used.
    launch = accelerate_launch(file, script, str(tmp_path), env=env, cwd=tmp_path, limit_seconds=280).check()
    size = yaml.safe_load(file.read_text())["num_processes"]
    for kind, tolerance, loss in (("llama", 1e-4, None), ("double", 1e-12, native)):
        ranks = [torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=False) for rank in range(size)]
        assert ranks[0]["state"]["lm_head.weight"].dtype == (torch.float64 if kind == "double" else torch.float32)
        result = refer(ranks, kind, loss=loss)
        assert result.borders == [3, 6, 9, 12, 15, 18, 20]
        assert min(map(min, result.grad_norms)) > MAX_GRAD_NORM
        assert max(abs(a - b) for a, b in result.num_items) > 20
        print(f"{config}, {launch.seconds:.0f} s, {kind}: ", end="")
        _, moved = assert_matches(ranks, result, kind, tolerance)
        assert moved > 5e-3

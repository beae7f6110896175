"""The paper's four settings for Llama 3.1 8B in a fake world of 512 ranks: real code, no values, nothing sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launch import run_tree


WORLD_SIZE = 512
NUM_PARAMETERS = 8_030_261_248
FP32_BYTES = 4 * NUM_PARAMETERS
NUM_UNITS = 33  # 32 decoder layers and the root
# Every unit is gathered for the forward and again for the backward, but the root, which stays gathered in between.
FSDP_STEP = {"_allgather_base_": 2 * NUM_UNITS - 1, "_reduce_scatter_base_": NUM_UNITS}
HSDP_STEP = FSDP_STEP | {"allreduce_": NUM_UNITS}


def _dry_run(root: Path, preset: str, replicate: int, shard: int) -> dict[str, Any]:
    """In a process of its own: the fake process group is the default one there."""
    command = [sys.executable, str(root / "recipes" / "dry_run.py"), "--args_file"]
    command += [str(root / "recipes" / "presets" / f"{preset}.yaml")]
    command += ["--dp_replicate_size", str(replicate), "--dp_shard_size", str(shard)]
    result = run_tree(command, limit_seconds=280)
    result.check()
    return dict(json.loads(result.output[result.output.index("{") :]))


@pytest.mark.parametrize(
    ("setting", "replicate", "shard", "groups", "replicas", "sequences", "step"),
    [
        pytest.param("fl-fsdp", 128, 4, 128, 1, 8, FSDP_STEP, id="FL+FSDP"),
        pytest.param("fl-hsdp", 128, 4, 16, 8, 64, HSDP_STEP, id="FL+HSDP", marks=pytest.mark.slow),
        pytest.param("hsdp", 128, 4, 1, 128, 1024, HSDP_STEP, id="HSDP", marks=pytest.mark.slow),
        pytest.param("fsdp", 1, 512, 1, 1, 1024, FSDP_STEP, id="FSDP", marks=pytest.mark.slow),
    ],
)
def test_setting_of_the_paper(
    root: Path,
    setting: str,
    replicate: int,
    shard: int,
    groups: int,
    replicas: int,
    sequences: int,
    step: dict[str, int],
) -> None:
    seen = _dry_run(root, f"llama-3.1-8b-{setting}", replicate, shard)
    assert seen["world_size"] == WORLD_SIZE
    assert (seen["groups"], seen["replicas_in_group"], seen["shards_in_replica"]) == (groups, replicas, shard)
    assert seen["ranks_in_group"] == replicas * shard == WORLD_SIZE // groups
    assert seen["averaging_peers"] == groups
    assert seen["sequences_in_update"] == sequences
    assert seen["parameters"] == NUM_PARAMETERS
    # Rank 0 holds the largest shard; over 512 ranks the vocabulary and the key projections are cut unevenly.
    assert seen["parameters_on_rank"] == pytest.approx(NUM_PARAMETERS / shard, rel=1e-3)
    assert seen["collectives_in_step"] == step
    assert seen["steps_in_round"] == 8
    # A ring among G peers: 2 * theta / S * (G - 1) / G, and 1/R of it where the replicas share the work.
    assert seen["averaging_slow_bytes"] == 2 * FP32_BYTES * (groups - 1) // (groups * shard * replicas)
    largest = 32 * 2**20
    assert seen["averaging_buckets"] == (-(-FP32_BYTES // shard // largest) if groups > 1 else 0)


def test_models_build_on_the_meta_device(root: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for folder, number in (("llama-3.1-8b", NUM_PARAMETERS), ("demo", 948_000)):
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(root / "recipes" / "models" / folder)
            model = AutoModelForCausalLM.from_config(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == number


@pytest.mark.slow
def test_preset_of_another_size(root: Path) -> None:
    seen = _dry_run(root, "demo", 2, 2)
    assert seen["layout"] == "FL+FSDP: 2 groups x 1 replicas x 2 dp_shard"
    assert (seen["parameters"], seen["parameters_on_rank"]) == (948_000, 474_000)
    assert seen["averaging_slow_bytes"] == 4 * 474_000
    assert seen["collectives_in_step"] == {"_allgather_base_": 5, "_reduce_scatter_base_": 3}


def test_dry_run_refuses_what_cannot_be(root: Path) -> None:
    command = [sys.executable, str(root / "recipes" / "dry_run.py"), "--args_file"]
    command += [str(root / "recipes" / "presets" / "llama-3.1-8b-fl-hsdp.yaml")]
    result = run_tree([*command, "--dp_replicate_size", "8", "--dp_shard_size", "4"], limit_seconds=120)
    assert result.code != 0
    assert "num_groups=16 does not divide dp_replicate_size=8" in result.output

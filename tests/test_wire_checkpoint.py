"""Lossy wire formats in checkpoints: interrupted and resumed is uninterrupted, residuals included."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hf_fedshard.checkpoint_layout import group_folder
from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.outer_memory import OuterMemory
from hf_fedshard.residual_checkpoint import load_residuals, take_residuals
from hf_fedshard.residuals import Residuals
from hf_fedshard.shards import as_sharded
from hf_fedshard.tensor_store import save_tensors, stored_tensors
from tests.harness import preemption_runs
from tests.harness.checkpoint_runs import differences
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.test_outer_checkpoint import assert_resumes, resumed, run, through


NESTEROV = {"outer_optimizer": "nesterov", "wire_format": "int8"}
TRAINER: dict[str, dict[str, Any]] = {
    "fedavg": {"kind": "small", "wire_format": "int4"},
    "bfloat16": {"kind": "bfloat16", **NESTEROV, "offload_outer_state": True},
}


@pytest.mark.parametrize("case", ["fedavg", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_trainer(world4: WorkerPool, case: str, tmp_path: Path) -> None:
    assert_resumes(world4, tmp_path, **TRAINER[case])
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    saved = json.loads((checkpoint / "federation/federation.json").read_text())["outer"]
    assert (saved["wire_format"], saved["residuals"]) == (TRAINER[case]["wire_format"], True)
    for group in range(2):
        stored = stored_tensors(checkpoint / f"federation/group_0000{group}")
        owed = {name: tensor for name, tensor in stored.items() if name.startswith("residual/")}
        assert "residual/lm_head.weight" in owed
        assert {tensor.dtype for tensor in owed.values()} == {torch.float32}


def test_loop_with_replicas(world8: WorkerPool, tmp_path: Path) -> None:
    """2 groups x 2 replicas x 2 shards: each replica owes for its slices, and all of it is stored."""
    options = {**NESTEROV, "wire_format": "int4", "num_groups": 2, "group_weights": "steps"}
    whole = run(world8, through, tmp_path, (2,), 4, **options)
    again = run(world8, resumed, tmp_path, 4, **options)
    for before, after in zip(whole, again, strict=True):
        assert after.pop("warnings") == []
        before["batches"] = before["batches"][-len(after["batches"]) :]
        assert not differences(before, after)
        assert before["owed"]["lm_head.weight"].abs().max() > 0
    assert differences(whole[0]["owed"], whole[4]["owed"]), "the groups owe different amounts"


@pytest.mark.slow
def test_other_shapes_and_formats(world8: WorkerPool, tmp_path: Path) -> None:
    options = {**NESTEROV, "num_groups": 2}
    old = run(world8, through, tmp_path, (2,), 2, **options)
    # As many groups, one replica of four shards in place of two of two: nothing is lost.
    env = fsdp_launch_env(2, 4)
    new = world8.run(resumed, str(tmp_path), None, env=env, init_group=False, limit_seconds=240, **options)
    for rank, state in enumerate(new):
        assert state["warnings"] == []
        assert not differences(state["owed"], old[rank]["owed"])
    for changes, expected in (
        ({"num_groups": 4}, ["The residuals of wire_format=int8 start at zero: those of the checkpoint are what each of its 2 groups owed the others."]),
        ({"wire_format": "int4"}, ["wire_format was changed since the checkpoint: int4 (was int8)."]),
        (
            {"wire_format": "fp32"},
            [
                "wire_format was changed since the checkpoint: fp32 (was int8).",
                "wire_format=fp32 feeds no errors back: the residuals of the checkpoint are dropped.",
            ],
        ),
    ):  # fmt: skip
        found = run(world8, resumed, tmp_path, None, **{**options, **changes})
        assert found[0]["warnings"] == expected
        assert bool(found[0]["owed"]) == (changes == {"wire_format": "int4"})
        assert not differences(found[0]["model"], old[0]["model"])


ENDING = (0, 7, {2: 6, 3: 6})


def preempted(pool: WorkerPool, folder: Path, resume: Any = None, **options: Any) -> list[dict[str, Any]]:
    return pool.run(
        preemption_runs.train,
        str(folder),
        resume,
        env=fsdp_launch_env(2, 2),
        init_group=False,
        limit_seconds=90,
        **{"sync_every": 4, "wire_format": "int8", **options},
    )


@pytest.mark.slow
def test_groups_that_save_alone(world4: WorkerPool, tmp_path: Path) -> None:
    """Ended in the second round: the parts hold what the first border has left owed, and with plain averaging the anchor."""
    whole = preempted(world4, tmp_path / "whole")
    ended = preempted(world4, tmp_path / "ended", ending=ENDING, grace_seconds=0.01)
    assert all("preempted" in rank for rank in ended)
    for group in range(2):
        part = tmp_path / f"ended/checkpoint-5/group_0000{group}/federation"
        assert any(name.startswith("residual/") for name in stored_tensors(part / f"group_0000{group}"))
        assert {name.rpartition("/")[2] for name in stored_tensors(part / "outer")} == {"anchor"}
    shutil.copytree(tmp_path / "ended", tmp_path / "other")
    again = preempted(world4, tmp_path / "ended", resume=True)
    for before, after in zip(whole, again, strict=True):
        assert not differences(before["model"], after["model"])
        assert not differences(before["optimizer"], after["optimizer"])
    errors = world4.run_failing(
        preemption_runs.train,
        str(tmp_path / "other"),
        True,
        env=fsdp_launch_env(2, 2),
        init_group=False,
        limit_seconds=90,
        sync_every=4,
    )
    assert {error.type_name for error in errors} == {"CheckpointError"}
    assert "set proximal_mu and wire_format, as in the run that was saved" in errors[0].message


def parameter_elsewhere() -> DTensor:
    """Of a model on another device than the host."""
    mesh = DeviceMesh("meta", [0], _init_backend=False, _rank=0)
    return DTensor.from_local(
        torch.zeros(4, 3, device="meta", dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False
    )


def test_tensors_in_host_memory_are_stored_where_they_live() -> None:
    """A shard on another device than the mesh's is aliased, not moved: what is read into it must arrive."""
    param = parameter_elsewhere()
    shard = torch.zeros(4, 3)
    sharded = as_sharded(shard, param)
    assert sharded.to_local().data_ptr() == shard.data_ptr() and sharded.dtype == torch.float32
    assert sharded.shape == param.shape and sharded.placements == param.placements


def test_residuals_are_read_to_where_they_live(tmp_path: Path) -> None:
    """With offload a run that just fits on its device also fits when it resumes: nothing is made there."""
    param, memory = parameter_elsewhere(), OuterMemory(offload=True)
    averager: Any = SimpleNamespace(
        model=SimpleNamespace(get_parameter=lambda name: param),
        outer=SimpleNamespace(anchors=dict.fromkeys(["weight", "empty"]), memory=memory),
        residuals=Residuals(memory),
        wait=lambda: None,
        config=FederationConfig(2, wire_format="int8", offload_outer_state=True),
        mesh=SimpleNamespace(is_main=True, group_index=1, layout=FederationLayout(2, 1, {"dp_shard": 1})),
    )
    stored = torch.arange(12.0).view(4, 3)
    save_tensors({"residual/weight": stored}, tmp_path / group_folder(1), None)
    saved = {"num_groups": 2, "outer": {"wire_format": "int8", "residuals": True}}
    load_residuals(tmp_path, saved, averager)
    owed = averager.residuals.by_name()
    assert torch.equal(owed["weight"], stored)
    taken = take_residuals(averager)
    assert torch.equal(taken["weight"].to_local(), stored)  # type: ignore[attr-defined]
    assert taken["empty"].to_local().device.type == "cpu"  # type: ignore[attr-defined]

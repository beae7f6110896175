"""A gradient scaler belongs to its group: it skips steps where that group overflows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hf_fedshard.checkpoint import load_group_state, save_federation
from hf_fedshard.checkpoint_state import GroupState, Place
from hf_fedshard.config import FederationLayout
from hf_fedshard.mesh import build_federation_mesh
from tests.harness.pool import WorkerPool


def grown(num_good: int, num_bad: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(num_good + num_bad):
        scaler.scale(weight.sum() * (float("inf") if step < num_bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler


def body(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    layout = FederationLayout(2, 1, {"dp_shard": 2})
    mesh = build_federation_mesh("cpu", layout)
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh.fsdp)
    place = Place(layout, mesh.group_index, mesh.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = grown(num_good=1 + 2 * mesh.group_index, num_bad=3 - mesh.group_index)
    state = GroupState([optimizer], {"gradient scaler": saved})
    save_federation(Path(folder), model, state, place, {"round": 1})
    dist.barrier()
    fresh = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    load_group_state(Path(folder), model, GroupState([optimizer], {"gradient scaler": fresh}), place, "nearest")
    fresh.scale(torch.ones(()))  # makes its tensors, of what was loaded
    return saved.state_dict(), {**fresh.state_dict(), "tensor": float(fresh._scale)}


def test_each_group_has_its_own(world4: WorkerPool, tmp_path: Path) -> None:
    results = world4.run(body, str(tmp_path))
    scales = [saved["scale"] for saved, _ in results]
    assert scales == [128.0, 128.0, 512.0, 512.0]
    for saved, loaded in results:
        assert loaded.pop("tensor") == saved["scale"]
        assert loaded == saved

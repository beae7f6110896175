"""The fed x replicate x shard mesh, and its view under Accelerate's names."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hf_fedshard import guard
from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import build_federation_mesh
from hf_fedshard.parallelism import AccelerateMeshView, FederatedParallelismConfig
from tests.harness.pool import WorkerPool


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def _describe(groups: int, replicas: int, shard: int) -> dict[str, Any]:
    mesh = build_federation_mesh("cpu", FederationLayout(groups, replicas, {"dp_shard": shard}))
    return {
        "coordinate": (mesh.group_index, mesh.replicate_index, mesh.root.get_local_rank("dp_shard")),
        "names": mesh.root.mesh_dim_names,
        "group": _ranks(mesh.group),
        "group_ranks": sorted(mesh.group_ranks),
        "fed": _ranks(mesh.fed),
        "replicate": None if mesh.replicate is None else _ranks(mesh.replicate),
        "shard": _ranks(mesh.root.get_group("dp_shard")),
        "fsdp": (mesh.fsdp.ndim, sorted(mesh.fsdp.mesh.flatten().tolist())),
        "device": str(mesh.device),
        # Each costs a meeting of the world when it is made.
        "groups made": len(distributed_c10d._world.pg_map) - 1,
    }


def _check(described: list[dict[str, Any]], groups: int, replicas: int, shard: int) -> None:
    for rank, seen in enumerate(described):
        g, r, s = rank // (replicas * shard), rank // shard % replicas, rank % shard
        assert seen["coordinate"] == (g, r, s)
        assert rank == (g * replicas + r) * shard + s
        assert seen["names"] == (("fed", "group_replicate", "dp_shard") if replicas > 1 else ("fed", "dp_shard"))
        group = list(range(g * replicas * shard, (g + 1) * replicas * shard))
        assert seen["group"] == seen["group_ranks"] == group
        # In the order of the groups, and of the replicas: `group_src=0` of a broadcast means group or replica 0.
        assert seen["fed"] == [(i * replicas + r) * shard + s for i in range(groups)]
        peers = [(g * replicas + i) * shard + s for i in range(replicas)]
        assert seen["replicate"] == (peers if replicas > 1 else None)
        assert seen["shard"] == [(g * replicas + r) * shard + i for i in range(shard)]
        assert seen["fsdp"] == (2 if replicas > 1 else 1, group)
        assert seen["device"] == "cpu"
        # fed and shards, which are the group; with replicas those too, and the group. The world's own is made already.
        if groups > 1:
            assert seen["groups made"] == (4 if replicas > 1 else 2)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (1, 1, 4)])
def test_mesh_of_4(world4: WorkerPool, sizes: tuple[int, int, int]) -> None:
    _check(world4.run(_describe, *sizes), *sizes)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2)])
def test_mesh_of_8(world8: WorkerPool, sizes: tuple[int, int, int]) -> None:
    _check(world8.run(_describe, *sizes), *sizes)


def _timeouts(replicas: int, seconds: float) -> dict[str, float]:
    mesh = build_federation_mesh("cpu", FederationLayout(2, replicas, {"dp_shard": 2}))
    mesh.set_timeout(seconds)
    groups = {"world": dist.group.WORLD, "group": mesh.group, "fed": mesh.fed, "replicate": mesh.replicate}
    groups["shard"] = mesh.root.get_group("dp_shard")
    groups |= {f"fsdp {index}": group for index, group in enumerate(mesh.fsdp.get_all_groups())}
    return {
        name: group._get_backend(mesh.device).options._timeout.total_seconds()
        for name, group in groups.items()
        if group is not None
    }


@pytest.mark.parametrize("replicas", [1, 2])
def test_set_timeout_on_gloo(request: pytest.FixtureRequest, replicas: int) -> None:
    pool: WorkerPool = request.getfixturevalue("world4" if replicas == 1 else "world8")
    for read in pool.run(_timeouts, replicas, 17.0):
        assert set(read.values()) == {17.0}, read
        assert len(read) == (5 if replicas == 1 else 7)


def _wait_for_a_peer_that_never_comes() -> None:
    mesh = build_federation_mesh("cpu", FederationLayout(2, 1, {"dp_shard": 2}))
    mesh.set_timeout(1.0)
    if dist.get_rank() == 3:
        raise RuntimeError("left")
    dist.barrier()


def test_timeout_ends_a_wait_on_gloo(world4: WorkerPool) -> None:
    errors = world4.run_failing(_wait_for_a_peer_that_never_comes, fresh=True)
    assert errors[3].message == "left"
    for error in errors[:3]:
        assert error.is_a(RuntimeError)
        assert "imed out" in error.message or "reset" in error.message or "closed" in error.message, error.message


def _view(num_groups: int, replicate: int, shard: int) -> dict[str, Any]:
    config = FederationConfig(num_groups=num_groups)
    layout = config.layout(dist.get_world_size(), {"dp_replicate": replicate, "dp_shard": shard})
    parallelism = FederatedParallelismConfig(config, layout)
    with pytest.raises(RuntimeError, match="not built yet"):
        _ = parallelism.mesh
    view: Any = parallelism.get_device_mesh("cpu")
    fsdp = view[tuple(parallelism.fsdp_dim_names)]
    guard.reset()  # the ranks of a mesh that ends with this body
    return {
        "names": view.mesh_dim_names,
        # What `accelerate.data_loader.prepare_data_loader` computes.
        "sizes": {name: view[name].size() for name in view.mesh_dim_names},
        "local": {name: view.get_local_rank(name) for name in ("dp_replicate", "dp_shard")},
        "local of slices": {name: view[name].get_local_rank() for name in view.mesh_dim_names},
        "fsdp": (fsdp.ndim, sorted(fsdp.mesh.flatten().tolist())),
        "device_type": view.device_type,
        "same": parallelism.get_device_mesh("cpu") is view,
        "world": view.size(),
    }


@pytest.mark.parametrize(("num_groups", "replicate", "shard"), [(2, 2, 2), (1, 2, 2), (1, 1, 4)])
def test_view_of_4(world4: WorkerPool, num_groups: int, replicate: int, shard: int) -> None:
    _check_view(world4.run(_view, num_groups, replicate, shard), num_groups, replicate, shard)


@pytest.mark.parametrize(("num_groups", "replicate", "shard"), [(2, 4, 2), (4, 4, 2)])
def test_view_of_8(world8: WorkerPool, num_groups: int, replicate: int, shard: int) -> None:
    _check_view(world8.run(_view, num_groups, replicate, shard), num_groups, replicate, shard)


def _check_view(views: list[dict[str, Any]], num_groups: int, replicate: int, shard: int) -> None:
    world_size = len(views)
    for rank, seen in enumerate(views):
        # Accelerate multiplies the sizes of the axes named dp_replicate and dp_shard: the whole world, or the later
        # groups would be given no data of their own.
        expected = {"dp_replicate": replicate, "dp_shard": shard}
        assert seen["sizes"] == {name: size for name, size in expected.items() if size > 1}
        assert seen["names"] == tuple(seen["sizes"])
        local = {"dp_replicate": rank // shard, "dp_shard": rank % shard}
        assert seen["local"] == local
        assert seen["local of slices"] == {name: local[name] for name in seen["names"]}
        group_size = world_size // num_groups
        first = rank // group_size * group_size
        assert seen["fsdp"] == (1 if replicate == num_groups else 2, list(range(first, first + group_size)))
        assert (seen["device_type"], seen["same"], seen["world"]) == ("cpu", True, world_size)


def _inner_axis(axis: str, rank: int) -> dict[str, Any]:
    """A fake world of 32, as one of its ranks sees it: nothing is sent, so each worker can stand for another rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=32)
    config = FederationConfig(num_groups=2)
    parallelism = FederatedParallelismConfig(config, config.layout(32, {"dp_replicate": 4, "dp_shard": 4, axis: 2}))
    view: Any = parallelism.get_device_mesh("cpu")
    mesh, fsdp = parallelism.mesh, view[tuple(parallelism.fsdp_dim_names)]
    seen = {
        "names": view.mesh_dim_names,
        "active": sorted(parallelism.active_mesh_dims),
        "sizes": {name: view[name].size() for name in view.mesh_dim_names},
        "local": {name: view.get_local_rank(name) for name in view.mesh_dim_names},
        "group": _ranks(mesh.group),
        "fed": _ranks(mesh.fed),
        "replicate": _ranks(mesh.replicate),
        "fsdp": (fsdp.ndim, sorted(fsdp.mesh.flatten().tolist())),
        "data": (parallelism.data_parallel_size, parallelism.non_data_parallel_size),
    }
    guard.reset()
    return seen


def _inner_axis_of_some_ranks(axis: str) -> tuple[int, dict[str, Any]]:
    rank = (0, 13, 18, 31)[int(os.environ["RANK"])]
    return rank, _inner_axis(axis, rank)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_view_with_an_inner_axis(world4: WorkerPool, axis: str) -> None:
    """2 groups x 2 replicas x 4 shards x 2 ranks of another axis."""
    for rank, seen in world4.run(_inner_axis_of_some_ranks, axis, init_group=False):
        g, r, s, i = rank // 16, rank // 8 % 2, rank // 2 % 4, rank % 2
        is_cp = axis == "cp"
        sizes = {"dp_replicate": 4, "dp_shard": 4, axis: 2}
        assert seen["names"] == tuple(sizes)
        assert seen["active"] == sorted(sizes)
        assert seen["sizes"] == sizes
        assert seen["local"] == {"dp_replicate": 2 * g + r, "dp_shard": s, axis: i}
        assert seen["group"] == list(range(16 * g, 16 * g + 16))
        assert seen["fed"] == [rank % 16, rank % 16 + 16]
        assert seen["replicate"] == [16 * g + rank % 8, 16 * g + rank % 8 + 8]
        inside = [peer for peer in range(16 * g, 16 * g + 16) if is_cp or peer % 2 == i]
        assert seen["fsdp"] == (2, inside)
        assert seen["data"] == (16, 2)


def test_view_is_no_mesh_of_its_own() -> None:
    """Everything that the view does not answer itself comes from the root mesh."""

    class Root:
        shape = (2, 1, 2)

    view = object.__new__(AccelerateMeshView)
    view.federation = type("Federation", (), {"root": Root()})()
    assert view.shape == (2, 1, 2)
    with pytest.raises(AttributeError):
        _ = view.unknown

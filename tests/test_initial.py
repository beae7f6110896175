"""One model to start from, whatever the seeds of the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_fedshard.initial import broadcast_initial_state, verify_one_model
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import FederationMesh, build_federation_mesh
from hf_fedshard.shards import local_shards, replicated_tensors
from tests.harness.pool import WorkerPool


State = dict[str, torch.Tensor]


class Buffered(nn.Module):
    """Parameters of odd sizes, and buffers of every kind that a model has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 7)
        self.frozen = nn.Linear(3, 1)
        self.frozen.requires_grad_(False)
        self.outside = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("bf16", torch.randn(3).bfloat16())
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("steps", torch.randint(0, 1000, ()))
        self.register_buffer("table", torch.randn(4, 6).t())
        self.register_buffer("constant", torch.randn(2), persistent=False)
        self.register_buffer("none", torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) + self.outside.sum()


def federated_model(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[nn.Module, FederationMesh]:
    """A model with another seed on each rank, sharded inside its group."""
    groups, replicas, shards = sizes
    mesh = build_federation_mesh("cpu", FederationLayout(groups, replicas, {"dp_shard": shards}))
    torch.manual_seed(dist.get_rank())
    model = Buffered()
    model.inner.to(dtype)
    axes: Any = "dp_shard" if replicas == 1 else ("group_replicate", "dp_shard")
    fully_shard(model.inner, mesh=mesh.root[axes])
    fully_shard(model, mesh=mesh.root[axes], ignored_params={model.outside})
    return model, mesh


def whole(model: nn.Module) -> State:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named.items()}


def broadcast(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[State, State]:
    model, mesh = federated_model(sizes, dtype)
    before = whole(model)
    broadcast_initial_state(model, mesh)
    return before, whole(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 2)], ids=str)
def test_unequal_seeds(sizes: tuple[int, int, int], dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue("world4" if sizes[1] == 1 else "world8")
    ranks = pool.run(broadcast, sizes, dtype)
    first = ranks[0][0]
    assert "inner.weight" in first
    assert first["inner.weight"].dtype == dtype
    last = ranks[-1][0]
    for name in ("inner.weight", "frozen.weight", "outside", "bf16", "table", "constant"):
        assert not torch.equal(first[name], last[name]), f"{name} must differ before, or nothing is shown"
    for _, after in ranks:
        assert after.keys() == first.keys()
        for name, tensor in first.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor), name


def corrupt(rank: int, which: str) -> None:
    model, mesh = federated_model((2, 2, 2) if dist.get_world_size() == 8 else (2, 1, 2), torch.float32)
    broadcast_initial_state(model, mesh)
    if dist.get_rank() == rank:
        tensors = {**local_shards(model), **replicated_tensors(model)}
        with torch.no_grad():
            if which == "order":
                weight = tensors["inner.weight"].view(-1)
                # Pairs in reverse order: every word of a checksum is there, and has the same neighbours.
                weight.copy_(weight.view(-1, 2).flip(0).view(-1))
            elif which == "flags":
                tensors[which].logical_not_()
            else:
                # The smallest change that there is: one bit of one element.
                bits = tensors[which].view(-1)[-1:].view(torch.int16)
                bits[:1] ^= 1
    verify_one_model(local_shards(model), replicated_tensors(model), mesh)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("which", ["inner.weight", "bf16", "steps", "flags", "order"])
def test_a_corrupted_rank_raises_everywhere(world4: WorkerPool, rank: int, which: str) -> None:
    errors = world4.run_failing(corrupt, rank, which)
    assert all(error.type_name == "FederationMismatchError" for error in errors)
    assert all("do not hold one model" in error.message for error in errors)


def test_a_corrupted_replica_raises_everywhere(world8: WorkerPool) -> None:
    # Rank 6: second group, second replica, first shard.
    errors = world8.run_failing(corrupt, 6, "inner.weight")
    assert all(error.type_name == "FederationMismatchError" for error in errors)


def test_an_untouched_model_passes(world4: WorkerPool) -> None:
    world4.run(corrupt, -1, "inner.weight")


def exchanged() -> None:
    """Two tensors that have changed places on one rank."""
    mesh = build_federation_mesh("cpu", FederationLayout(2, 1, {"dp_shard": 2}))
    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    verify_one_model({}, {"a": b, "b": a} if dist.get_rank() == 2 else {"a": a, "b": b}, mesh)


def test_exchanged_tensors_are_seen(world4: WorkerPool) -> None:
    world4.run_failing(exchanged)


def views() -> torch.Tensor:
    """A buffer that is a view into a larger tensor: its memory begins anywhere."""
    mesh = build_federation_mesh("cpu", FederationLayout(2, 1, {"dp_shard": 2}))
    model = nn.Module()
    model.register_buffer("part", torch.full((9,), float(dist.get_rank()))[1:])
    broadcast_initial_state(model, mesh)
    return model.part


def test_views_into_larger_tensors(world4: WorkerPool) -> None:
    for part in world4.run(views):
        assert (part == 0).all()

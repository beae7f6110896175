"""The exchange engine against plain means of torch, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_fedshard.exchange import average_replicated, run_exchange
from hf_fedshard.exchange_plan import plan_exchange
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import FederationMesh, build_federation_mesh
from tests.harness.collectives import CollectiveRecorder
from tests.harness.pool import WorkerPool


Tensors = dict[str, torch.Tensor]
ONE_BUCKET = 1 << 20
# Groups, replicas, shards. The first has 2 peers, the second 4.
WORLD4 = [(2, 1, 2), (4, 1, 1), (2, 2, 1)]
WORLD8 = [(2, 2, 2), (4, 2, 1), (2, 4, 1)]


def shards_of(group: int, shard: int) -> Tensors:
    """
    What the ranks of a shard hold in a group: odd and uneven sizes, one that is empty on the second shard, one larger
    than a small bucket, several dtypes, two that are not contiguous. All replicas hold the same.
    """
    generator = torch.Generator().manual_seed(100 * group + shard)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "matrix": draw(7 - 2 * shard, 5),
        "bf16": draw(19, dtype=torch.bfloat16),
        "empty": draw(3 * (1 - shard), 5),
        "double": draw(11, dtype=torch.float64),
        "scalar": draw(),
        "transposed": draw(3, 4).t(),
        "large": draw(41, 11),
        "strided": draw(6, 8)[:, ::2],
        "half": draw(5, dtype=torch.float16),
    }


def expected(layout: FederationLayout, shard: int, weights: list[float]) -> Tensors:
    held = [shards_of(group, shard) for group in range(layout.num_groups)]
    total = sum(weights)
    return {
        name: (sum(t[name].double() * w for t, w in zip(held, weights, strict=True) if w) / total).to(tensor.dtype)
        for name, tensor in held[0].items()
    }


def make_mesh(sizes: tuple[int, int, int], device: str = "cpu") -> FederationMesh:
    if device == "cuda" and torch.cuda.device_count() < dist.get_world_size():
        pytest.skip("needs one GPU for each rank")
    groups, replicas, shards = sizes
    return build_federation_mesh(device, FederationLayout(groups, replicas, {"dp_shard": shards}))


def place(tensors: Tensors, device: torch.device) -> Tensors:
    # `.to` of a strided tensor makes a dense one: the strides are what is tested.
    return tensors if device.type == "cpu" else {name: tensor.to(device) for name, tensor in tensors.items()}


def exchange(
    sizes: tuple[int, int, int],
    bucket: int,
    weights: list[float] | None = None,
    poisoned: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    mesh = make_mesh(sizes, device)
    shard = mesh.root.get_local_rank("dp_shard")
    tensors = place(shards_of(mesh.group_index, shard), mesh.device)
    if poisoned == mesh.group_index:
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
    plan = plan_exchange(tensors, mesh, bucket)
    weight = 1.0 if weights is None else weights[mesh.group_index]
    with CollectiveRecorder() as recorder:
        report = run_exchange(plan, tensors, mesh.device, weight, None if weights is None else sum(weights))
    group_of = [rank // mesh.layout.group_size for rank in range(dist.get_world_size())]
    slow = recorder.crossing(group_of)
    return {
        "shard": shard,
        "tensors": {name: tensor.cpu().clone() for name, tensor in tensors.items()},
        "buckets": len(plan.buckets),
        "planned": plan.slow_bytes(),
        "slow": [(call.name, call.num_bytes) for call in slow],
        "fast": [(call.name, call.num_bytes) for call in recorder.collectives if call not in slow],
        "drift": report.squared_drift.item(),
        "norm": report.squared_norm.item(),
    }


def assert_same_bits(ranks: list[dict[str, Any]]) -> None:
    first: dict[int, Tensors] = {}
    for rank in ranks:
        reference = first.setdefault(rank["shard"], rank["tensors"])
        for name, tensor in rank["tensors"].items():
            assert torch.equal(tensor, reference[name]), name


def pool_of(sizes: tuple[int, int, int], request: pytest.FixtureRequest) -> WorkerPool:
    return request.getfixturevalue("world4" if sizes in WORLD4 else "world8")


@pytest.mark.parametrize("sizes", WORLD4 + WORLD8, ids=str)
def test_is_the_mean_and_buckets_do_not_matter(
    sizes: tuple[int, int, int], device: str, request: pytest.FixtureRequest
) -> None:
    pool, layout = pool_of(sizes, request), FederationLayout(sizes[0], sizes[1], {"dp_shard": sizes[2]})
    # 72 bytes: 18 fp32 or 9 fp64 elements, so that most tensors are cut and some buckets hold several.
    one, many = (pool.run(exchange, sizes, bucket, device=device) for bucket in (ONE_BUCKET, 72))
    assert one[0]["buckets"] == 2  # fp32, and fp64 for the double tensor
    assert many[0]["buckets"] > 20
    for ranks in (one, many):
        assert_same_bits(ranks)
        for rank in ranks:
            for name, mean in expected(layout, rank["shard"], [1.0] * sizes[0]).items():
                tolerance = {torch.float64: 1e-15, torch.float32: 1e-6}.get(mean.dtype, 0.0)
                if sizes[0] > 2 and tolerance == 0.0:  # a sum in another order may round to the neighbour
                    tolerance = 2 * torch.finfo(mean.dtype).eps
                torch.testing.assert_close(rank["tensors"][name], mean, rtol=tolerance, atol=tolerance, msg=name)
    for few, cut in zip(one, many, strict=True):
        for name, tensor in few["tensors"].items():
            if sizes[0] == 2:
                assert torch.equal(tensor, cut["tensors"][name]), name
            else:
                eps = max(1e-6, torch.finfo(tensor.dtype).eps) if tensor.dtype != torch.float64 else 1e-14
                torch.testing.assert_close(tensor, cut["tensors"][name], rtol=eps, atol=eps, msg=name)


def test_low_precision_is_averaged_in_fp32(world4: WorkerPool) -> None:
    held = [shards_of(group, 0)["bf16"] for group in range(4)]
    naive = (held[0] + held[1] + held[2] + held[3]) / 4
    mean = expected(FederationLayout(4, 1, {"dp_shard": 1}), 0, [1.0] * 4)["bf16"]
    assert (naive != mean).sum() > 3, "the values must tell fp32 from bf16 sums"
    for rank in world4.run(exchange, (4, 1, 1), ONE_BUCKET):
        assert torch.equal(rank["tensors"]["bf16"], mean)


def _gaps() -> tuple[torch.Tensor, torch.Tensor]:
    mesh = make_mesh((2, 1, 2))
    whole = torch.full((6, 8), float(mesh.group_index))
    tensors = {"strided": whole[:, ::2]}
    run_exchange(plan_exchange(tensors, mesh, 16), tensors, mesh.device)
    return whole[:, ::2].clone(), whole[:, 1::2].clone()


def test_writes_strided_tensors_in_place_and_nothing_beside(world4: WorkerPool) -> None:
    for rank, (written, between) in enumerate(world4.run(_gaps)):
        assert (written == 0.5).all()
        assert (between == rank // 2).all()


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 2), (4, 2, 1)], ids=str)
def test_weights(sizes: tuple[int, int, int], request: pytest.FixtureRequest) -> None:
    weights = [1.0, 3.0, 0.5, 2.0][: sizes[0]]
    layout = FederationLayout(sizes[0], sizes[1], {"dp_shard": sizes[2]})
    ranks = pool_of(sizes, request).run(exchange, sizes, 200, weights)
    assert_same_bits(ranks)
    for rank in ranks:
        for name, mean in expected(layout, rank["shard"], weights).items():
            eps = {torch.float64: 1e-14, torch.float32: 2e-6}.get(mean.dtype, 2 * torch.finfo(mean.dtype).eps)
            torch.testing.assert_close(rank["tensors"][name], mean, rtol=eps, atol=eps, msg=name)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 1, 1), (2, 2, 2)], ids=str)
def test_weight_zero_contributes_zeros_whatever_it_holds(
    sizes: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    weights = [1.0] * sizes[0]
    weights[1] = 0.0
    layout = FederationLayout(sizes[0], sizes[1], {"dp_shard": sizes[2]})
    ranks = pool_of(sizes, request).run(exchange, sizes, 72, weights, poisoned=1)
    assert_same_bits(ranks)
    for rank in ranks:
        assert rank["drift"] == rank["drift"], "a group without weight has no part in the drift"
        for name, mean in expected(layout, rank["shard"], weights).items():
            eps = max(torch.finfo(mean.dtype).eps, 1e-15) * 2
            torch.testing.assert_close(rank["tensors"][name], mean, rtol=eps, atol=eps, msg=name)


def test_drift_is_the_distance_to_the_average(world4: WorkerPool) -> None:
    for number, rank in enumerate(world4.run(exchange, (2, 1, 2), 72)):
        held = shards_of(number // 2, rank["shard"])
        distance = sum((held[n].double() - t.double()).square().sum() for n, t in rank["tensors"].items())
        norm = sum(t.double().square().sum() for t in rank["tensors"].values())
        assert rank["drift"] == pytest.approx(distance.item(), rel=1e-3)
        assert rank["norm"] == pytest.approx(norm.item(), rel=1e-2)


@pytest.mark.parametrize("sizes", WORLD4 + WORLD8, ids=str)
def test_bytes_are_what_was_sent(sizes: tuple[int, int, int], request: pytest.FixtureRequest) -> None:
    groups, replicas, _ = sizes
    for rank in pool_of(sizes, request).run(exchange, sizes, 400):
        assert {name for name, _ in rank["slow"]} == {"all_reduce"}
        assert {name for name, _ in rank["fast"]} == ({"all_gather"} if replicas > 1 else set())
        reduced, gathered = (sum(size for _, size in rank[tier]) for tier in ("slow", "fast"))
        # A ring all-reduce of N among P sends 2N(P-1)/P from each. Inside the group every slice is gathered once.
        assert rank["planned"] == 2 * reduced * (groups - 1) // groups
        assert gathered == (reduced if replicas > 1 else 0)
        content = sum(
            tensor.numel() * max(tensor.element_size(), 4) for tensor in shards_of(0, rank["shard"]).values()
        )
        # Each replica its slice, and the padding of less than one element a replica and bucket.
        assert content / replicas <= reduced < content / replicas + 8 * rank["buckets"]


def _replicated(excluded: bool) -> dict[str, torch.Tensor]:
    mesh, rank = make_mesh((2, 1, 2)), dist.get_rank()
    left_out = excluded and rank >= 2
    tensors = {
        "mean": torch.full((3,), float("nan") if left_out else float(rank)),
        "bf16": torch.tensor([1.0 + rank / 128], dtype=torch.bfloat16),
        "double": torch.tensor([1 + rank * 2.0**-40], dtype=torch.float64),
        "steps": torch.tensor(10 + rank),
        "flags": torch.tensor([rank == 0, rank != 0, True]),
        "strided": torch.arange(6.0).view(2, 3).t() + rank,
    }
    average_replicated(tensors, mesh, not left_out, 1 if excluded else 2)
    return tensors


@pytest.mark.parametrize("excluded", [False, True])
def test_replicated_tensors(world4: WorkerPool, excluded: bool) -> None:
    mean = 0.5 if excluded else 1.5
    for tensors in world4.run(_replicated, excluded):
        assert (tensors["mean"] == mean).all()
        assert tensors["bf16"].item() == torch.tensor(1 + mean / 128, dtype=torch.bfloat16).item()
        assert tensors["double"].item() == 1 + mean * 2.0**-40
        assert tensors["steps"].item() == 10
        assert tensors["flags"].tolist() == [True, False, True]
        assert torch.equal(tensors["strided"], torch.arange(6.0).view(2, 3).t() + mean)

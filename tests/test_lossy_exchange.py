"""Averages through lossy wire formats on real ranks, against the same arithmetic on the tensors of all groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_fedshard.exchange_plan import ExchangePlan, plan_exchange
from hf_fedshard.layout import FederationLayout
from hf_fedshard.lossy_exchange import RoundStart, run_lossy_exchange
from hf_fedshard.outer_memory import OuterMemory
from hf_fedshard.residuals import Residuals
from hf_fedshard.simulated_peers import Alone, InMemoryPeer, Meeting, SimulatedPeers
from hf_fedshard.tensors import accumulation_dtype
from tests.harness.collectives import CollectiveRecorder
from tests.harness.pool import WorkerPool
from tests.harness.wire_reference import BLOCKS, LossyAverage, Tensors
from tests.test_exchange import assert_same_bits, make_mesh, place, pool_of, shards_of


# Groups, replicas, shards.
SIZES = [(2, 1, 2), (4, 2, 1), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((4, 1, 1), (2, 2, 2)))]
LOSSY = ("bf16", "int8", "int4")
# Buckets of some blocks for each peer and replica, so that tensors are cut and the last bucket is padded; and one for all.
BUCKETS = (2048, 1 << 20)
# In the second round group 1 is left out, and full of NaN.
WEIGHTS = ([1.0, 1.0, 1.0, 1.0], [2.0, 0.0, 1.0, 3.0], [0.5, 1.0, 0.25, 1.0])


def start_of(shard: int) -> Tensors:
    """With what the first round begins, in fp32 or more: of bf16 parameters more than these can hold."""
    return {name: tensor.to(accumulation_dtype(tensor.dtype)) * 1.01 for name, tensor in shards_of(77, shard).items()}


def stored(anchors: Tensors, like: Tensors) -> Tensors:
    return {name: anchor.to(like[name].dtype) for name, anchor in anchors.items()}


def trained(anchors: Tensors, number: int, group: int, shard: int) -> Tensors:
    """What a group holds at the end of a round: near the beginning, in the dtypes and with the strides of parameters."""
    moves = shards_of(10 * number + group, shard)
    for name, move in moves.items():
        move.mul_(0.05).add_(anchors[name].to(move))
        if number == 1 and group == 1:
            move.fill_(float("nan"))
    return moves


def several_rounds(
    wire_format: str,
    bucket: int,
    num_groups: int,
    shard: int,
    group: int,
    average: Callable[[Tensors, Tensors, int], Any],
) -> list[Tensors]:
    anchors, found = start_of(shard), []
    for number in range(len(WEIGHTS)):
        tensors = trained(anchors, number, group, shard)
        average(tensors, anchors, number)
        found.append({name: tensor.cpu().clone() for name, tensor in tensors.items()})
        anchors = {name: tensor.cpu().to(anchors[name].dtype) for name, tensor in tensors.items()}
    return found


def exchange_rounds(mesh: Any, wire_format: str, bucket: int, shard: int) -> dict[str, Any]:
    """All rounds on one rank, with the collectives of each."""
    residuals, found = Residuals(OuterMemory(False)), {}
    plans: list[ExchangePlan] = []

    def average(tensors: Tensors, anchors: Tensors, number: int) -> None:
        held = place(tensors, mesh.device)
        if not plans:
            plans.append(plan_exchange(held, mesh, bucket, wire_format))
        start = RoundStart(anchors, {name: tensor.dtype for name, tensor in tensors.items()})
        weights = WEIGHTS[number][: mesh.layout.num_groups]
        report = run_lossy_exchange(
            plans[0],
            held,
            mesh.device,
            weights[mesh.group_index],
            sum(weights),
            start,
            residuals.of(plans[0], mesh.device),
        )
        found["drift", number] = report.squared_drift.item()
        found["norm", number] = report.squared_norm.item()
        if held is not tensors:
            for name, tensor in held.items():
                tensors[name] = tensor.cpu()

    found["rounds"] = several_rounds(wire_format, bucket, mesh.layout.num_groups, shard, mesh.group_index, average)
    found["plan"] = (len(plans[0].buckets), plans[0].slow_bytes())
    found["residuals"] = residuals
    return found


def on_ranks(sizes: tuple[int, int, int], device: str = "cpu") -> dict[str, Any]:
    """Body: all formats and sizes of buckets."""
    mesh = make_mesh(sizes, device)
    shard = mesh.root.get_local_rank("dp_shard")
    group_of = [rank // mesh.layout.group_size for rank in range(dist.get_world_size())]
    found: dict[str, Any] = {"shard": shard}
    for wire_format in LOSSY:
        for bucket in BUCKETS:
            with CollectiveRecorder() as recorder:
                result = exchange_rounds(mesh, wire_format, bucket, shard)
            slow = recorder.crossing(group_of)
            result["slow"] = [(call.name, call.num_bytes) for call in slow]
            result["fast"] = [(call.name, call.num_bytes) for call in recorder.collectives if call not in slow]
            result["owed"] = {name: owed.cpu().clone() for name, owed in result.pop("residuals").by_name().items()}
            found[f"{wire_format} {bucket}"] = result
    return found


def expected_rounds(
    sizes: tuple[int, int, int], wire_format: str, bucket: int, shard: int
) -> tuple[list[Tensors], Any, list[tuple[float, list[float]]]]:
    """The averages of all rounds, what formed them, and of each round their squared norm and each group's squared distance."""
    groups, replicas, _ = sizes
    average = LossyAverage(wire_format, groups, replicas, bucket)
    anchors, found = start_of(shard), []
    measured = []
    for number in range(len(WEIGHTS)):
        held = [trained(anchors, number, group, shard) for group in range(groups)]
        means = average(held, stored(anchors, held[0]), WEIGHTS[number][:groups])
        distances = [
            sum((tensors[name].double() - mean.double()).square().sum().item() for name, mean in means.items())
            if weight
            else 0.0  # it may be NaN, and has no part in the drift
            for tensors, weight in zip(held, WEIGHTS[number], strict=False)
        ]
        measured.append((sum(mean.double().square().sum().item() for mean in means.values()), distances))
        found.append({name: mean.to(held[0][name].dtype) for name, mean in means.items()})
        anchors = {name: tensor.to(anchors[name].dtype) for name, tensor in found[-1].items()}
    return found, average, measured


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_is_the_reference_bit_for_bit(
    sizes: tuple[int, int, int], device: str, request: pytest.FixtureRequest
) -> None:
    groups, replicas, _ = sizes
    ranks = pool_of(sizes, request).run(on_ranks, sizes, device, limit_seconds=240)
    for wire_format in LOSSY:
        for bucket in BUCKETS:
            case = f"{wire_format} {bucket}"
            for number in range(len(WEIGHTS)):
                held = [{"shard": rank["shard"], "tensors": rank[case]["rounds"][number]} for rank in ranks]
                assert_same_bits(held)
            for index, rank in enumerate(ranks):
                group = index * groups // len(ranks)
                states, average, measured = expected_rounds(sizes, wire_format, bucket, rank["shard"])
                for number, state in enumerate(states):
                    for name, mean in state.items():
                        found = rank[case]["rounds"][number][name]
                        assert torch.equal(found, mean), (case, number, name, (found - mean).abs().max())
                    norm, distances = measured[number]
                    assert rank[case]["norm", number] == pytest.approx(norm, rel=1e-5)
                    assert rank[case]["drift", number] == pytest.approx(distances[group], rel=1e-5)
                    assert (distances[group] == 0) == (WEIGHTS[number][group] == 0)
                check_owed(rank[case]["owed"], average.residuals[group], wire_format)
                check_bytes(rank[case], groups, replicas)
    assert ranks[0][f"int8 {BUCKETS[0]}"]["plan"][0] > 2 or replicas * groups == 8
    assert ranks[0][f"int4 {BUCKETS[1]}"]["plan"][0] == 2, "fp32 and fp64"


def check_owed(owed: Tensors, expected: dict[torch.dtype, torch.Tensor], wire_format: str) -> None:
    """The residuals of a group, put together from its replicas, are the reference's."""
    assert bool(owed) == (wire_format in BLOCKS)
    for dtype in {tensor.dtype for tensor in owed.values()}:
        flat = torch.cat([tensor for tensor in owed.values() if tensor.dtype == dtype])
        assert torch.equal(flat, expected[dtype][: len(flat)]) and flat.abs().max() > 0


def check_bytes(found: dict[str, Any], groups: int, replicas: int) -> None:
    """What the plan says is what the arguments of the collectives say."""
    _, slow_bytes = found["plan"]
    sent = {name: sum(size for call, size in found["slow"] if call == name) for name in ("all_to_all", "all_gather")}
    assert {name for name, _ in found["slow"]} == {"all_to_all", "all_gather"}
    # Of P rows one stays here; a ring all-gather sends a row P - 1 times.
    on_wire = sent["all_to_all"] * (groups - 1) // groups + sent["all_gather"] * (groups - 1)
    assert on_wire == slow_bytes * len(WEIGHTS)
    gathered = sum(size for name, size in found["fast"] if name == "all_gather")
    assert {name for name, _ in found["fast"]} == ({"all_gather"} if replicas > 1 else set())
    # Each slice once, as it was exchanged: of P encoded parts P - 1 have crossed the slow tier twice.
    assert gathered == (slow_bytes * groups // (2 * (groups - 1)) * len(WEIGHTS) if replicas > 1 else 0)


@pytest.mark.parametrize(("wire_format", "most"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 0.27), ("int4", 0.15)])
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (2, 2), (8, 4)], ids=str)
def test_share_of_the_bytes_of_fp32(sizes: tuple[int, int], wire_format: str, most: float) -> None:
    """Of a ring all-reduce of fp32, which sends 2N(P-1)/P from each rank: scales and padding included."""
    peers, replicas = sizes
    tensors = {str(index): torch.empty(100_003 + index, device="meta") for index in range(20)}
    fast = SimpleNamespace(size=lambda: replicas, rank=lambda: 0) if replicas > 1 else None
    mesh: Any = SimpleNamespace(
        layout=FederationLayout(peers, replicas, {"dp_shard": 2}),
        fed=SimpleNamespace(size=lambda: peers),
        replicate=fast,
    )
    plan = plan_exchange(tensors, mesh, 1 << 20, wire_format)
    bound = 2 * 4 * sum(tensor.numel() for tensor in tensors.values()) / replicas * (peers - 1) / peers
    assert len(plan.buckets) > 5
    assert 0.9 * most < plan.slow_bytes() / bound <= most * (1 + 1e-5)


@pytest.mark.parametrize("num_groups", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_groups_in_one_process_get_the_same_bits(num_groups: int, world4: WorkerPool) -> None:
    """With one shard in a group a simulation exchanges what processes do."""
    sizes = (num_groups, 1, 4 // num_groups)
    ranks = world4.run(on_ranks, sizes, limit_seconds=240)
    for shard in range(sizes[2]):
        for wire_format in LOSSY:
            case = f"{wire_format} {BUCKETS[0]}"
            for group, found in enumerate(in_threads(num_groups, wire_format, BUCKETS[0], shard)):
                other = ranks[group * sizes[2] + shard][case]
                assert found["drift", 0] == other["drift", 0] and found["plan"] == other["plan"]
                for state, expected in zip(found["rounds"], other["rounds"], strict=True):
                    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def in_threads(num_groups: int, wire_format: str, bucket: int, shard: int) -> list[dict[str, Any]]:
    meeting, layout = Meeting(num_groups), FederationLayout(num_groups, 1, {"dp_shard": 1})
    found: list[Any] = [None] * num_groups

    def run(group: int) -> None:
        peers = SimulatedPeers(layout, InMemoryPeer(meeting, group), Alone(), torch.device("cpu"))
        found[group] = exchange_rounds(peers, wire_format, bucket, shard)

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in range(num_groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found


NUM_ROUNDS = 30


def constant_rounds(sizes: tuple[int, int, int], wire_format: str) -> dict[str, Any]:
    """Body: every group moves by the same step in each round, weights included; what arrived in all rounds together."""
    mesh = make_mesh(sizes)
    steps = [torch.randn(1001, generator=torch.Generator().manual_seed(group)).double() for group in range(sizes[0])]
    weights = [1.0, 2.0, 1.0, 0.5][: sizes[0]]
    true = sum(weight * step for weight, step in zip(weights, steps, strict=True)) / sum(weights)
    anchor = {"a": torch.zeros(1001, dtype=torch.float64)}
    plan = plan_exchange(anchor, mesh, 4096, wire_format)
    residuals = Residuals(OuterMemory(False))
    errors = []
    for number in range(NUM_ROUNDS):
        tensors = {"a": anchor["a"] + steps[mesh.group_index]}
        run_lossy_exchange(
            plan,
            tensors,
            mesh.device,
            weights[mesh.group_index],
            sum(weights),
            RoundStart(anchor, {"a": torch.float64}),
            residuals.of(plan, mesh.device),
        )
        anchor = tensors
        errors.append((anchor["a"] - (number + 1) * true).abs().max().item())
    owed = residuals.by_name().get("a", torch.zeros(1001, dtype=torch.float64))
    dist.all_reduce(owed, group=mesh.fed)
    rest = (anchor["a"] + owed - NUM_ROUNDS * true).abs().max().item()
    return {"errors": errors, "rest": rest, "largest": max(step.abs().max().item() for step in steps)}


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("wire_format", ["int8", "int4"])
def test_errors_do_not_add_up(sizes: tuple[int, int, int], wire_format: str, world4: WorkerPool) -> None:
    """What arrived in all rounds is what was trained, but for what the residuals hold: about a quantum, after any number."""
    bits = BLOCKS[wire_format][0]
    for rank in world4.run(constant_rounds, sizes, wire_format):
        assert rank["rest"] < 1e-11, "arrived + owed = trained"
        # Codes of the shares, which error feedback makes larger by half of one of their own, and of their sum.
        quantum = rank["largest"] / (2 ** (bits - 1) - 1) * 1.25
        assert max(rank["errors"]) < 2 * quantum
        assert rank["errors"][-1] < 2 * quantum < NUM_ROUNDS * quantum / 4
        assert max(rank["errors"]) > quantum / 100, "it must have lost something"


@pytest.mark.parametrize("wire_format", LOSSY)
def test_error_of_a_round_is_bounded(wire_format: str, world4: WorkerPool) -> None:
    """The first round, with nothing owed yet: half a scale of each share and half of one of the sum."""
    step = {"bf16": 2.0**-8, "int8": 1 / 127, "int4": 1 / 7}[wire_format]
    for rank in world4.run(constant_rounds, (4, 1, 1), wire_format):
        largest = rank["largest"]
        assert rank["errors"][0] <= step * largest * (1 + 2.0**-6)


def nothing_to_send() -> list[Any]:
    """Body: no tensors at all, and empty ones."""
    mesh, found = make_mesh((2, 1, 2)), []
    for tensors in ({}, {"a": torch.zeros(0, 3)}):
        plan = plan_exchange(tensors, mesh, 1024, "int8")
        residuals = Residuals(OuterMemory(False))
        start = RoundStart(tensors, {name: tensor.dtype for name, tensor in tensors.items()})
        report = run_lossy_exchange(plan, tensors, mesh.device, 1.0, 2.0, start, residuals.of(plan, mesh.device))
        found.append((len(plan.buckets), plan.slow_bytes(), report.squared_norm.item(), residuals.by_name()))
    return found


def test_empty_shards(world4: WorkerPool) -> None:
    for rank in world4.run(nothing_to_send):
        assert rank == [(0, 0, 0.0, {}), (0, 0, 0.0, {})]


def other_buckets(sizes: tuple[int, int, int]) -> tuple[bool, bool]:
    """Body: what is owed is kept when parameters come along and everything lies in other buckets, and in a checkpoint."""
    mesh = make_mesh(sizes)
    first = {"b": torch.randn(301, generator=torch.Generator().manual_seed(mesh.group_index))}
    residuals = Residuals(OuterMemory(False))
    plan = plan_exchange(first, mesh, 1024, "int4")
    start = RoundStart({"b": torch.zeros(301)}, {"b": torch.float32})
    run_lossy_exchange(plan, first, mesh.device, 1.0, float(sizes[0]), start, residuals.of(plan, mesh.device))
    before = residuals.by_name()["b"]
    plan = plan_exchange({"a": torch.zeros(77), **first}, mesh, 2048, "int4")
    residuals.of(plan, mesh.device)
    after = residuals.by_name()
    again = Residuals(OuterMemory(True))
    again.load({name: tensor.clone() for name, tensor in after.items()})
    again.of(plan, mesh.device)
    kept = torch.equal(after["b"], before) and before.abs().max() > 0 and not after["a"].any()
    return bool(kept), all(torch.equal(again.by_name()[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 1)], ids=str)
def test_residuals_follow_their_parameters(sizes: tuple[int, int, int], world4: WorkerPool) -> None:
    assert world4.run(other_buckets, sizes) == [(True, True)] * 4

"""Outer steps, weights and faults of whole runs under lossy wire formats: 2 groups x 2 replicas x 2 shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_fedshard import guard
from hf_fedshard.config import FederationConfig
from hf_fedshard.mesh import FederationMesh
from hf_fedshard.shards import local_shards
from hf_fedshard.simulation import Simulation
from tests.harness.models import full_state
from tests.harness.outer_runs import NUM_GROUPS, NUM_STEPS, Run, adamw, double, make_mesh, single
from tests.harness.pool import WorkerPool
from tests.harness.wire_reference import LossyAverage, Tensors
from tests.test_outer import CASES, reference_of


BUCKET = 1024
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"int8 {case}": (case, {"wire_format": "int8", **settings}) for case, settings in CASES.items()},
    **{
        f"{wire_format} {case}": (case, {"wire_format": wire_format, **CASES[case]})
        for wire_format in ("bf16", "int4")
        for case in ("fedavg", "nesterov")
    },
    "weights": ("nesterov", {"wire_format": "int4", "group_weights": "samples", **CASES["nesterov"]}),
    "poisoned": ("nesterov", {"wire_format": "int8", "poisoned": 1, **CASES["nesterov"]}),
    "offload": ("fedadam", {"wire_format": "int8", "offload_outer_state": True, **CASES["fedadam"]}),
    "synchronous start": ("nesterov", {"wire_format": "int8", "sync_steps_at_start": 2, **CASES["nesterov"]}),
    "synchronous end": ("nesterov", {"wire_format": "int4", "sync_steps_at_end": 2, **CASES["nesterov"]}),
    "local": ("fedavgm", {"wire_format": "int8", "local_parameters": "head.*", **CASES["fedavgm"]}),
}


def _clone(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def run_one(mesh: FederationMesh, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains, and keeps what went into each average and what came out of the border, on this rank's shards."""
    poisoned = settings.get("poisoned")
    run = Run(mesh, double(), **{name: value for name, value in settings.items() if name != "poisoned"})
    averager = run.rounds.averager
    keys = ("held", "anchors", "after", "weights", "borders", "metrics", "anchored", "owes")
    found: dict[str, Any] = {key: [] for key in keys}
    original = averager.average

    def average(held: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        found["held"].append(_clone(held.shards))
        found["anchors"].append(_clone(averager.outer.anchors))
        found["weights"].append(list(weights))
        outcome = original(held, weights, *args, **kwargs)
        found["after"].append(_clone(held.shards))
        return outcome

    averager.average = average  # type: ignore[method-assign]
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1 and poisoned == mesh.group_index:
            run.poison()
        metrics = run.train(step)
        if metrics is not None:
            found["borders"].append(full_state(run.model))
            found["metrics"].append(metrics)
            shards = local_shards(run.model)
            anchors = averager.outer.anchors
            found["anchored"].append(all(torch.equal(anchor, shards[name]) for name, anchor in anchors.items()))
            found["owes"].append(bool(averager.residuals))
    found["elements"] = sum(shard.numel() for shard in found["held"][0].values())
    found["residual_elements"] = sum(flat.numel() for flat in averager.residuals._slices.values())
    run.rounds.finish()
    guard.detach(run.rounds)
    return found


def run_all() -> dict[str, dict[str, Any]]:
    """Body: all runs on one mesh."""
    mesh = make_mesh()
    return {name: run_one(mesh, settings) for name, (_, settings) in RUNS.items()}


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, Any]]:
    return world8.run(run_all, limit_seconds=400)


@pytest.mark.parametrize("name", [name for name, (case, _) in RUNS.items() if case != "clipped"])
def test_is_the_formula_on_the_average_of_the_wire(runs: list[dict[str, Any]], name: str) -> None:
    case, settings = RUNS[name]
    for shard in range(2):
        # Ranks in order: group, replica, shard. Replicas hold the same.
        groups = [runs[4 * group + shard][name] for group in range(NUM_GROUPS)]
        average, outer = LossyAverage(settings["wire_format"], NUM_GROUPS, 2, BUCKET), reference_of(case)
        for number, anchors in enumerate(groups[0]["anchors"]):
            means = average([found["held"][number] for found in groups], anchors, groups[0]["weights"][number])
            expected = means if outer is None else outer(anchors, means, number)
            for found in (rank[name] for rank in runs[shard::2]):
                for key, tensor in expected.items():
                    error = (found["after"][number][key] - tensor).abs()
                    assert not error.numel() or error.max() < 1e-12, (key, error.max())


@pytest.mark.parametrize("name", RUNS)
def test_all_ranks_hold_the_same_bits(runs: list[dict[str, Any]], name: str) -> None:
    first = runs[0][name]
    for rank in (rank[name] for rank in runs):
        for state, other in zip(rank["borders"], first["borders"], strict=True):
            local = {key for key in state if "local_parameters" in RUNS[name][1] and key.startswith("head.")}
            assert all(torch.equal(tensor, other[key]) for key, tensor in state.items() if key not in local)
            assert all(torch.isfinite(tensor).all() for tensor in state.values())
        assert [m.pseudo_gradient_norm for m in rank["metrics"]] == [m.pseudo_gradient_norm for m in first["metrics"]]
        assert [m.drift for m in rank["metrics"]] == [m.drift for m in first["metrics"]]


def test_metrics(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["poisoned"]["metrics"][1].excluded == (1,)
    assert len(set(runs[0]["weights"]["metrics"][0].weights)) == 2
    # Of float64; two peers. Small buckets are padded to a block for each peer and replica.
    fedavg = {name: runs[0][f"{name} fedavg"]["metrics"][0].bytes_sent for name in ("bf16", "int8", "int4")}
    assert fedavg["int4"] < fedavg["int8"] < fedavg["bf16"]
    # A rank owes for its slice of its shards, and the padding of the last bucket.
    for rank in runs:
        found = rank["int8 nesterov"]
        assert found["elements"] / 2 <= found["residual_elements"] < found["elements"] / 2 + 2 * 64
        assert rank["bf16 nesterov"]["residual_elements"] == 0


def test_anchors_at_borders(runs: list[dict[str, Any]]) -> None:
    """The anchor is the model at every border, after synchronous steps too; these leave nothing owed."""
    for rank in runs:
        for name, found in rank.items():
            owes = {"synchronous start": [False, True], "synchronous end": [True, False]}.get(name, [True, True])
            if RUNS[name][1]["wire_format"] == "bf16":
                owes = [False, False]
            assert (found["anchored"], found["owes"]) == ([True, True], owes), name
            assert len(found["held"]) == (1 if "synchronous" in name else 2)


def test_clipping(runs: list[dict[str, Any]]) -> None:
    for metrics in runs[0]["int8 clipped"]["metrics"]:
        assert metrics.pseudo_gradient_norm is not None and metrics.pseudo_gradient_norm > 0.05


def simulate(model: nn.Module, num_groups: int = 2, **settings: Any) -> Simulation:
    torch.set_num_threads(1)
    return Simulation(model, FederationConfig(num_groups, 1, bucket_size_bytes=BUCKET, **settings), adamw)


def move(simulation: Simulation, size: float = 1e-2) -> Any:
    """A round of one step, in which every parameter that trains is moved by hand, other in each group."""
    for group in simulation.groups:
        generator = torch.Generator().manual_seed(group.index)
        with torch.no_grad():
            for param in group.model.parameters():
                step = torch.randn(param.shape, generator=generator).to(param)
                if param.requires_grad:
                    param.add_(step * size)
        group.count_step()
    return simulation.step()


def states(simulation: Simulation) -> list[Tensors]:
    return [_clone(group.model.state_dict()) for group in simulation.groups]


@pytest.mark.parametrize("wire_format", ["bf16", "int8", "int4"])
def test_unfrozen_parameters_begin_with_an_exact_average(wire_format: str) -> None:
    """In the first border they have no anchor: they are sent as they are. From then on they go with the others."""
    model = single()
    model.head.requires_grad_(False)
    simulation = simulate(model, wire_format=wire_format)
    before = move(simulation).bytes_sent
    for group in simulation.groups:
        group.model.head.requires_grad_(True)
    start = states(simulation)[0]
    at_first = move(simulation).bytes_sent
    num_head = sum(param.numel() for param in model.head.parameters())
    assert at_first == before + 4 * num_head, "the newcomers in fp32"
    for name in ("head.weight", "head.bias"):
        steps = []
        for group in range(2):
            generator = torch.Generator().manual_seed(group)
            drawn = {n: torch.randn(param.shape, generator=generator) for n, param in model.named_parameters()}
            steps.append(start[name] + drawn[name] * 1e-2)
        assert torch.equal(states(simulation)[0][name], (steps[0] + steps[1]) / 2)
    later = move(simulation).bytes_sent
    assert before <= later < at_first
    first, second = states(simulation)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("wire_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("outer", ["fedavg", "nesterov"])
def test_parameters_in_bfloat16(wire_format: str, outer: str) -> None:
    """Differences are taken to what the parameters held, not to the anchor with more bits, and groups end alike."""
    model = single().to(torch.bfloat16)
    simulation = simulate(model, wire_format=wire_format, outer_optimizer=outer)
    exact = simulate(single().to(torch.bfloat16), outer_optimizer=outer)
    for _ in range(3):
        move(simulation)
        move(exact)
        first, second = states(simulation)
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    anchors = simulation.groups[0].rounds.averager.outer.anchors
    assert {anchor.dtype for anchor in anchors.values()} == {torch.float32}
    for name, anchor in anchors.items():
        assert torch.equal(first[name], anchor.to(torch.bfloat16))
    # Nobody trains: nothing is sent, whatever the anchor has more, but for what was owed.
    groups = simulation.groups
    for group in groups:
        group.rounds.averager.residuals.reset()
        group.count_step()
    held = states(simulation)[0]
    metrics = simulation.step()
    assert metrics is not None and metrics.drift == 0
    if outer == "fedavg":
        assert all(torch.equal(tensor, held[name]) for name, tensor in states(simulation)[0].items())
    error = max((first[name] - tensor).abs().max().item() for name, tensor in states(exact)[0].items())
    assert error < {"bf16": 0.01, "int8": 0.01, "int4": 0.05}[wire_format]


def test_group_left_out_forgets_what_it_owed() -> None:
    simulation = simulate(single(), 3, wire_format="int4")
    move(simulation)
    owed = [group.rounds.averager.residuals for group in simulation.groups]
    assert all(any(flat.any() for flat in residuals._slices.values()) for residuals in owed)
    with torch.no_grad():
        next(simulation.groups[1].model.parameters()).fill_(float("nan"))
    metrics = move(simulation)
    assert metrics.excluded == (1,)
    for bucket, flat in enumerate(owed[1]._slices.values()):
        # It has encoded the sum of its own part, and owes what that has lost.
        parts = flat.view(3, -1)
        assert not parts[0].any() and not parts[2].any() and parts[1].any(), bucket


@pytest.mark.parametrize("wire_format", ["bf16", "int8", "int4"])
def test_moments_travel_in_bfloat16(wire_format: str) -> None:
    """Half the bytes: the mean of two within 2^-7, second moments never negative, none vanishes that fp32 can hold."""
    simulation = simulate(single(), wire_format=wire_format, inner_moments="average")
    values = []
    for group in simulation.groups:
        generator = torch.Generator().manual_seed(group.index)
        for param in group.model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        group.optimizer.step()
        state = [group.optimizer.state[param] for param in group.model.parameters()]
        state[0]["exp_avg_sq"].mul_(1e-30)
        values.append([{key: entry[key].clone() for key in ("exp_avg", "exp_avg_sq")} for entry in state])
        group.count_step()
    metrics = simulation.step()
    assert metrics is not None
    num_elements = sum(param.numel() for param in simulation.model.parameters())
    assert metrics.moment_bytes_sent == pytest.approx(2 * 2 * num_elements, abs=8)
    for group in simulation.groups:
        for index, param in enumerate(group.model.parameters()):
            for key in ("exp_avg", "exp_avg_sq"):
                mean = (values[0][index][key] + values[1][index][key]) / 2
                found = group.optimizer.state[param][key]
                size = (values[0][index][key].abs() + values[1][index][key].abs()) / 2
                assert ((found - mean).abs() <= size * 2.0**-7).all()
                if key == "exp_avg_sq":
                    assert (found > 0).all() == (mean > 0).all() and (found >= 0).all()

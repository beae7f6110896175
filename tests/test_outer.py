"""Outer steps of 2 groups x 2 replicas x 2 shards against formulas of the papers on whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hf_fedshard.averaging import ModelAverager
from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import FederationMesh, build_federation_mesh
from hf_fedshard.outer import OuterLoop
from tests.harness.models import full_state
from tests.harness.outer_runs import (
    Run,
    assert_matches,
    double,
    dtypes_of,
    make_mesh,
    refer,
    run_case,
    run_cases,
    single,
)
from tests.harness.pool import WorkerPool
from tests.harness.reference_groups import State


CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg rate": {"outer_learning_rate": 1.5},
    "fedavgm": {"outer_optimizer": "fedavgm", "outer_options": "momentum=0.8"},
    "nesterov": {"outer_optimizer": "nesterov"},
    "fedadagrad": {"outer_optimizer": "fedadagrad", "outer_learning_rate": 0.03},
    "fedadam": {"outer_optimizer": "fedadam", "outer_options": {"beta2": 0.95}},
    "fedyogi": {"outer_optimizer": "fedyogi", "outer_options": "tau=0.01"},
    "AdamW": {"outer_optimizer": "AdamW", "outer_learning_rate": 0.02, "outer_options": "weight_decay=0.1"},
    "RMSprop": {"outer_optimizer": "RMSprop", "outer_options": "momentum=0.5"},
    "clipped": {"outer_optimizer": "nesterov", "outer_max_norm": 0.05},
    "scheduled": {
        "outer_optimizer": "fedavgm",
        "outer_schedule": "cosine",
        "outer_warmup_rounds": 1,
        "outer_schedule_rounds": 3,
    },
}  # fmt: skip


class Reference:
    """A formula of an outer step, for each tensor by itself, with what it remembers."""

    def __init__(self, formula: Callable[[dict[str, Any], torch.Tensor, int], torch.Tensor], limit: float = math.inf):
        self.formula = formula
        self.limit = limit
        self.memory: dict[str, dict[str, Any]] = {}
        self.norms: list[float] = []

    def __call__(self, anchor: State, average: State, number: int) -> State:
        differences = {name: anchor[name] - average[name] for name in average}
        self.norms.append(math.sqrt(sum(float(value.square().sum()) for value in differences.values())))
        factor = min(1.0, self.limit / self.norms[-1])
        return {
            name: anchor[name] - self.formula(self.memory.setdefault(name, {}), value * factor, number)
            for name, value in differences.items()
        }


def momentum(rate: Callable[[int], float], beta: float, nesterov: bool = False) -> Any:
    def formula(memory: dict[str, Any], d: torch.Tensor, number: int) -> torch.Tensor:
        memory["v"] = beta * memory.get("v", 0) + d
        return rate(number) * (d + beta * memory["v"] if nesterov else memory["v"])

    return formula


def adaptive(kind: str, rate: float, beta1: float, beta2: float, tau: float) -> Any:
    def formula(memory: dict[str, Any], d: torch.Tensor, number: int) -> torch.Tensor:
        memory["m"] = beta1 * memory.get("m", 0) + (1 - beta1) * d
        v = memory.get("v", torch.full_like(d, tau**2))
        memory["v"] = {
            "adagrad": v + d**2,
            "adam": beta2 * v + (1 - beta2) * d**2,
            "yogi": v - (1 - beta2) * d**2 * torch.sign(v - d**2),
        }[kind]
        return rate * memory["m"] / (memory["v"].sqrt() + tau)

    return formula


class OfTorch:
    """A class of torch on whole tensors."""

    def __init__(self, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
        self.make = make
        self.optimizer: torch.optim.Optimizer | None = None
        self.anchors: State = {}

    def __call__(self, anchor: State, average: State, number: int) -> State:
        if self.optimizer is None:
            self.anchors = {name: anchor[name].detach().clone() for name in average}
            self.optimizer = self.make(list(self.anchors.values()))
        for name, own in self.anchors.items():
            own.grad = own - average[name]
        self.optimizer.step()
        return {name: own.clone() for name, own in self.anchors.items()}


def reference_of(case: str) -> Any:
    half = {0: 0.5, 1: 1.0}  # (t + 1) / (1 + 1), then the cosine at 0
    return {
        "fedavg": lambda: None,
        "fedavg rate": lambda: Reference(lambda memory, d, number: 1.5 * d),
        "fedavgm": lambda: Reference(momentum(lambda number: 1.0, 0.8)),
        "nesterov": lambda: Reference(momentum(lambda number: 0.7, 0.9, nesterov=True)),
        "fedadagrad": lambda: Reference(adaptive("adagrad", 0.03, 0.0, 0.0, 1e-3)),
        "fedadam": lambda: Reference(adaptive("adam", 0.01, 0.9, 0.95, 1e-3)),
        "fedyogi": lambda: Reference(adaptive("yogi", 0.01, 0.9, 0.99, 0.01)),
        "AdamW": lambda: OfTorch(lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)),
        "RMSprop": lambda: OfTorch(lambda params: torch.optim.RMSprop(params, momentum=0.5)),
        "clipped": lambda: Reference(momentum(lambda number: 0.7, 0.9, nesterov=True), limit=0.05),
        "scheduled": lambda: Reference(momentum(half.__getitem__, 0.9)),
    }[case]()


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, Any]]:
    return world8.run(run_cases, CASES, limit_seconds=240)


@pytest.mark.parametrize("case", CASES)
def test_is_the_papers_formula(runs: list[dict[str, Any]], case: str) -> None:
    ranks, outer = [rank[case] for rank in runs], reference_of(case)
    result = refer(outer=outer)
    assert_matches(ranks, result)
    metrics = ranks[0]["metrics"]
    for rank in ranks[1:]:  # the very same numbers, or the groups would scale differently
        assert [m.pseudo_gradient_norm for m in rank["metrics"]] == [m.pseudo_gradient_norm for m in metrics]
        assert [m.outer_learning_rate for m in rank["metrics"]] == [m.outer_learning_rate for m in metrics]
    if case == "fedavg":
        assert metrics[0].pseudo_gradient_norm is None
        assert "fedshard/outer_learning_rate" not in metrics[0].as_logs()
    elif isinstance(outer, Reference):
        assert [m.pseudo_gradient_norm for m in metrics] == pytest.approx(outer.norms, rel=1e-9)
        assert metrics[0].as_logs()["fedshard/pseudo_gradient_norm"] == pytest.approx(outer.norms[0], rel=1e-3)
    if case == "clipped":
        assert min(outer.norms) > 0.06, "it must have clipped"
    if case == "scheduled":
        assert [m.outer_learning_rate for m in metrics] == pytest.approx([0.5, 1.0])


# Tensors as large as this rank's shards that the outer loop holds: the anchor, and the optimizer's state.
MEMORY = {
    "fedavg": (0, 0),
    "fedavgm": (1, 1),
    "nesterov": (1, 1),
    "fedadagrad": (1, 1),
    "fedadam": (1, 2),
    "AdamW": (1, 2),
}


@pytest.mark.parametrize("case", MEMORY)
def test_memory_is_as_stated(runs: list[dict[str, Any]], case: str) -> None:
    for rank in runs:
        found = rank[case]
        anchors, state = MEMORY[case]
        assert (found["anchors"], found["state"]) == (anchors * found["elements"], state * found["elements"])


def _single_runs() -> dict[str, Any]:
    mesh = make_mesh()
    cases = {"uniform": {}, "steps": {"group_weights": "steps"}, "nesterov": {"outer_optimizer": "nesterov"}}
    return {name: run_case(mesh, settings, single) for name, settings in cases.items()}


def test_fp32_and_equal_weights(world8: WorkerPool) -> None:
    """Equal weights are uniform weights bit for bit; in fp32 the outer step is the reference's within its rounding."""
    runs = world8.run(_single_runs, limit_seconds=120)
    for rank in runs:
        for state, expected in zip(rank["steps"]["borders"], rank["uniform"]["borders"], strict=True):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    assert_matches([rank["uniform"] for rank in runs], refer(single), 2e-6)
    assert_matches([rank["nesterov"] for rank in runs], refer(single, outer=reference_of("nesterov")), 2e-6)


def _config(**settings: Any) -> FederationConfig:
    return FederationConfig(num_groups=2, **settings)


def test_average_is_taken_bit_for_bit_and_nothing_is_kept() -> None:
    outer = OuterLoop(_config())
    shards = {"a": torch.randn(5, 3)}
    outer.restart(shards)
    before = shards["a"].clone()
    means = outer.means(shards)
    assert means["a"] is shards["a"]
    assert outer.form_pseudo_gradients(means, dtypes_of(shards), dict.fromkeys(shards, 1)) == 0
    assert outer.step(means, shards, dtypes_of(shards), 0.0) is None
    assert torch.equal(shards["a"], before) and not outer.anchors and outer.optimizer is None


SMALL_STEPS: dict[str, dict[str, Any]] = {
    "SGD": {"outer_optimizer": "SGD", "outer_learning_rate": 1.0},
    "half rate": {"outer_optimizer": "SGD", "outer_learning_rate": 0.5},
    "nesterov": {"outer_optimizer": "nesterov"},
    "fedadam": {"outer_optimizer": "fedadam", "outer_learning_rate": 1e-3},
    "clipped": {"outer_optimizer": "fedavgm", "outer_max_norm": 1e-3},
}


@pytest.mark.parametrize("settings", SMALL_STEPS.values(), ids=SMALL_STEPS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_small_steps_add_up(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """
    The groups begin each round with the model as its dtype rounds it, and their average is a fraction of a step of that
    dtype away from there. The anchor goes where that of a float64 model goes, whose groups move alike.
    """
    step = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2.0**-10
    moved = -0.3 * step
    loops = []
    for kind in (dtype, torch.float64):
        outer, shards = (
            OuterLoop(_config(**settings)),
            {"a": torch.ones(4, dtype=kind), "none": torch.ones(0, 3, dtype=kind)},
        )
        outer.restart(shards)
        for _ in range(60):
            means = outer.means(shards)
            assert means["a"].dtype == torch.promote_types(kind, torch.float32)
            means["a"].add_(moved)
            dtypes = dtypes_of(shards)
            norm = outer.form_pseudo_gradients(means, dtypes, dict.fromkeys(shards, 1)) ** 0.5
            outer.step(means, shards, dtypes, norm)
        assert torch.equal(shards["a"], outer.anchors["a"].to(kind))
        assert outer.num_steps == 60
        loops.append(outer.anchors["a"].double())
    way = float((loops[1] - 1).abs().max())
    assert way > step
    assert float((loops[0] - loops[1]).abs().max()) < 1e-3 * way


@pytest.mark.parametrize("name", ["nesterov", "Adagrad", "AdamW"])
def test_what_trains_later_begins_with_its_first_average(name: str) -> None:
    outer = OuterLoop(_config(outer_optimizer=name))
    shards = {"a": torch.zeros(3)}
    outer.restart(shards)
    shards["b"] = torch.full((2,), 5.0)
    for _ in range(3):
        means = outer.means(shards)
        outer.form_pseudo_gradients(means, dtypes_of(shards), dict.fromkeys(shards, 1))
        outer.step(means, shards, dtypes_of(shards), 1.0)
        assert torch.isfinite(shards["b"]).all()
    assert torch.allclose(shards["b"], torch.full((2,), 5.0), rtol=0.2)  # AdamW decays weights


def _frozen() -> list[Any]:
    """
    A layer that is frozen in the second round, another that is local and frozen too: the state at each border, and what
    travels.
    """
    mesh, found = make_mesh(), []
    run = Run(mesh, double(), outer_optimizer="AdamW", outer_learning_rate=0.1, local_parameters="head.bias")
    for step in (0, 1, 2, 3, 0, 1, 2, 3):
        metrics = run.train(step)
        if len(found) == 1 and run.rounds.steps == 1:  # inside the second round
            run.model.first.requires_grad_(False)
            run.model.head.bias.requires_grad_(False)
        if len(found) == 3:
            run.model.first.requires_grad_(True)
        if metrics is not None:
            averager = run.rounds.averager
            found.append(
                (
                    full_state(run.model),
                    metrics.bytes_sent,
                    list(averager.outer.anchors),
                    averager.trained.local_names(),
                )
            )
    run.rounds.finish()
    return found


def test_a_frozen_layer_stays_and_travels_no_more(world8: WorkerPool) -> None:
    """It is averaged at the border after the freeze; then the outer optimizer, which decays weights, must not move it."""
    ranks = world8.run(_frozen)
    for rank in ranks:
        (_, sent, *_), (before, again, anchors, _), (after, less, *_), (thawed, more, *_) = rank
        assert again == sent > less and more == sent
        assert not any(name.startswith("first") for name in anchors)
        for name, tensor in after.items():
            frozen = name.startswith("first") or name == "head.bias"
            assert torch.equal(tensor, before[name]) == frozen, name
            if name != "head.bias":
                assert torch.equal(tensor, ranks[0][2][0][name])
        assert not torch.equal(after["first.weight"], thawed["first.weight"])
        assert all(border[3] == {"head.bias"} for border in rank), "each group still has its own"
    assert not torch.equal(ranks[0][3][0]["head.bias"], ranks[-1][3][0]["head.bias"])


def _tensor_parallel() -> tuple[FederationMesh, nn.Module]:
    """A model of which some parameters are cut by two axes, and others by one and held by all ranks of the other."""
    mesh = build_federation_mesh("cpu", FederationLayout(2, 1, {"dp_shard": 2, "tp": 2}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)).double()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh.root["tp"], plan)
    return mesh, fully_shard(model, mesh=mesh.root["dp_shard"])


def _norms_under_tensor_parallelism() -> tuple[float, float]:
    mesh, model = _tensor_parallel()
    averager = ModelAverager(model, mesh, _config(outer_optimizer="nesterov"), [])
    shards = averager.trained.averaged_shards()
    copies = averager.tensors.copies(dict(model.named_parameters()))
    parts = [shard.square().sum() / copies[name] for name, shard in shards.items()]
    total = torch.stack(parts).sum()
    dist.all_reduce(total, group=mesh.group)
    whole = sum(param.full_tensor().square().sum() for param in model.parameters())
    return float(total), float(whole)


def test_each_element_counts_once(world8: WorkerPool) -> None:
    """Also of parameters that two axes cut, which PyTorch calls by a placement of its own, and of those that one leaves."""
    for total, whole in world8.run(_norms_under_tensor_parallelism):
        assert total == pytest.approx(whole, rel=1e-12)


def _drift_under_tensor_parallelism(settings: dict[str, Any]) -> tuple[float, float]:
    """What is found when group 1 has moved each parameter by another factor, and what whole tensors say."""
    mesh, model = _tensor_parallel()
    averager = ModelAverager(model, mesh, _config(**settings), [])
    distance = norm = 0.0
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            square, change = float(param.full_tensor().square().sum()), 0.1 * number
            param.mul_(1 + change * mesh.group_index)
            distance += (change / 2) ** 2 * square
            norm += (1 + change / 2) ** 2 * square
    return averager.average(averager.tensors.collect(), [1.0, 1.0], ()).drift, math.sqrt(distance / norm)


@pytest.mark.parametrize(
    ("settings", "tolerance"), [({}, 1e-12), ({"outer_optimizer": "nesterov"}, 1e-12), ({"wire_format": "int8"}, 0.02)]
)
def test_each_element_counts_once_in_the_drift(world8: WorkerPool, settings: dict[str, Any], tolerance: float) -> None:
    """Or parameters that every rank of a tensor-parallel axis holds would weigh more than those that it cuts."""
    for drift, expected in world8.run(_drift_under_tensor_parallelism, settings):
        assert drift == pytest.approx(expected, rel=tolerance)


def test_double_model_is_double() -> None:
    assert {param.dtype for param in double().parameters()} == {torch.float64}

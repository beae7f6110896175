"""Groups held in one process do what groups of processes do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fedshard import guard
from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import build_federation_mesh
from hf_fedshard.rounds import Rounds
from hf_fedshard.simulation import Simulation
from tests.harness.data import Batch, collate, feature_samples
from tests.harness.models import full_state, tiny_batchnorm
from tests.harness.outer_runs import adamw, adapted, double, num_samples, num_tokens, single, sum_over
from tests.harness.pool import WorkerPool


STEPS, SYNC_EVERY = 5, 2
MODELS = {"double": double, "single": single, "adapted": adapted}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("double", {}),
    "single": ("single", {"outer_optimizer": "nesterov"}),
    "all": (
        "double",
        {
            "outer_optimizer": "fedadam",
            "outer_max_norm": 0.1,
            "outer_schedule": "linear",
            "outer_schedule_rounds": 3,
            "group_weights": "tokens",
            "inner_moments": "average",
            "proximal_mu": 0.5,
            "local_parameters": "head.bias",
        },
    ),
    "samples": ("double", {"group_weights": "samples", "inner_moments": "reset"}),
    "products": ("adapted", {"lora_average": "product"}),
    "frozen": ("adapted", {"lora_average": "freeze_a", "outer_optimizer": "AdamW"}),
    "synchronous": ("double", {"sync_steps_at_start": 1, "sync_steps_at_end": 1, "outer_optimizer": "nesterov"}),
    "averaged, then synchronous": (
        "double",
        {
            "sync_steps_at_end": 2,
            "inner_moments": "average",
            "outer_optimizer": "fedavgm",
            "local_parameters": "head.bias",
        },
    ),
    "synchronous throughout": ("single", {"sync_steps_at_start": STEPS}),
}
ROUNDS = {"synchronous": [1, 2, 1, 1], "averaged, then synchronous": [2, 1, 2]}
MAX_NORM = 0.05


def draws(group: int) -> list[Batch]:
    """Batches of a group, each of an even number of samples, that its ranks share."""
    size = 2 + 2 * group
    samples = feature_samples(size * STEPS, group)
    return [collate(samples[step * size : (step + 1) * size]) for step in range(STEPS)]


def config(settings: dict[str, Any]) -> FederationConfig:
    return FederationConfig(2, SYNC_EVERY, bucket_size_bytes=1024, **settings)


def clip(model: nn.Module, settings: dict[str, Any]) -> None:
    """By the norm of the gradient that steps: in synchronous steps that of the mean over the groups."""
    if "sync_steps_at_end" in settings:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def in_processes() -> dict[str, Any]:
    """2 groups of 2 shards."""
    mesh = build_federation_mesh("cpu", FederationLayout(2, 1, {"dp_shard": 2}))
    guard.watch(mesh)
    found = {}
    for case, (kind, settings) in CASES.items():
        model = fully_shard(MODELS[kind](), mesh=mesh.fsdp)
        optimizer = adamw([param for param in model.parameters() if param.requires_grad])
        rounds = Rounds(model, mesh, config(settings), [optimizer], num_training_steps=STEPS)
        metrics = []
        for batch in draws(mesh.group_index):
            half = num_samples(batch) // 2
            part = slice(half * mesh.group.rank(), half * (mesh.group.rank() + 1))
            own = {name: value[part] for name, value in batch.items()}
            (sum_over(model, own, num_samples(batch)) * 2).backward()  # FSDP2 takes the mean of two ranks
            clip(model, settings)
            optimizer.step()
            optimizer.zero_grad()
            metrics.append(rounds.step(tokens=num_tokens(own), samples=half))
        metrics.append(rounds.finish())
        found[case] = (full_state(model), [m for m in metrics if m])
    return found


def in_one_process(kind: str, settings: dict[str, Any]) -> tuple[Simulation, list[Any]]:
    torch.set_num_threads(1)
    simulation = Simulation(MODELS[kind](), config(settings), adamw, num_training_steps=STEPS)
    metrics = []
    for step in range(STEPS):
        batches = [draws(group.index)[step] for group in simulation.groups]
        for group, batch in zip(simulation.groups, batches, strict=True):
            sum_over(group.model, batch, num_samples(batch)).backward()
        simulation.average_gradients()
        for group, batch in zip(simulation.groups, batches, strict=True):
            clip(group.model, settings)
            group.optimizer.step()
            group.optimizer.zero_grad()
            group.count_step(tokens=num_tokens(batch), samples=num_samples(batch))
        metrics.append(simulation.step())
    metrics.append(simulation.finish())
    return simulation, [m for m in metrics if m]


@pytest.fixture(scope="module")
def runs(world4: WorkerPool) -> list[dict[str, Any]]:
    return world4.run(in_processes, limit_seconds=240)


@pytest.mark.parametrize("case", CASES)
def test_is_the_run_of_processes(runs: list[dict[str, Any]], case: str) -> None:
    kind, settings = CASES[case]
    simulation, metrics = in_one_process(kind, settings)
    tolerance = 1e-6 if kind == "single" else 1e-12
    for rank, found in enumerate(runs):
        state, measured = found[case]
        own = simulation.groups[rank // 2].model.state_dict()
        error = max((tensor - own[name]).abs().max().item() for name, tensor in state.items())
        assert error < tolerance, error
        assert [m.steps for m in measured] == [m.steps for m in metrics] == ROUNDS.get(case, [2, 2, 1])
        for one, other in zip(measured, metrics, strict=True):
            assert (one.weights, one.synchronous) == (other.weights, other.synchronous)
            # FSDP2 pads rows to an even number, and reduces gradients with the padding.
            assert 1 <= one.bytes_sent / other.bytes_sent < (1.1 if one.synchronous else 1.0001)
            for name in ("drift", "pseudo_gradient_norm", "outer_learning_rate", "lora_error"):
                values = getattr(one, name), getattr(other, name)
                assert values[0] == values[1] or values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-9), name
    states = [group.model.state_dict() for group in simulation.groups]
    differing = {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}
    assert differing == ({"head.bias"} if "local_parameters" in settings else set())


def simulate(num_groups: int, model: nn.Module, **settings: Any) -> Simulation:
    torch.set_num_threads(1)
    return Simulation(model, FederationConfig(num_groups, 1, **settings), adamw)


def test_buffers_and_many_groups() -> None:
    simulation = simulate(5, tiny_batchnorm())
    for group in simulation.groups:
        group.model(**collate(feature_samples(8, group.index)))["loss"].backward()
        group.optimizer.step()
        group.count_step(float(group.index))
    means = [group.model.state_dict()["blocks.0.norm.running_mean"] for group in simulation.groups]
    expected = torch.stack(means).mean(0)
    metrics = simulation.step()
    assert metrics is not None and metrics.losses == (0.0, 1.0, 2.0, 3.0, 4.0)
    for group in simulation.groups:
        torch.testing.assert_close(group.model.state_dict()["blocks.0.norm.running_mean"], expected)
    assert simulation.at_border and simulation.finish() is None


def test_poisoned_group() -> None:
    simulation = simulate(3, single(), outer_optimizer="fedavgm")
    bad = simulation.groups[1]
    with torch.no_grad():
        next(bad.model.parameters()).fill_(float("nan"))
    for group in simulation.groups:
        group.count_step()
    metrics = simulation.step()
    assert metrics is not None and metrics.excluded == (1,)
    for name, tensor in bad.model.state_dict().items():
        assert torch.equal(tensor, single().state_dict()[name])


def test_errors_reach_the_caller_and_leave_no_thread_waiting() -> None:
    simulation = simulate(2, single(), group_weights="samples")
    for group in simulation.groups:
        group.count_step()
    with pytest.raises(ValueError, match="no group has counted any samples"):
        simulation.step()
    with pytest.raises(RuntimeError, match="different numbers of optimizer steps"):
        simulation.groups[0].count_step()
        simulation.step()

    def fail(*args: Any) -> None:
        raise KeyError("on one group")

    simulation.groups[1].rounds.averager.tensors.collect = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyError, match="on one group"):
        simulation.step()


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="at least 2 groups, but num_groups is 1"):
        Simulation(single(), FederationConfig(1), adamw)
    with pytest.raises(ValueError, match="'nowhere', which names no parameter"):
        Simulation(single(), FederationConfig(2, local_parameters="nowhere"), adamw)
    for settings, text in (
        ({"sync_steps_at_end": 2}, "sync_steps_at_end=2 needs the length of the run.*num_training_steps"),
        ({"sync_every": "auto"}, "follows the time"),
    ):
        with pytest.raises(ValueError, match=text):
            Simulation(single(), FederationConfig(2, **settings), adamw)
    assert not dist.is_initialized()


def test_moments_that_are_not_finite_ahead_of_synchronous_steps(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(1)
    simulation = Simulation(single(), FederationConfig(2, 2, sync_steps_at_end=1), adamw, num_training_steps=3)
    for _ in range(2):
        for group in simulation.groups:
            sum_over(group.model, collate(feature_samples(4, group.index)), 4).backward()
            group.optimizer.step()
            group.optimizer.zero_grad()
            group.count_step()
    for state in simulation.groups[1].optimizer.state.values():
        state["exp_avg_sq"].fill_(float("inf"))
    assert simulation.step() is not None and simulation.synchronous
    assert sum("moments of federation group 1 are not finite" in r.getMessage() for r in caplog.records) == 1
    held = [[state["exp_avg_sq"] for state in group.optimizer.state.values()] for group in simulation.groups]
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(*held, strict=True))


def test_a_group_that_is_trained_on_belongs_to_nobody() -> None:
    """After the end its optimizer counts for no round: steps beyond two rounds of one were refused."""
    simulation = simulate(2, single(), sync_steps_at_start=1)
    simulation.finish()
    group = simulation.groups[0]
    for _ in range(2 * group.rounds.course.period + 1):
        sum_over(group.model, collate(feature_samples(4, 0)), 4).backward()
        group.optimizer.step()
    assert group.rounds.num_optimizer_steps == 0


def test_synchronous_steps_need_the_mean_of_all_gradients() -> None:
    simulation = simulate(2, single(), sync_steps_at_start=1)
    batches = [collate(feature_samples(4, group.index)) for group in simulation.groups]
    for group, batch in zip(simulation.groups, batches, strict=True):
        sum_over(group.model, batch, 4).backward()
    with pytest.raises(RuntimeError, match=r"those of one group. Call `simulation.average_gradients\(\)`"):
        simulation.groups[0].optimizer.step()
    simulation.groups[1].optimizer.zero_grad()
    with pytest.raises(ValueError, match="1 of 2 groups have no gradient of first.weight"):
        simulation.average_gradients()
    sum_over(simulation.groups[1].model, batches[1], 4).backward()
    for _ in range(2):
        # Once averaged they are equal, and stay so.
        simulation.average_gradients()
    for group in simulation.groups:
        group.optimizer.step()
        group.count_step()
    first, second = (list(group.model.parameters()) for group in simulation.groups)
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(first, second, strict=True))
    metrics = simulation.step()
    assert metrics is not None and metrics.synchronous and metrics.drift == 0
    assert not simulation.synchronous
    own = [param.grad.clone() for param in second]
    for group, batch in zip(simulation.groups, batches, strict=True):
        sum_over(group.model, batch, 4).backward()
    simulation.average_gradients()
    assert not all(torch.equal(one.grad, two.grad) for one, two in zip(first, second, strict=True))
    assert not any(torch.equal(param.grad, before) for param, before in zip(second, own, strict=True))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"sync_every": "1x2,3"}, [1, 1, 3, 3]),
        ({"sync_every": "drift", "max_drift": 1e-9, "max_sync_every": 2}, [2, 1, 1, 1]),
        ({"sync_every": "drift", "max_drift": 1e9, "min_sync_every": 2, "max_sync_every": 5}, [5, 5]),
    ],
)
def test_periods_that_change(settings: dict[str, Any], steps: list[int]) -> None:
    torch.set_num_threads(1)
    simulation = Simulation(single(), FederationConfig(2, outer_optimizer="nesterov", **settings), adamw)
    found = []
    while len(found) < len(steps):
        for group in simulation.groups:
            batch = collate(feature_samples(4, group.index))
            sum_over(group.model, batch, 4).backward()
            group.optimizer.step()
            group.optimizer.zero_grad()
            group.count_step()
        metrics = simulation.step()
        if metrics is not None:
            found.append(metrics)
    assert [metrics.steps for metrics in found] == steps
    assert all(metrics.period == metrics.steps and metrics.drift > 0 for metrics in found)


def four_groups_of_one() -> dict[str, Any]:
    """Body: each rank is a group with one shard."""
    mesh = build_federation_mesh("cpu", FederationLayout(4, 1, {"dp_shard": 1}))
    guard.watch(mesh)
    found = {}
    for wire_format in ("bf16", "int8", "int4"):
        model = fully_shard(double(), mesh=mesh.fsdp)
        optimizer = adamw(model.parameters())
        settings = {"outer_optimizer": "nesterov", "wire_format": wire_format, "bucket_size_bytes": 1024}
        rounds = Rounds(model, mesh, FederationConfig(4, SYNC_EVERY, **settings), [optimizer])
        metrics = []
        for batch in draws(mesh.group_index):
            sum_over(model, batch, num_samples(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.append(rounds.step())
        metrics.append(rounds.finish())
        found[wire_format] = (full_state(model), [m.bytes_sent for m in metrics if m])
    return found


def test_lossy_wire_formats(world4: WorkerPool) -> None:
    """Blocks are cut from what a rank holds: with one shard a simulation sends the very codes that processes do."""
    runs = world4.run(four_groups_of_one, limit_seconds=240)
    torch.set_num_threads(1)
    for wire_format in ("bf16", "int8", "int4"):
        settings = {"outer_optimizer": "nesterov", "wire_format": wire_format, "bucket_size_bytes": 1024}
        simulation = Simulation(double(), FederationConfig(4, SYNC_EVERY, **settings), adamw)
        sent = []
        for step in range(STEPS):
            for group in simulation.groups:
                batch = draws(group.index)[step]
                sum_over(group.model, batch, num_samples(batch)).backward()
                group.optimizer.step()
                group.optimizer.zero_grad()
                group.count_step()
            sent.append(simulation.step())
        sent.append(simulation.finish())
        states = [group.model.state_dict() for group in simulation.groups]
        for rank in runs:
            state, in_processes = rank[wire_format]
            assert in_processes == [metrics.bytes_sent for metrics in sent if metrics]
            for name, tensor in state.items():
                assert (tensor - states[0][name]).abs().max() < 1e-12, (wire_format, name)
                assert all(torch.equal(states[0][name], other[name]) for other in states)

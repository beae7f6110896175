"""Groups held in one process average beside their steps as groups of processes do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import build_federation_mesh
from hf_fedshard.rounds import Rounds
from hf_fedshard.simulation import Simulation
from tests.harness.data import collate, feature_samples
from tests.harness.models import full_state, tiny_batchnorm
from tests.harness.outer_runs import adamw, num_samples, sum_over
from tests.harness.overlap_runs import NUM_GROUPS, NUM_STEPS, block_net, draws, run_cases
from tests.harness.pool import WorkerPool
from tests.test_overlap import CASES as SETTINGS


CASES: dict[str, tuple[dict[str, Any], Collection[int]]] = {
    **{name: (settings, borders) for name, (settings, borders, _) in SETTINGS.items()},
    "drift": ({"sync_every": "drift", "max_drift": 1e-4, "min_sync_every": 2, "overlap_steps": 1}, ()),
    "pulled": (
        {
            "sync_every": 3,
            "overlap_steps": 3,
            "proximal_mu": 0.1,
            "inner_moments": "reset",
            "local_parameters": "head.*",
        },
        (7,),
    ),
    "synchronous": ({"sync_every": 3, "overlap_steps": 2, "sync_steps_at_start": 2, "sync_steps_at_end": 2}, ()),
}


def simulate(
    settings: dict[str, Any], borders: Collection[int], model: Callable[[], nn.Module] = block_net
) -> dict[str, Any]:
    """What `run_case` does, with the batches of each group's two ranks in one."""
    torch.set_num_threads(1)
    simulation = Simulation(
        model(), FederationConfig(NUM_GROUPS, bucket_size_bytes=1024, **settings), adamw, num_training_steps=NUM_STEPS
    )
    batches = [draws(rank, 2 * NUM_GROUPS) for rank in range(2 * NUM_GROUPS)]
    found: dict[str, Any] = {"borders": [], "metrics": []}
    for step in range(NUM_STEPS):
        counts = [sum(num_samples(batches[2 * g + half][step]) for half in range(2)) for g in range(NUM_GROUPS)]
        for group, items in zip(simulation.groups, counts, strict=True):
            total = sum(counts) / NUM_GROUPS if simulation.synchronous else items
            for half in range(2):
                sum_over(group.model, batches[2 * group.index + half][step], total).backward()
        simulation.average_gradients()
        for group, items in zip(simulation.groups, counts, strict=True):
            group.optimizer.step()
            group.optimizer.zero_grad()
            group.count_step(samples=items)
        metrics = simulation.step()
        found["metrics"] += [*metrics.earlier, metrics] if metrics is not None else []
        if step + 1 in borders:
            report = simulation.close().report()
            assert simulation.at_border
            found["borders"].append(states(simulation))
            found["metrics"] += [*report.earlier, report]
    simulation.finish()
    assert simulation.at_border
    found["borders"].append(states(simulation))
    return found


def states(simulation: Simulation) -> list[dict[str, torch.Tensor]]:
    return [copy.deepcopy(group.model.state_dict()) for group in simulation.groups]


@pytest.fixture(scope="module")
def processes(world4: WorkerPool) -> list[dict[str, dict[str, Any]]]:
    return world4.run(run_cases, CASES, limit_seconds=300)


@pytest.mark.parametrize("name", CASES)
def test_is_the_run_of_processes(processes: list[dict[str, dict[str, Any]]], name: str) -> None:
    settings, borders = CASES[name]
    found = simulate(settings, borders)
    for rank, case in enumerate(processes):
        run, error = case[name], 0.0
        assert len(run["borders"]) == len(found["borders"]) == len(borders) + 1
        for state, groups in zip(run["borders"], found["borders"], strict=True):
            for key, tensor in state.items():
                error = max(error, (tensor - groups[rank // 2][key]).abs().max().item())
                assert torch.equal(groups[0][key], groups[1][key]) == (
                    not ("local_parameters" in settings and key.startswith("head"))
                )
        assert error < 1e-12, error
        assert [m.round for m in run["metrics"]] == [m.round for m in found["metrics"]]
        for one, other in zip(run["metrics"], found["metrics"], strict=True):
            for field in ("steps", "period", "synchronous", "excluded"):
                assert getattr(one, field) == getattr(other, field), field
            assert one.weights == pytest.approx(other.weights)
            assert (one.overlapped_seconds is None) == (other.overlapped_seconds is None)
            # FSDP2 pads rows to an even number, and reduces gradients with the padding.
            assert one.bytes_sent == pytest.approx(other.bytes_sent, rel=0.1 if one.synchronous else 0)
            for field in ("drift", "pseudo_gradient_norm", "outer_learning_rate"):
                values = getattr(one, field), getattr(other, field)
                assert values[0] == values[1] or values[0] == pytest.approx(values[1], rel=1e-9, abs=1e-12), field


CODED: dict[str, dict[str, Any]] = {
    "whole": {"overlap_steps": 2},
    "fragments": {"overlap_steps": 3, "num_fragments": 2, "overlap_alpha": 0.25, "outer_optimizer": "nesterov"},
}


def groups_of_one() -> dict[str, Any]:
    """Body: each of four ranks is a group with one shard, and sends codes beside its steps."""
    mesh = build_federation_mesh("cpu", FederationLayout(4, 1, {"dp_shard": 1}), with_slow_tier=True)
    found = {}
    for name, settings in CODED.items():
        model = fully_shard(block_net(), mesh=mesh.fsdp)
        optimizer = adamw(model.parameters())
        config = FederationConfig(4, 3, wire_format="int4", bucket_size_bytes=1024, **settings)
        rounds = Rounds(model, mesh, config, [optimizer])
        for batch in draws(mesh.group_index, 4, 8):
            sum_over(model, batch, num_samples(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds.step()
        rounds.finish()
        found[name] = full_state(model)
    return found


def test_codes_are_those_of_processes(world4: WorkerPool) -> None:
    """Blocks are cut from what a rank holds: with one shard a simulation sends the very codes that processes do."""
    runs = world4.run(groups_of_one, limit_seconds=120)
    torch.set_num_threads(1)
    for name, settings in CODED.items():
        config = FederationConfig(4, 3, wire_format="int4", bucket_size_bytes=1024, **settings)
        simulation = Simulation(block_net(), config, adamw)
        batches = [draws(group.index, 4, 8) for group in simulation.groups]
        for step in range(8):
            for group in simulation.groups:
                batch = batches[group.index][step]
                sum_over(group.model, batch, num_samples(batch)).backward()
                group.optimizer.step()
                group.optimizer.zero_grad()
                group.count_step()
            simulation.step()
        simulation.finish()
        held = states(simulation)
        for rank in runs:
            for key, tensor in rank[name].items():
                assert (tensor - held[0][key]).abs().max() < 1e-12, (name, key)
                assert all(torch.equal(held[0][key], other[key]) for other in held)


def small(num_groups: int, model: nn.Module, **settings: Any) -> Simulation:
    torch.set_num_threads(1)
    return Simulation(model, FederationConfig(num_groups, 2, overlap_steps=1, **settings), adamw)


def test_buffers_of_many_groups() -> None:
    simulation = small(3, tiny_batchnorm())
    means: dict[int, torch.Tensor] = {}
    for step in range(3):
        for group in simulation.groups:
            group.model(**collate(feature_samples(8, group.index + 3 * step)))["loss"].backward()
            group.optimizer.step()
            group.count_step()
        mean = [group.model.state_dict()["blocks.0.norm.running_mean"] for group in simulation.groups]
        means[step] = torch.stack(mean).mean(0)
        simulation.step()
    for group in simulation.groups:
        state = group.model.state_dict()
        # Of all as they were after step 2; what counts goes on.
        torch.testing.assert_close(state["blocks.0.norm.running_mean"], means[1])
        assert state["blocks.0.norm.num_batches_tracked"] == 3


def test_a_bad_group_takes_the_outcome() -> None:
    simulation = small(3, block_net())
    bad = simulation.groups[1]
    with torch.no_grad():
        next(bad.model.parameters()).fill_(float("nan"))
    found = []
    for _ in range(3):
        for group in simulation.groups:
            group.count_step()
        found.append(simulation.step())
    assert [metrics and metrics.excluded for metrics in found] == [None, None, (1,)]
    for name, tensor in bad.model.state_dict().items():
        assert torch.equal(tensor, block_net().state_dict()[name])


def test_errors_reach_the_caller_and_leave_no_thread_waiting() -> None:
    simulation = small(2, block_net(), group_weights="samples")
    for group in simulation.groups:
        group.count_step()
    assert simulation.step() is None
    for group in simulation.groups:
        group.count_step()
    with pytest.raises(ValueError, match="no group has counted any samples"):
        simulation.step()

    simulation = small(2, block_net())
    simulation.groups[0].count_step()
    simulation.groups[0].count_step()
    with pytest.raises(RuntimeError, match=r"different numbers of optimizer steps: \[2, 0\]"):
        simulation.step()

    simulation = small(2, block_net())

    def fail() -> None:
        raise KeyError("on one group")

    simulation.groups[1].rounds.averager.trained.survey = fail  # type: ignore[method-assign, assignment]
    for group in simulation.groups:
        group.count_step()
        group.count_step()
    with pytest.raises(KeyError, match="on one group"):
        simulation.step()


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="leave slow_backend='gloo' unset"):
        Simulation(block_net(), FederationConfig(2, slow_backend="gloo"), adamw)
    with pytest.raises(ValueError, match="num_fragments=7 is more than the model can be divided into"):
        Simulation(block_net(), FederationConfig(2, overlap_steps=1, num_fragments=7), adamw)

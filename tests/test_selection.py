"""What is averaged, and what each group keeps for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_fedshard.config import FederationConfig
from hf_fedshard.selection import Selection, matches, parse_patterns, plain_name
from tests.harness.outer_runs import GROUP_SIZE, NUM_STEPS, SYNC_EVERY, double, draws, make_mesh, refer, run_case
from tests.harness.pool import WorkerPool
from tests.harness.reference_groups import State
from tests.test_outer import reference_of


LOCAL = "head.*"
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "local": {"local_parameters": LOCAL},
    "with all": {
        "include_parameters": ["first.*", "re:^hidden"],
        "local_parameters": [LOCAL],
        "outer_optimizer": "nesterov",
        "inner_moments": "reset",
        "proximal_mu": 3.0,
    },
}


class Statistics(nn.Module):
    """A running mean as of a normalisation, that also a single sample can move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.running_mean.lerp_(inputs.mean(0), 0.1)  # type: ignore[operator]
        self.count += 1
        return inputs - self.running_mean


class Normed(nn.Module):
    """With statistics in buffers, of which each group keeps its own (FedBN, arXiv 2102.07623)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = double()
        self.norm = Statistics()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(inputs.double()))


def _runs() -> dict[str, Any]:
    mesh = make_mesh()
    found = {name: run_case(mesh, settings) for name, settings in CASES.items()}
    found["buffers"] = run_case(mesh, {"local_parameters": "norm.running_*"}, Normed)
    return found


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, Any]]:
    return world8.run(_runs, limit_seconds=240)


def test_local_layers_stay_with_their_group(runs: list[dict[str, Any]]) -> None:
    result = refer(is_local=is_local)
    for rank, found in enumerate(runs):
        model = dict(result.models[rank // GROUP_SIZE].named_parameters())
        for name, tensor in found["local"]["borders"][-1].items():
            torch.testing.assert_close(tensor, model[name].detach(), rtol=0, atol=1e-12, msg=name)
            other = runs[0]["local"]["borders"][-1][name]
            assert torch.equal(tensor, other) == (rank < GROUP_SIZE or not name.startswith("head.")), name
    assert runs[0]["local"]["metrics"][0].bytes_sent < runs[0]["whole"]["metrics"][0].bytes_sent


def is_local(name: str) -> bool:
    return name.startswith("head.")


def pull(model: nn.Module, anchor: State) -> None:
    for name, param in model.named_parameters():
        if not is_local(name):
            assert param.grad is not None
            param.grad += CASES["with all"]["proximal_mu"] * (param.detach() - anchor[name].detach())


def reset_averaged(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], shares: Any) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        for name, param in model.named_parameters():
            if not is_local(name):
                optimizer.state.pop(param, None)


def test_local_layers_with_all_else(runs: list[dict[str, Any]]) -> None:
    """
    They have no anchor, no outer step and no pull, and their moments are not reset; all else has. Against whole models: the
    weights of each group at the last border, those of group 0 at all, and what is left of the moments.
    """
    result = refer(outer=reference_of("nesterov"), before_step=pull, at_border=reset_averaged, is_local=is_local)
    for rank, ours in enumerate(runs):
        borders, group = ours["with all"]["borders"], rank // GROUP_SIZE
        model, optimizer = dict(result.models[group].named_parameters()), result.optimizers[group]
        for name, param in model.items():
            torch.testing.assert_close(borders[-1][name], param.detach(), rtol=0, atol=1e-12, msg=name)
            for state, expected in zip(borders, result.border_states, strict=True):
                if group == 0 or not is_local(name):
                    torch.testing.assert_close(state[name], expected[name], rtol=0, atol=1e-12, msg=name)
        moments = {
            f"{name}/{key}": value
            for name, param in model.items()
            for key, value in optimizer.state.get(param, {}).items()
            if value.ndim
        }
        assert moments.keys() == ours["with all"]["moments"].keys()
        for name, moment in moments.items():
            torch.testing.assert_close(ours["with all"]["moments"][name], moment, rtol=1e-9, atol=1e-15, msg=name)
    for rank, found in enumerate(runs):
        found = found["with all"]
        held = {name.split("/")[0] for name in found["moments"]}
        assert held == {"head.weight", "head.bias"}
        assert found["anchors"] == found["elements"] < runs[rank]["whole"]["elements"]
        for name, tensor in found["borders"][-1].items():
            same = torch.equal(tensor, runs[0]["with all"]["borders"][-1][name])
            assert same == (rank < GROUP_SIZE or not name.startswith("head.")), name


def test_local_buffers_are_means_of_the_group(runs: list[dict[str, Any]]) -> None:
    def running_mean(rank: int) -> torch.Tensor:
        return runs[rank]["buffers"]["borders"][-1]["norm.running_mean"]

    for rank, found in enumerate(runs):
        assert torch.equal(running_mean(rank), running_mean(rank // GROUP_SIZE * GROUP_SIZE))
        assert found["buffers"]["borders"][-1]["norm.count"] == NUM_STEPS
    assert not torch.allclose(running_mean(0), running_mean(GROUP_SIZE))
    # The mean over the group's ranks of a running mean of means, of which one round is the whole.
    expected = torch.zeros(8, dtype=torch.float64)
    for round in range(NUM_STEPS // SYNC_EVERY):
        held = []
        for rank in range(GROUP_SIZE):
            value = expected.clone()
            for batch in draws(rank)[round * SYNC_EVERY : (round + 1) * SYNC_EVERY]:
                value.lerp_(batch["inputs"].double().mean(0), 0.1)
            held.append(value)
        expected = torch.stack(held).mean(0)
    torch.testing.assert_close(running_mean(0), expected)


def test_patterns() -> None:
    assert parse_patterns(" a.*, re:b$ ,,") == ("a.*", "re:b$")
    assert parse_patterns(["a,b"]) == ("a,b",)
    assert matches("layers.0.weight", ["layers.?.*"]) and not matches("x.layers.0.weight", ["layers.*"])
    assert matches("x.layers.0.weight", ["re:layers\\.[0-3]"]) and not matches("x", [])
    assert plain_name("_orig_mod.a._checkpoint_wrapped_module.b") == "a.b"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_parameters": "heads.*"}, "local_parameters has 'heads.*', which names no parameter or buffer"),
        ({"include_parameters": "first*,none"}, "include_parameters has 'none', which names no"),
        ({"exclude_parameters": "re:none"}, "exclude_parameters has 're:none', which names no"),
        ({"include_parameters": "first.*"}, "4 parameters train, but include_parameters and exclude_parameters leave"),
        ({"exclude_parameters": "head.bias"}, "out of the average: head.bias. The groups would come apart"),
        ({"local_parameters": "*"}, "No parameter that trains is averaged"),
    ],
)
def test_selections_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Selection(FederationConfig(**settings)).check(double())
    assert message in str(raised.value)


def test_what_is_excluded_may_be_frozen() -> None:
    model = double()
    model.head.requires_grad_(False)  # type: ignore[union-attr]
    Selection(FederationConfig(exclude_parameters="head.*")).check(model)


def _refused(settings: dict[str, Any]) -> None:
    run_case(make_mesh(), settings)


def test_refused_at_start_on_every_rank(world8: WorkerPool) -> None:
    for error in world8.run_failing(_refused, {"exclude_parameters": "head.bias"}):
        assert error.type_name == "ValueError" and "head.bias" in error.message

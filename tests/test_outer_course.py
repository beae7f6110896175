"""Synchronous steps and the outer loop in one run: against formulas on whole tensors, on 2 x 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_fedshard import guard
from hf_fedshard.mesh import FederationMesh
from hf_fedshard.shards import local_shards, reshard
from tests.harness.models import full_state
from tests.harness.outer_runs import (
    GROUP_SIZE,
    NUM_GROUPS,
    NUM_STEPS,
    Run,
    assert_matches,
    double,
    draws,
    make_mesh,
    num_samples,
    refer,
)
from tests.harness.pool import WorkerPool
from tests.harness.reference_groups import State


RATE, MOMENTUM, MU = 0.7, 0.9, 0.5
# Rounds of 2 steps; in the first or in the last one they are synchronous.
CASES: dict[str, dict[str, Any]] = {
    "start": {"sync_steps_at_start": 2, "inner_moments": "reset"},
    "end": {"sync_steps_at_end": 2, "inner_moments": "average"},
    "local": {"sync_steps_at_end": 2, "local_parameters": "head.*"},
}


def train_one(mesh: FederationMesh, settings: dict[str, Any]) -> dict[str, Any]:
    run = Run(mesh, double(), outer_optimizer="nesterov", group_weights="samples", proximal_mu=MU, **settings)
    outer = run.rounds.averager.outer
    found: dict[str, Any] = {"borders": [], "metrics": [], "anchored": [], "num_steps": [], "momentum": []}
    for step in range(NUM_STEPS):
        metrics = run.train(step)
        if metrics is None:
            continue
        reshard(run.model)
        shards = local_shards(run.model)
        found["borders"].append(full_state(run.model))
        found["metrics"].append(metrics)
        found["anchored"].append(all(torch.equal(anchor, shards[name]) for name, anchor in outer.anchors.items()))
        found["num_steps"].append(outer.num_steps)
        assert outer.optimizer is not None
        found["momentum"].append(
            [
                outer.optimizer.state[anchor].get("momentum_buffer", torch.zeros(0)).clone()
                for anchor in outer.anchors.values()
            ]
        )
    run.rounds.finish()
    guard.detach(run.rounds)
    return found


def train() -> dict[str, dict[str, Any]]:
    """Body: all cases on one mesh."""
    mesh = make_mesh()
    return {name: train_one(mesh, settings) for name, settings in CASES.items()}


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, dict[str, Any]]]:
    return world8.run(train, limit_seconds=240)


class Expected:
    """What stands at the borders and in the steps of a reference run, of which one round is synchronous."""

    def __init__(self, synchronous_round: int, moments: str) -> None:
        self.synchronous_round = synchronous_round
        self.moments = moments
        self.calls = self.round = 0

    def is_synchronous(self, step: int) -> bool:
        return step // 2 == self.synchronous_round

    def weights(self, number: int, seen: list[int]) -> list[float]:
        if number == self.synchronous_round:
            return [1.0 / NUM_GROUPS] * NUM_GROUPS
        return [count / sum(seen) for count in seen]

    def outer(self, anchor: State, average: State, number: int) -> State:
        if number == self.synchronous_round:
            return average
        # The first step that there is: the momentum is the pseudo-gradient.
        return {name: anchor[name] - RATE * (1 + MOMENTUM) * (anchor[name] - average[name]) for name in anchor}

    def before_step(self, model: nn.Module, anchor: State) -> None:
        step, self.calls = self.calls // NUM_GROUPS, self.calls + 1
        if not self.is_synchronous(step):
            for name, param in model.named_parameters():
                assert param.grad is not None
                param.grad += MU * (param.detach() - anchor[name])

    def at_border(self, models: list[nn.Module], optimizers: list[Any], shares: Any) -> None:
        number, self.round = self.round, self.round + 1
        if number == self.synchronous_round:
            return
        if self.moments == "reset":
            for optimizer in optimizers:
                optimizer.state.clear()
            return
        for states in zip(*(list(optimizer.state.values()) for optimizer in optimizers), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                mean = sum(share * state[key] for share, state in zip(shares, states, strict=True))
                for state in states:
                    state[key].copy_(mean)


@pytest.mark.parametrize("case", ["start", "end"])
def test_is_the_reference(runs: list[dict[str, dict[str, Any]]], case: str) -> None:
    synchronous_round = 0 if case == "start" else 1
    expected = Expected(synchronous_round, CASES[case]["inner_moments"])
    result = refer(
        weights=expected.weights,
        outer=expected.outer,
        before_step=expected.before_step,
        at_border=expected.at_border,
        synchronous=expected.is_synchronous,
    )
    assert_matches([rank[case] for rank in runs], result)


@pytest.mark.parametrize("case", CASES)
def test_no_outer_step_after_synchronous_steps(runs: list[dict[str, dict[str, Any]]], case: str) -> None:
    synchronous_round = 0 if case == "start" else 1
    for found in (rank[case] for rank in runs):
        metrics = found["metrics"]
        assert [row.synchronous for row in metrics] == [number == synchronous_round for number in range(2)]
        together, apart = metrics[synchronous_round], metrics[1 - synchronous_round]
        assert (together.drift, together.weights, together.moment_bytes_sent) == (0.0, (), 0)
        assert together.outer_learning_rate is None and together.pseudo_gradient_norm is None
        assert apart.drift > 0 and apart.outer_learning_rate == RATE
        samples = [sum(num_samples(draws(4 * group)[0]) for _ in range(GROUP_SIZE)) for group in range(NUM_GROUPS)]
        assert apart.weights == pytest.approx([count / max(samples) for count in samples])
        assert found["anchored"] == [True, True], "the anchor is the model at every border"
        assert found["num_steps"] == ([0, 1] if case == "start" else [1, 1])
        if case != "start":
            assert all(torch.equal(*pair) for pair in zip(*found["momentum"], strict=True))


def test_local_layers_stay_local(runs: list[dict[str, dict[str, Any]]]) -> None:
    first, last = runs[0]["local"]["borders"], runs[-1]["local"]["borders"]
    for mine, theirs in zip(first, last, strict=True):
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]) == (not name.startswith("head.")), name

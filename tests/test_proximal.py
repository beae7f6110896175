"""FedProx: the pull towards the model at the last border."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from hf_fedshard.proximal import ProximalTerm
from tests.harness.outer_runs import Run, assert_matches, double, make_mesh, refer, run_cases
from tests.harness.pool import WorkerPool
from tests.harness.reference_groups import State
from tests.test_outer import reference_of


MU = 30.0
CASES: dict[str, dict[str, Any]] = {
    "alone": {"proximal_mu": MU},
    "shared anchor": {"proximal_mu": MU, "outer_optimizer": "nesterov"},
    "clipped": {"proximal_mu": MU, "max_grad_norm": 0.05},
    "without": {"max_grad_norm": 0.05},
    "poisoned": {"proximal_mu": MU, "poisoned": 1},
}


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, Any]]:
    return world8.run(run_cases, CASES, limit_seconds=240)


def pull(model: nn.Module, anchor: State) -> None:
    for name, param in model.named_parameters():
        assert param.grad is not None
        param.grad += MU * (param.detach() - anchor[name].detach())


@pytest.mark.parametrize("case", ["alone", "shared anchor", "clipped", "without"])
def test_is_the_papers_gradient(runs: list[dict[str, Any]], case: str) -> None:
    """Of `mu / 2 |w - anchor|^2`, added after clipping."""
    changes: dict[str, Any] = {"max_grad_norm": CASES[case].get("max_grad_norm")}
    if case != "without":
        changes["before_step"] = pull
    if case == "shared anchor":
        changes["outer"] = reference_of("nesterov")
    assert_matches([rank[case] for rank in runs], refer(**changes))


def test_pulls(runs: list[dict[str, Any]]) -> None:
    drift = {case: runs[0][case]["metrics"][1].drift for case in CASES}
    assert drift["clipped"] < 0.9 * drift["without"]


def test_one_anchor(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        for case in ("alone", "shared anchor"):
            assert rank[case]["anchors"] == rank[case]["elements"]
        assert rank["without"]["anchors"] == 0


def test_a_poisoned_group_takes_a_sound_anchor(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert rank["poisoned"]["metrics"][0].excluded == (1,)
        assert all(tensor.isfinite().all() for tensor in rank["poisoned"]["borders"][-1].values())


def _after_the_end() -> bool:
    run = Run(make_mesh(), double(), proximal_mu=1e6)
    run.train(0)
    run.rounds.finish()
    param = next(run.model.parameters())
    gradient = torch.ones_like(param.detach())
    param.grad = gradient.clone()
    with contextlib.suppress(RuntimeError):  # the guard's
        run.optimizer.step()
    return bool(torch.equal(param.grad.to_local(), gradient.to_local()))


def test_ends_with_the_federation(world8: WorkerPool) -> None:
    assert all(world8.run(_after_the_end))


def test_by_hand() -> None:
    params = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([5.0])), nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(params, lr=1.0)
    anchors = {"a": torch.tensor([0.0, 3.0])}
    term = ProximalTerm([optimizer], {id(params[0]): "a", id(params[1]): "b"}, anchors, mu=0.5)
    params[0].grad, params[1].grad = torch.tensor([1.0, 1.0]), torch.tensor([2.0])
    optimizer.step()  # 1 + 0.5 * 1 and 1 - 0.5 * 1; b has no anchor, the third no gradient
    assert params[0].tolist() == [-0.5, 1.5] and params[1].tolist() == [3.0] and params[2].tolist() == [1.0]
    # A fused optimizer that is yet to unscale.
    optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    params[0].grad = torch.tensor([8.0, 8.0])
    term._add(optimizer, (), {})
    assert params[0].grad.tolist() == [8 - 8 * 0.25, 8 - 8 * 0.75]
    del optimizer.grad_scale  # type: ignore[attr-defined]
    term.remove()
    params[0].grad = torch.zeros(2)
    optimizer.step()
    assert params[0].tolist() == [-0.5, 1.5]

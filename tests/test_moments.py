"""What becomes of the inner optimizers' state at a border."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_fedshard.moments import moments_of, reset_moments
from tests.harness.outer_runs import (
    NUM_RANKS,
    Run,
    assert_matches,
    double,
    make_mesh,
    refer,
    run_cases,
    single,
)
from tests.harness.outer_runs import moments_of as whole_moments
from tests.harness.pool import WorkerPool


CASES: dict[str, dict[str, Any]] = {
    "keep": {},
    "reset": {"inner_moments": "reset"},
    "average": {"inner_moments": "average"},
    "average and step": {"inner_moments": "average", "outer_optimizer": "nesterov"},
    "poisoned": {"inner_moments": "average", "outer_optimizer": "fedadam", "poisoned": 0},
}


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, Any]]:
    return world8.run(run_cases, CASES, limit_seconds=240)


def reset(models: Any, optimizers: list[torch.optim.Optimizer], shares: Any) -> None:
    for optimizer in optimizers:
        optimizer.state.clear()


def average(models: Any, optimizers: list[torch.optim.Optimizer], shares: Any) -> None:
    for params in zip(*(optimizer.param_groups[0]["params"] for optimizer in optimizers), strict=True):
        states = [optimizer.state[param] for optimizer, param in zip(optimizers, params, strict=True)]
        for key in ("exp_avg", "exp_avg_sq"):
            mean = sum(share * state[key] for share, state in zip(shares, states, strict=True))
            for state in states:
                state[key].copy_(mean)


@pytest.mark.parametrize(("case", "at_border"), [("keep", None), ("reset", reset), ("average", average)])
def test_is_the_reference(runs: list[dict[str, Any]], case: str, at_border: Any) -> None:
    ranks = [rank[case] for rank in runs]
    assert_matches(ranks, refer(at_border=at_border))
    groups = [ranks[0]["moments"], ranks[-1]["moments"]]
    equal = all(torch.equal(tensor, groups[1][name]) for name, tensor in groups[0].items())
    assert equal == (case != "keep")
    assert bool(groups[0]) == (case != "reset")


def test_traffic_is_reported(runs: list[dict[str, Any]]) -> None:
    sent = {case: runs[0][case]["metrics"][0] for case in ("keep", "average")}
    assert sent["keep"].moment_bytes_sent == 0
    # Two moments for each parameter.
    assert sent["average"].moment_bytes_sent == pytest.approx(2 * sent["keep"].bytes_sent, rel=0.02)
    assert sent["average"].bytes_sent == sent["keep"].bytes_sent + sent["average"].moment_bytes_sent
    assert sent["average"].as_logs()["fedshard/moment_bytes_sent"] == sent["average"].moment_bytes_sent


def test_a_poisoned_group_takes_the_others_moments(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        found = rank["poisoned"]
        assert [metrics.excluded for metrics in found["metrics"]] == [(0,), ()]
        assert all(tensor.isfinite().all() for state in found["borders"] for tensor in state.values())
        for name, moment in found["moments"].items():
            assert moment.isfinite().all()
            assert torch.equal(moment, runs[0]["poisoned"]["moments"][name])


def _infinite_moments() -> Any:
    """The weights of a group are finite and stand still, since its second moments overflowed."""
    mesh = make_mesh()
    run = Run(mesh, double(), inner_moments="average")
    run.train(0)
    if mesh.group_index == 1:
        for state in run.optimizer.state.values():
            state["exp_avg_sq"].to_local().fill_(float("inf"))
    metrics = run.train(1)
    return metrics.excluded, all(moment.isfinite().all() for moment in whole_moments(run).values())


def test_infinite_moments_do_not_spread(world8: WorkerPool) -> None:
    assert world8.run(_infinite_moments) == [((1,), True)] * NUM_RANKS


def _without_state() -> Any:
    """A scaler has skipped all steps of group 0."""
    mesh = make_mesh()
    run = Run(mesh, double(), inner_moments="average")
    found = []
    for step in range(4):
        inner = run.optimizer.step
        if mesh.group_index == 0 and step < 2:
            run.optimizer.step = lambda *args: None  # type: ignore[method-assign, assignment]
        metrics = run.train(step)
        run.optimizer.step = inner  # type: ignore[method-assign]
        if metrics:
            found.append(metrics.moment_bytes_sent > 0)
    return found


def test_groups_without_moments_are_waited_for(world8: WorkerPool) -> None:
    assert world8.run(_without_state) == [[False, True]] * NUM_RANKS


OPTIMIZERS: dict[str, Any] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-3),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
}


def _skipping(name: str, group: int, skipped: tuple[int, ...]) -> list[dict[str, Any]]:
    """
    Gradients of 1, and some that are infinite in one group: a gradient scaler skips these steps, or, where it leaves that
    to a fused optimizer, has it skip them.
    """
    mesh = make_mesh()
    run = Run(mesh, single(), OPTIMIZERS[name], inner_moments="average", group_weights="steps")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for step in range(4):
        bad = mesh.group_index == group and step in skipped
        scaler.scale(torch.ones(()))
        for param in run.model.parameters():
            param.grad = torch.full_like(param, float("inf") if bad else scaler.get_scale())
        scaler.step(run.optimizer)
        scaler.update()
        metrics = run.rounds.step()
        if metrics is None:
            continue
        states = [run.optimizer.state[param] for param in run.model.parameters() if param in run.optimizer.state]
        found.append(
            {
                "weights": metrics.weights,
                "averaged": metrics.moment_bytes_sent > 0,
                "steps": {float(state["step"]) for state in states},
                "first": [state["exp_avg"].full_tensor() for state in states],
                "second": [state["exp_avg_sq"].full_tensor() for state in states],
                "largest": [state["max_exp_avg_sq"].full_tensor() for state in states if "max_exp_avg_sq" in state],
            }
        )
    return found


@pytest.mark.parametrize(
    ("name", "skipped", "counts", "weights", "averaged"),
    [
        ("fused", (0,), (2, 4), ((1.0, 0.5), (1.0, 1.0)), (True, True)),
        ("fused", (0, 1), (2, 4), ((1.0, 0.0), (1.0, 1.0)), (True, True)),
        # Not fused, its state is made in its first step.
        ("AdamW", (0, 1), (2, 4), ((1.0, 0.0), (1.0, 1.0)), (False, True)),
        ("amsgrad", (1,), (2, 4), ((1.0, 0.5), (1.0, 1.0)), (True, True)),
        ("RAdam", (2,), (2, 4), ((1.0, 1.0), (1.0, 0.5)), (True, True)),
    ],
)
def test_groups_that_made_different_numbers_of_steps(
    world8: WorkerPool, name: str, skipped: tuple[int, ...], counts: Any, weights: Any, averaged: Any
) -> None:
    """With gradients of 1 the moments that Adam divides by what has reached them are 1, whoever has skipped how much."""
    for rank, borders in enumerate(world8.run(_skipping, name, 1, skipped)):
        for number, border in enumerate(borders):
            assert (border["weights"], border["averaged"]) == (weights[number], averaged[number])
            if not border["averaged"] and rank >= NUM_RANKS // 2:
                assert not border["first"]
                continue
            assert border["steps"] == {counts[number]}
            for key, beta in (("first", 0.9), ("second", 0.999), ("largest", 0.999)):
                for moment in border[key]:
                    reached = 1 - beta ** counts[number]
                    torch.testing.assert_close(moment, torch.full_like(moment, reached), rtol=2e-5, atol=0)
        assert bool(borders[0]["largest"]) == (name == "amsgrad")


def test_unknown_moments_are_not_averaged_after_different_numbers_of_steps(world8: WorkerPool) -> None:
    for rank, borders in enumerate(world8.run(_skipping, "NAdam", 1, (0,))):
        assert [border["averaged"] for border in borders] == [False, False]
        assert [border["steps"] for border in borders] == ([{2}, {4}] if rank < NUM_RANKS // 2 else [{1}, {3}])


def test_all_groups_skip_a_round(world8: WorkerPool) -> None:
    """Weights by steps are all zero, and the groups hold one model."""
    for name in ("fused", "AdamW"):
        for first, second in world8.run(_skip_everywhere, name):
            assert first["weights"] == second["weights"] == (1.0, 1.0)


def _skip_everywhere(name: str) -> list[dict[str, Any]]:
    return _skipping(name, make_mesh().group_index, (0, 1))


class Quantised(torch.optim.SGD):
    """Keeps its momentum in bytes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"state1": torch.zeros_like(param, dtype=torch.uint8), "absmax": torch.ones(3)}


def _quantised() -> None:
    run = Run(make_mesh(), double(), lambda params: Quantised(params, lr=0.1), inner_moments="average")
    run.train(0)
    run.train(1)


def test_quantised_moments_are_refused(world8: WorkerPool) -> None:
    for error in world8.run_failing(_quantised):
        assert error.type_name == "ValueError"
        assert "inner_moments='average' cannot average Quantised: state1 of" in error.message


def test_which_state_is_a_moment() -> None:
    params = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    optimizer = torch.optim.Adam(params, amsgrad=True)
    assert moments_of([optimizer], {id(params[0]): "a"}) == ({}, [])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    found, refused = moments_of([optimizer], {id(params[0]): "a"})
    assert list(found) == ["0/a/exp_avg", "0/a/exp_avg_sq", "0/a/max_exp_avg_sq"] and not refused
    assert found["0/a/exp_avg"].data_ptr() == optimizer.state[params[0]]["exp_avg"].data_ptr()


class Wrapped(torch.Tensor):
    """Says that it is floating-point, whatever it keeps."""


def test_state_of_an_unknown_class_is_no_moment() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {"momentum_buffer": torch.ones(4).as_subclass(Wrapped)}
    assert moments_of([optimizer], {id(param): "a"}) == ({}, ["SGD: momentum_buffer of a"])


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_reset_is_a_fresh_optimizer(make: Any) -> None:
    def run(times: int) -> Any:
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = make([param], lr=0.1, weight_decay=0)
        for index in range(times):
            if index == times - 1:
                reset_moments(optimizer)
            before = param.detach().clone()
            param.grad = torch.tensor([1.0, 2.0, 3.0])
            optimizer.step()
        return SimpleNamespace(change=param.detach() - before, state=optimizer.state[param])

    first, third = run(1), run(3)
    torch.testing.assert_close(first.change, third.change)
    for key, value in first.state.items():
        torch.testing.assert_close(value, third.state[key])

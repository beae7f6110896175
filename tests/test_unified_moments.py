"""The groups' moments, brought together where synchronous steps follow on rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_fedshard.unified_moments import unify_moments
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.two_groups import Federation, draws


def unify(lost: bool) -> list[Any]:
    """Moments that differ, after a fault of one group perhaps."""
    federation = Federation(tiny_llama())
    batch = draws(dist.get_rank())[0]
    federation.train(batch)
    optimizer = federation.optimizer
    before = [state["exp_avg"].full_tensor().clone() for state in optimizer.state.values()]
    if lost and dist.get_rank() < 2:
        optimizer.state.clear()
    sent, dropped = unify_moments([optimizer], federation.mesh, 4096)
    after = [state["exp_avg"].full_tensor().clone() for state in optimizer.state.values()]
    return [before, after, sent, dropped, unify_moments([optimizer], federation.mesh, 4096)]


def test_moments_are_averaged(world4: WorkerPool) -> None:
    ranks = world4.run(unify, False)
    for name in range(len(ranks[0][0])):
        mean = (ranks[0][0][name] + ranks[2][0][name]) / 2
        for rank in ranks:
            torch.testing.assert_close(rank[1][name], mean, rtol=1e-6, atol=1e-9)
    assert all(rank[2] > 0 and not rank[3] for rank in ranks)
    assert all(rank[4] == (0, False) for rank in ranks), "what is equal is left alone"


def unify_infinite(groups: tuple[int, ...]) -> list[Any]:
    """Moments that overflowed in some groups, and counters that differ, as after a reset."""
    federation = Federation(tiny_llama())
    optimizer, group = federation.optimizer, federation.mesh.group_index
    for _ in range(2 + 2 * group):
        for param in federation.model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    if group in groups:
        for state in optimizer.state.values():
            state["exp_avg_sq"].to_local().fill_(float("inf"))
    _, dropped = unify_moments([optimizer], federation.mesh, 4096)
    moments = [
        (float(state["step"]), state["exp_avg"].full_tensor(), state["exp_avg_sq"].full_tensor())
        for state in optimizer.state.values()
    ]
    return [dropped, moments]


@pytest.mark.parametrize(("groups", "steps"), [((), 4), ((0,), 4), ((1,), 2)])
def test_moments_of_unlike_groups(world4: WorkerPool, groups: tuple[int, ...], steps: int) -> None:
    """Infinite ones do not spread, and with gradients of 1 those of all are what Adam holds after that many steps."""
    for dropped, moments in world4.run(unify_infinite, groups):
        assert not dropped and moments
        for count, first, second in moments:
            assert count == steps
            torch.testing.assert_close(first, torch.full_like(first, 1 - 0.9**steps), rtol=1e-5, atol=0)
            torch.testing.assert_close(second, torch.full_like(second, 1 - 0.999**steps), rtol=2e-5, atol=0)


def test_moments_that_are_nowhere_finite(world4: WorkerPool) -> None:
    assert world4.run(unify_infinite, (0, 1)) == [[True, []]] * 4


def test_moments_that_a_group_has_lost(world4: WorkerPool) -> None:
    for rank in world4.run(unify, True):
        assert rank[1] == []
        assert rank[3] is True


def unify_of_other_parameters() -> Any:
    """In each group another parameter of the same size has been trained alone."""
    federation = Federation(tiny_llama())
    layer = federation.model.model.layers[federation.mesh.group_index]  # type: ignore[union-attr,index]
    layer.self_attn.q_proj.weight.grad = torch.ones_like(layer.self_attn.q_proj.weight)
    federation.optimizer.step()
    answer = unify_moments([federation.optimizer], federation.mesh, 4096)
    return answer, len(federation.optimizer.state)


def test_moments_of_different_parameters_are_not_averaged(world4: WorkerPool) -> None:
    assert world4.run(unify_of_other_parameters) == [((0, True), 0)] * 4


def unify_adagrad() -> int:
    """Its state is made at construction: what is merely dropped could make no further step."""
    federation = Federation(tiny_llama())
    optimizer = torch.optim.Adagrad(federation.model.parameters(), lr=1e-2)
    if dist.get_rank() < 2:
        optimizer.state.clear()
    assert unify_moments([optimizer], federation.mesh, 4096) == (0, True)
    before = [param.to_local().clone() for param in federation.model.parameters()]
    for param in federation.model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1}
    return sum(
        not torch.equal(old, param.to_local())
        for old, param in zip(before, federation.model.parameters(), strict=True)
        if old.numel()
    )


def test_adagrad_keeps_a_state_to_step_with(world4: WorkerPool) -> None:
    assert all(number > 0 for number in world4.run(unify_adagrad))

"""Rounds on an FSDP2 model of one's own, without Accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.models import tiny_batchnorm, tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.two_groups import NUM_STEPS, Federation, draws, reference, sgd


def assert_one_model(states: list[dict[str, torch.Tensor]], expected: Any, atol: float = 1e-5) -> None:
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(tensor, states[0][name]), name
            if name in expected:  # no constant that is rebuilt at construction
                torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=0, atol=atol, msg=name)


def train_rounds(tied: bool, evaluate: bool) -> dict[str, Any]:
    federation = Federation(tiny_llama(tied=tied))
    rounds, found = federation.rounds, []
    for number, batch in enumerate(draws(dist.get_rank())):
        loss = federation.train(batch)
        if evaluate:  # a forward without backward leaves the last layers gathered
            with torch.no_grad():
                federation.model(**batch)
        metrics = rounds.step(loss, tokens=10 + number)
        found.append((metrics, rounds.at_border))
    last = rounds.finish()
    again = rounds.finish()
    return {"state": federation.state(), "steps": found, "last": last, "again": again}


@pytest.mark.parametrize(("tied", "evaluate"), [(False, False), (True, False), (False, True), (True, True)])
def test_training_is_the_reference(world4: WorkerPool, tied: bool, evaluate: bool) -> None:
    ranks = world4.run(train_rounds, tied, evaluate)
    result = reference(lambda: tiny_llama(tied=tied))
    assert_one_model([rank["state"] for rank in ranks], result.state)
    start = tiny_llama(tied=tied).state_dict()
    assert max((result.state[n] - t).abs().max() for n, t in start.items()) > 2e-3, "the weights must have moved"
    for rank in ranks:
        assert [metrics is not None for metrics, _ in rank["steps"]] == [False, True, False, True, False]
        assert [border for _, border in rank["steps"]] == [False, True, False, True, False]
        second = rank["steps"][3][0]
        assert (second.round, second.steps, rank["last"].round, rank["last"].steps) == (2, 2, 3, 1)
        assert rank["again"] is None
        losses = [sum(step[group] for step in result.losses[2:4]) / 2 for group in range(2)]
        assert second.losses == pytest.approx(losses, rel=1e-4)
        assert second.drift > 0
        assert second.bytes_sent == 4 * sum(p.numel() for p in tiny_llama(tied=tied).parameters())
        # The clock of a loaded machine allows no more: 2 ranks x (12 + 13) tokens in less time than the round took.
        assert len(second.tokens_per_second) == 2
        assert all(rate > 10 / second.seconds for rate in second.tokens_per_second)


def train_batchnorm() -> dict[str, torch.Tensor]:
    # AdamW would blow up the rounding of the biases ahead of a normalisation, whose gradients are zero.
    federation = Federation(tiny_batchnorm(), optimizer=sgd)
    for batch in draws(dist.get_rank(), features=True):
        federation.train(batch)
        federation.rounds.step()
    federation.rounds.finish()
    return federation.state()


def test_batchnorm_buffers_are_averaged_over_all_ranks(world4: WorkerPool) -> None:
    states = world4.run(train_batchnorm)
    assert states[0]["blocks.0.norm.num_batches_tracked"] == NUM_STEPS
    assert_one_model(states, reference(tiny_batchnorm, sgd, features=True).state)


def vote(num_groups: int) -> Any:
    federation, rank = Federation(tiny_llama(), num_groups), dist.get_rank()
    votes = {"one": rank == 3, "none": False, "all": True}
    border = federation.rounds.close(votes, {"rank": float(rank), "ones": 1.0})
    federation.rounds.count_step(float(rank), tokens=12)
    return border.votes, border.sums, federation.rounds.close().metrics


@pytest.mark.parametrize("num_groups", [1, 2])
def test_votes_and_sums(world4: WorkerPool, num_groups: int) -> None:
    """Of all ranks, and so are the losses, also where there is one group and nothing to average."""
    ranks = world4.run(vote, num_groups)
    for votes, sums, metrics in ranks:
        assert votes == {"one": True, "none": False, "all": True}
        assert sums == {"rank": 6.0, "ones": 4.0}
        assert metrics.losses == ((1.5,) if num_groups == 1 else (0.5, 2.5))
        assert metrics.tokens_per_second == ranks[0][2].tokens_per_second


def unfreeze(mode: str) -> tuple[dict[str, torch.Tensor], int, int]:
    model = tiny_llama()
    layer = model.model.layers[0]
    layer.requires_grad_(mode != "unfreeze")
    federation = Federation(model, optimizer=sgd)
    sent = []
    for number, batch in enumerate(draws(dist.get_rank(), 4)):
        if number == (3 if mode == "refreeze" else 2):
            layer.requires_grad_(mode == "unfreeze")
        federation.train(batch)
        metrics = federation.rounds.step()
        if metrics is not None:
            sent.append(metrics.bytes_sent)
    return federation.state(), sent[0], sent[1]


@pytest.mark.parametrize("mode", ["unfreeze", "refreeze"])
def test_requires_grad_may_change(world4: WorkerPool, mode: str) -> None:
    """Refreezing falls inside a round: the layer has trained in it and differs between the groups."""
    ranks = world4.run(unfreeze, mode)
    name = "model.layers.0.mlp.up_proj.weight"
    for state, first, second in ranks:
        assert first < second if mode == "unfreeze" else first == second
        assert all(torch.equal(tensor, ranks[0][0][key]) for key, tensor in state.items())
        assert (state[name] - tiny_llama().state_dict()[name]).abs().max() > 1e-4


def unaveraged(num_groups: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    federation = Federation(tiny_llama(), num_groups)
    for batch in draws(dist.get_rank(), 2):
        federation.train(batch)
        federation.rounds.count_step()
    before = federation.state()
    federation.rounds.close()
    return before, federation.state()


def test_one_group_leaves_the_bits_alone(world4: WorkerPool) -> None:
    for before, after in world4.run(unaveraged, 1):
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    differing = 0
    for before, after in world4.run(unaveraged, 2):
        differing += any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    assert differing == 4

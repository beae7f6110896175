"""What a round makes of bad groups and wrong use."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import build_federation_mesh
from hf_fedshard.rounds import Rounds
from hf_fedshard.tensors import all_finite
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.two_groups import Federation, draws


State = dict[str, torch.Tensor]


def poisoned(groups: tuple[int, ...]) -> dict[str, Any]:
    """Three steps, with NaN in a gradient of the first; the second ends the round."""
    federation = Federation(tiny_llama())
    rounds, rank = federation.rounds, dist.get_rank()
    own: State = {}
    metrics = []
    for number, batch in enumerate(draws(rank, 4)):
        handle = None
        if number == 0 and rank // 2 in groups and rank % 2 == 1:  # one shard of the group alone
            parameter = federation.model.lm_head.weight
            handle = parameter.register_post_accumulate_grad_hook(
                lambda p: p.grad.to_local().fill_(float("nan"))  # type: ignore[union-attr]
            )
        federation.train(batch)
        if handle is not None:
            handle.remove()
        if number == 1:
            own = federation.state()
        metrics.append(rounds.step())
        if number == 1:
            after = federation.state()
            moments = len(federation.optimizer.state)
    return {"own": own, "after": after, "moments": moments, "metrics": metrics, "end": federation.state()}


def test_a_group_with_nan_is_left_out_and_goes_on(world4: WorkerPool) -> None:
    ranks = world4.run(poisoned, (1,))
    healthy, bad = ranks[0], ranks[3]
    assert bad["own"]["lm_head.weight"].isnan().any(), "the fault must be there"
    for rank in ranks:
        for name, tensor in rank["after"].items():
            # The average of the healthy groups is the one healthy group.
            assert torch.equal(tensor, healthy["own"][name]), name
        assert rank["metrics"][1].excluded == (1,)
        assert rank["metrics"][1].as_logs()["fedshard/excluded_groups"] == 1
        assert rank["metrics"][1].drift == 0.0
        assert rank["metrics"][3].excluded == ()
        assert 0 < rank["metrics"][3].drift < 1
        for name, tensor in rank["end"].items():
            assert tensor.isfinite().all()
            assert torch.equal(tensor, healthy["end"][name]), name
    assert bad["moments"] == 0, "moments made from NaN would bring it back"
    assert healthy["moments"] > 0
    moved = (healthy["end"]["lm_head.weight"] - healthy["after"]["lm_head.weight"]).abs().max()
    assert moved > 1e-4


def test_nan_in_all_groups_stops_every_rank(world4: WorkerPool) -> None:
    errors = world4.run_failing(poisoned, (0, 1))
    assert {error.type_name for error in errors} == {"RuntimeError"}
    assert all("every federation group are not finite at the end of round 1" in error.message for error in errors)


class Masked(nn.Module):
    """A constant of infinities, as causal masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.blocks = nn.ModuleList()  # the root is sharded alone
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.model(**batch)


def constant_infinities() -> Any:
    federation = Federation(Masked())
    for batch in draws(dist.get_rank(), 2):
        federation.train(batch)
        metrics = federation.rounds.step()
    return metrics.excluded, federation.state()["mask"]


def test_infinite_constants_are_no_fault(world4: WorkerPool) -> None:
    for excluded, mask in world4.run(constant_infinities):
        assert excluded == ()
        assert torch.equal(mask, torch.full((4, 4), float("-inf")).triu(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_large_values_are_finite(dtype: torch.dtype) -> None:
    large = torch.full((1000,), torch.finfo(dtype).max / 2, dtype=dtype)
    assert all_finite([large, torch.arange(3)])
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not all_finite([large, torch.tensor([1.0, bad], dtype=dtype)])


def unequal_steps() -> None:
    federation = Federation(tiny_llama())
    rank = dist.get_rank()
    for batch in draws(rank, 2)[: 1 + rank // 2]:
        federation.train(batch)
        federation.rounds.count_step()
    federation.rounds.close()


def test_unequal_numbers_of_steps(world4: WorkerPool) -> None:
    errors = world4.run_failing(unequal_steps)
    assert {error.type_name for error in errors} == {"FederationMismatchError"}
    assert all("different numbers of optimizer steps: [1, 2]" in error.message for error in errors)


def unequal_parameters() -> None:
    federation = Federation(tiny_llama())
    if dist.get_rank() < 2:
        federation.model.model.layers[0].requires_grad_(False)
        federation.rounds.averager.trained._trained -= {
            name for name, p in federation.model.named_parameters() if not p.requires_grad
        }
    for batch in draws(dist.get_rank(), 2):
        federation.train(batch)
        federation.rounds.step()


def test_unequal_parameters(world4: WorkerPool) -> None:
    errors = world4.run_failing(unequal_parameters)
    assert {error.type_name for error in errors} == {"FederationMismatchError"}
    assert all("requires_grad was changed in some groups only" in error.message for error in errors)
    own = [
        int(
            re.search(r"group averages (\d+) parameters, model.embed_tokens.weight to lm_head.weight", error.message)[
                1
            ]
        )
        for error in errors
    ]
    assert own[0] == own[1] < own[2] == own[3]


def overdue(finish: bool) -> int:
    federation = Federation(tiny_llama())
    steps = 0
    if finish:
        federation.rounds.finish()
    try:
        for batch in draws(dist.get_rank(), 8):
            federation.train(batch)  # without `rounds.step()`
            steps += 1
    except RuntimeError as error:
        text = "nothing averages the groups" if finish else "5 optimizer steps were made since"
        assert text in str(error), error
        return steps
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("finish", "steps"), [(False, 4), (True, 0)])
def test_steps_that_nobody_averages_raise(world4: WorkerPool, finish: bool, steps: int) -> None:
    """Two rounds of two steps are tolerated; after `finish` none is."""
    assert world4.run(overdue, finish) == [steps] * 4


def ended_by_an_error() -> Any:
    """
    A run that begins in an `except` block, as a second attempt may, and ends there. Then one rank fails in a round, and its
    `finally` ends the federation; the others have not come that far.
    """
    rank, found = dist.get_rank(), []
    for attempt in range(2):
        try:
            raise ValueError("the first attempt")
        except ValueError:
            federation = Federation(tiny_llama())
            federation.train(draws(rank, 1)[0])
            federation.rounds.count_step()
            if not attempt:
                found.append(federation.rounds.finish() is not None)
    if rank != 1:
        return found
    try:
        raise OSError("no such disk")
    except OSError:
        return [*found, federation.rounds.finish(), federation.rounds.at_border]


def test_the_end_of_a_federation_waits_for_nobody_after_an_error(world4: WorkerPool) -> None:
    assert world4.run(ended_by_an_error, limit_seconds=20) == [[True], [True, None, False], [True], [True]]


def ended_behind_an_error() -> Any:
    federation = Federation(tiny_llama())
    federation.train(draws(dist.get_rank(), 1)[0])
    federation.rounds.count_step()
    try:
        raise StopIteration("the data is used up, on all ranks")
    except StopIteration:
        inside = federation.rounds.finish()
    behind = federation.rounds.finish()
    return inside, behind is not None and behind.steps, federation.state()["lm_head.weight"]


def test_a_federation_can_be_ended_behind_the_block_of_an_error(world4: WorkerPool) -> None:
    ranks = world4.run(ended_behind_an_error)
    for inside, steps, weight in ranks:
        assert inside is None and steps == 1
        assert torch.equal(weight, ranks[0][2])


def settings_differ() -> None:
    from hf_fedshard.config import FederationConfig
    from hf_fedshard.rounds import Rounds

    federation = Federation(tiny_llama())
    Rounds(federation.model, federation.mesh, FederationConfig(2, 3 + dist.get_rank() // 3))


def test_settings_that_differ(world4: WorkerPool) -> None:
    errors = world4.run_failing(settings_differ)
    assert {error.type_name for error in errors} == {"FederationMismatchError"}
    assert all("sync_every: 3 on ranks 0-2; 4 on rank 3" in error.message for error in errors)


def without_slow_tier(settings: dict[str, Any]) -> None:
    mesh = build_federation_mesh("cpu", FederationLayout(2, 1, {"dp_shard": 2}))
    Rounds(fully_shard(tiny_llama(), mesh=mesh.fsdp), mesh, FederationConfig(2, 2, **settings))


@pytest.mark.parametrize("settings", [{"overlap_steps": 1}, {"slow_backend": "gloo"}], ids=str)
def test_a_mesh_without_communicators_for_the_averaging(world4: WorkerPool, settings: dict[str, Any]) -> None:
    for error in world4.run_failing(without_slow_tier, settings):
        assert error.type_name == "ValueError"
        assert "with_slow_tier=True" in error.message
        assert all(f"{name}={value!r}" in error.message for name, value in settings.items())


def without_optimizer(settings: dict[str, Any], other: bool) -> None:
    from tests.harness.outer_runs import double, make_mesh

    mesh = make_mesh()
    model = fully_shard(double(), mesh=mesh.fsdp)
    given = [torch.optim.SGD([nn.Parameter(torch.ones(1))])] if other else []
    Rounds(model, mesh, FederationConfig(2, 2, **settings), given, num_training_steps=4)


@pytest.mark.parametrize(
    ("settings", "other", "words"),
    [
        ({"proximal_mu": 0.1}, False, "proximal_mu=0.1 needs the inner optimizer, but none was given"),
        ({"inner_moments": "reset"}, False, "inner_moments='reset' needs"),
        (
            {"inner_moments": "average", "sync_steps_at_end": 2},
            True,
            "none of those that were given steps a parameter",
        ),
    ],
)
def test_settings_of_an_optimizer_that_was_not_given(
    world8: WorkerPool, settings: dict[str, Any], other: bool, words: str
) -> None:
    for error in world8.run_failing(without_optimizer, settings, other):
        assert error.type_name == "ValueError"
        assert words in error.message and "plugin.federate(accelerator, model, optimizer)" in error.message


def buffers_of_one_model() -> Any:
    """After synchronous steps the statistics of group 1 are NaN."""
    from tests.harness.models import tiny_batchnorm

    federation = Federation(tiny_batchnorm())
    averager, group = federation.rounds.averager, federation.mesh.group_index
    for name, buffer in federation.model.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(float("nan") if group else 1.0 + dist.get_rank())
    averager.take_as_it_is(averager.tensors.collect(), (1,))
    return [buffer for name, buffer in federation.model.named_buffers() if name.endswith("running_mean")]


def test_nan_in_statistics_does_not_spread_after_synchronous_steps(world4: WorkerPool) -> None:
    for means in world4.run(buffers_of_one_model):
        assert means and all(torch.equal(mean, torch.full_like(mean, 1.5)) for mean in means)

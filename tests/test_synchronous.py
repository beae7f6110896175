"""Synchronous steps at the start and the end of a federated run: against synchronous training and the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_fedshard import guard
from hf_fedshard.config import FederationConfig
from hf_fedshard.rounds import Rounds
from hf_fedshard.synchronous import Phases
from tests.harness.comparison import assert_matches, largest, refer
from tests.harness.data import Batch, batches_by_step
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import full_state, tiny_llama
from tests.harness.overlap_runs import make_mesh
from tests.harness.pool import WorkerPool
from tests.harness.reference import train_reference
from tests.harness.timeline import Timeline
from tests.harness.tiny_trainer import forget_meshes, tiny_trainer
from tests.harness.trainer_runs import MAX_GRAD_NORM, make_model
from tests.test_checkpoint_resume import assert_resumes
from tests.test_raw_loop import ACCUMULATION, SYNC_EVERY, adamw, raw_loop
from tests.test_trainer_equivalence import native, run


def test_phases() -> None:
    phases = Phases(3, 2, 10)
    assert [step for step in range(12) if phases.is_synchronous(step)] == [0, 1, 2, 8, 9, 10, 11]
    assert [phases.steps_left(step) for step in (0, 2, 3, 7)] == [3, 1, 5, 1]
    assert phases.steps_left(8) == float("inf")
    assert Phases(0, 0, None).steps_left(0) == float("inf")
    assert not Phases(0, 0, None).is_synchronous(0)
    assert all(Phases(4, 9, 10).is_synchronous(step) for step in range(10))
    with pytest.raises(ValueError, match=r"sync_steps_at_end=2 needs the length of the run.*num_training_steps"):
        Phases(0, 2, None)


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_is_synchronous_training(size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A whole run of synchronous steps is stock HSDP: clipped, accumulated, with unequal token counts; in double."""
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    options: dict[str, Any] = {"kind": "double", "native": True, "max_steps": 7}
    ours = run(pool, tmp_path, settings={"sync_steps_at_start": 7}, **options)
    stock = run(pool, tmp_path, federated=False, **options)
    for mine, theirs in zip(ours, stock, strict=True):
        for a, b in zip(mine["batches"], theirs["batches"], strict=True):
            assert torch.equal(a["input_ids"], b["input_ids"])
        assert [float(count) for count in mine["counts"]] == [float(count) for count in theirs["counts"]]
        assert all(torch.equal(tensor, ours[0]["state"][name]) for name, tensor in mine["state"].items())
    error = largest(ours[0]["state"], stock[0]["state"])
    moved = largest(stock[0]["state"], make_model("double").state_dict())
    print(f"largest difference {error:.2e}, the weights have moved by {moved:.2e}")
    assert error < 1e-12 < 1e-3 < moved
    assert [row["fedshard/drift"] for row in ours[0]["log"] if "fedshard/drift" in row] == [0, 0, 0]
    federated = run(pool, tmp_path, **options)
    assert largest(federated[0]["state"], stock[0]["state"]) > 1e-4, "synchronous steps must matter"


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_then_federated_then_synchronous(size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    settings = {"sync_steps_at_start": 4, "sync_steps_at_end": 3}
    ranks = run(pool, tmp_path, kind="double", native=True, max_steps=13, settings=settings)
    # Rounds of 3, and borders where the phases change.
    result = refer(
        ranks,
        "double",
        loss=native,
        sync_every={3, 4, 7, 10, 13},
        synchronous=lambda step: step < 4 or step >= 10,
    )
    assert result.borders == [3, 4, 7, 10, 13]
    assert_matches(ranks, result, "double", 1e-12)
    rows = [row for row in ranks[0]["log"] if "fedshard/steps" in row]
    assert [row.get("fedshard/synchronous", 0) for row in rows] == [1, 1, 0, 0, 1]
    assert [row["fedshard/drift"] > 0 for row in rows] == [False, False, True, True, False]


@pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tied", "frozen"))]
)
def test_kinds_of_models(world4: WorkerPool, kind: str, tmp_path: Path) -> None:
    options = {"kind": kind, "max_steps": 4}
    ours = run(world4, tmp_path, settings={"sync_steps_at_start": 4}, **options)
    stock = run(world4, tmp_path, federated=False, **options)
    assert largest(ours[0]["state"], stock[0]["state"]) < 2e-5
    assert largest(stock[0]["state"], make_model(kind).state_dict()) > 1e-3


@pytest.mark.slow
def test_bf16(world4: WorkerPool, tmp_path: Path) -> None:
    """Mixed precision: the gradients that cross are those FSDP2 reduces, and the groups stay equal bit for bit."""
    ranks = run(world4, tmp_path, bf16=True, max_steps=4, settings={"sync_steps_at_start": 4})
    assert [row["fedshard/drift"] for row in ranks[0]["log"] if "fedshard/drift" in row] == [0, 0]
    for rank in ranks:
        assert all(torch.equal(tensor, ranks[0]["state"][name]) for name, tensor in rank["state"].items())


def watched(folder: str, **settings: Any) -> dict[str, Any]:
    from hf_fedshard import FedAvgCallback

    forget_meshes()
    trainer = tiny_trainer(
        folder,
        federated=False,
        before=(FedAvgCallback(num_groups=2, sync_every=2, **settings),),
        max_steps=10,
        max_grad_norm=0.1,
        gradient_accumulation_steps=2,
    )
    timeline = Timeline(2)
    with timeline.of(trainer):
        trainer.train()
    hooks = [
        group._all_reduce_hook
        for module in trainer.model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    sent = [row["fedshard/bytes_sent"] for row in trainer.state.log_history if "fedshard/bytes_sent" in row]
    crossing = [
        [collective.num_bytes for collective in steps if collective.crosses(timeline.group_of)]
        for steps in timeline.by_round()
    ]
    return {"crossing": crossing, "borders": timeline.borders, "hooks": hooks, "sent": sent}


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_only_they_cross_groups(size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    env = fsdp_launch_env(pool.world_size // 2, 2)
    settings = {"sync_steps_at_start": 3, "sync_steps_at_end": 2}
    results = pool.run(watched, str(tmp_path), env=env, limit_seconds=120, **settings)
    model = sum(param.numel() * 4 for param in tiny_llama().parameters())
    for result in results:
        assert result["borders"] == [2, 3, 5, 7, 8, 10]
        quiet = [not crossing for crossing in result["crossing"]]
        assert quiet == [False, False, True, True, True, False]
        assert result["hooks"] == [None] * len(result["hooks"])
    # Both groups of a ring of two send their half of the gradient in each synchronous step, every replica its slice: as
    # much as a model is, with some padding. So does an averaging, with the moments ahead of the end three.
    expected = [2 * model, model, model, model, model, 2 * model + 2 * model]
    for sent, volume in zip(results[0]["sent"], expected, strict=True):
        assert 1 <= sent / volume < 1.1


def test_environment(world4: WorkerPool, tmp_path: Path) -> None:
    from tests.harness.trainer_runs import train

    env = {
        **fsdp_launch_env(2, 2),
        "FEDSHARD_SYNC_EVERY": "2x1,1",
        "FEDSHARD_NUM_GROUPS": "2",
        "FEDSHARD_SYNC_STEPS_AT_START": "1",
        "FEDSHARD_SYNC_STEPS_AT_END": "1",
    }
    options = {"num_groups": None, "sync_every": None, "max_steps": 6}
    ranks = world4.run(train, str(tmp_path), env=env, init_group=False, limit_seconds=120, **options)
    rows = [row for row in ranks[0]["log"] if "fedshard/steps" in row]
    assert [row["fedshard/steps"] for row in rows] == [1, 2, 1, 1, 1]
    assert [row.get("fedshard/synchronous", 0) for row in rows] == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_in_a_loop(size: int, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    env = fsdp_launch_env(pool.world_size // 2, 2)
    ranks = pool.run(
        raw_loop,
        2,
        8,
        env=env,
        init_group=False,
        limit_seconds=120,
        num_groups=2,
        sync_steps_at_start=3,
        sync_steps_at_end=2,
        num_training_steps=8,
    )
    assert ranks[0]["rounds"] == [2, 1, 2, 1, 2]

    def initial() -> nn.Module:
        model = tiny_llama(seed=1)
        model.load_state_dict(ranks[0]["start"], strict=False)
        return model

    def loss(model: nn.Module, batch: Batch, num_items: int) -> torch.Tensor:
        return model(**batch).loss / num_items

    recorded = [[batch for epoch in rank["epochs"] for batch in epoch] for rank in ranks]
    result = train_reference(
        initial,
        batches_by_step(recorded, 2, ACCUMULATION),
        {2, 3, 5, 6, 8},
        adamw,
        learning_rate=lambda step: ranks[0]["rates"][step],
        max_grad_norm=MAX_GRAD_NORM,
        loss=loss,
        count=lambda batch: 1,
        synchronous=lambda step: step < 3 or step >= 6,
    )
    assert SYNC_EVERY == 2
    assert largest(ranks[0]["state"], result.state) < 2e-5
    assert largest(ranks[0]["state"], ranks[0]["start"]) > 5e-3
    for rank in ranks:
        assert all(torch.equal(tensor, ranks[0]["state"][name]) for name, tensor in rank["state"].items())


class Heads(nn.Module):
    """
    Two heads on one body, in one FSDP module: a forward pass uses one of them.

    Args:
        sizes (`Sequence[int]`):
            Classes of each.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.heads = nn.ModuleList([nn.Linear(6, size) for size in sizes])

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(inputs))).square().mean()


def heads(sizes: Sequence[int]) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model, and inputs of each rank in each step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Heads(sizes).double(), list(torch.randn(3, 4, 5, 8, dtype=torch.float64))


def unused_parameters(sizes: Sequence[int]) -> Any:
    """Body: each group trains a head of its own. The model, the drifts, and what FSDP2 is told about unused parameters."""
    mesh = make_mesh(with_slow_tier=False)
    mesh.set_timeout(10.0)
    plain, inputs = heads(sizes)
    model = fully_shard(plain, mesh=mesh.fsdp)
    optimizer = adamw(model.parameters())
    rounds = Rounds(model, mesh, FederationConfig(2, 2, sync_steps_at_start=3), [optimizer])
    (group,) = model._get_fsdp_state()._fsdp_param_groups  # type: ignore[attr-defined]
    told, drifts = [group.reduce_scatter_unused_params], []
    for step in inputs:
        model(step[dist.get_rank()], mesh.group_index).backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics = rounds.step()
        drifts += [metrics.drift] if metrics else []
    told.append(group.reduce_scatter_unused_params)
    rounds.finish()
    guard.detach(rounds)
    return full_state(model), drifts, told


@pytest.mark.parametrize("sizes", [(3, 3), (3, 4)])
def test_parameters_that_one_group_uses(world4: WorkerPool, sizes: tuple[int, int]) -> None:
    """FSDP2 reduces what has a gradient, one behind the other: without a place for the others' it would mix parameters up."""
    ranks = world4.run(unused_parameters, sizes)
    torch.set_num_threads(1)
    model, inputs = heads(sizes)
    optimizer = adamw(model.parameters())
    for step in inputs:
        (sum(model(own, rank // 2) for rank, own in enumerate(step)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state, drifts, told in ranks:
        assert drifts == [0, 0] and told == [True, False]
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12, msg=name)
            assert torch.equal(state[name], ranks[0][0][name])


def written_to() -> tuple[list[int], int]:
    """Body: what is sent in a synchronous round without and with a write to one group's model, and what an averaging takes."""
    mesh, sent, averaged = make_mesh(with_slow_tier=False), [], 0
    for written in (False, True):
        plain, inputs = heads((3, 3))
        model = fully_shard(plain, mesh=mesh.fsdp)
        optimizer = adamw(model.parameters())
        rounds = Rounds(model, mesh, FederationConfig(2, 1, sync_steps_at_start=1), [optimizer])
        model(inputs[0][dist.get_rank()], 0).backward()
        optimizer.step()
        if written and mesh.group_index == 1:
            with torch.no_grad():
                model.body.weight.to_local().add_(1)
        metrics = rounds.step()
        assert metrics is not None and (metrics.drift > 0) == written
        sent.append(metrics.bytes_sent)
        averaged = rounds.averager.tensors.collect().parameter_bytes()
        rounds.finish()
        guard.detach(rounds)
    return sent, averaged


def test_an_averaging_after_them_is_counted(world4: WorkerPool) -> None:
    """Where the groups differ all the same. Bytes are those of both ranks of a group."""
    ranks = world4.run(written_to)
    for sent, _ in ranks:
        assert sent[1] - sent[0] == ranks[0][1] + ranks[1][1] > 0


def own_hook() -> None:
    from accelerate import Accelerator

    from hf_fedshard import FederatedFSDPPlugin

    plugin = FederatedFSDPPlugin(sync_steps_at_start=1)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=plugin.parallelism_config)
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradient: None)
    plugin.federate(accelerator, model, optimizer)


def no_length() -> None:
    raw_loop(1, 2, sync_steps_at_end=1)


@pytest.mark.parametrize(
    ("body", "words"),
    [(own_hook, "has an all-reduce hook already"), (no_length, "num_training_steps=")],
)
def test_wrong_use(world4: WorkerPool, body: Any, words: str) -> None:
    errors = world4.run_failing(body, env=fsdp_launch_env(2, 2), init_group=False, limit_seconds=60)
    assert {error.type_name for error in errors} == {"ValueError"}
    assert all(words in error.message for error in errors)


def with_fp16(trainer: bool, folder: str) -> None:
    from accelerate import Accelerator

    import hf_fedshard.agreement
    import hf_fedshard.plugin
    from hf_fedshard import FedAvgCallback, FederatedFSDPPlugin

    # On CPU fp16 is refused ahead of it.
    module = hf_fedshard.agreement if trainer else hf_fedshard.plugin
    with mock.patch.object(module, "check_launch"):
        if trainer:
            callback = FedAvgCallback(num_groups=2, sync_steps_at_end=3)
            tiny_trainer(folder, federated=False, before=(callback,))
        else:
            plugin = FederatedFSDPPlugin(num_groups=2, sync_steps_at_end=3)
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=plugin.parallelism_config)
            plugin.federate(accelerator, tiny_llama(), num_training_steps=9)


@pytest.mark.parametrize("trainer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fp16_at_the_end_is_refused(world4: WorkerPool, tmp_path: Path, trainer: bool) -> None:
    env = fsdp_launch_env(2, 2, mixed_precision="fp16")
    errors = world4.run_failing(with_fp16, trainer, str(tmp_path), env=env, init_group=False, limit_seconds=60)
    assert {error.type_name for error in errors} == {"ValueError"}
    for words in (
        "sync_steps_at_end=3 with mixed_precision=fp16",
        "Set sync_steps_at_end to 0, or mixed_precision to bf16",
    ):
        assert all(words in error.message for error in errors)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sync_steps_at_start": 6}, marks=pytest.mark.slow),
        pytest.param(
            {"sync_steps_at_start": 6, "gradient_accumulation_steps": 2, "bf16": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "accumulated"],
)
def test_resumed_among_them_is_uninterrupted(world4: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    assert_resumes(world4, tmp_path, **options)


@pytest.mark.parametrize(
    ("size", "at_end"), [(4, 6), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 8), (8, 6), (8, 8)))]
)
def test_resumed_at_the_end_is_uninterrupted(
    size: int, at_end: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """From step 4, where synchronous steps begin, or from the middle of them."""
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    assert_resumes(pool, tmp_path, num_groups=2, sync_steps_at_end=at_end, one_optimizer=True)

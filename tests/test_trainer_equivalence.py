"""Federated training through Trainer against a single process that averages full states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.comparison import assert_matches, largest, refer
from tests.harness.data import IGNORED_LABEL, Batch
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.reference import num_label_tokens
from tests.harness.trainer_runs import MAX_GRAD_NORM, make_model, native_loss, train


def run(pool: WorkerPool, folder: Path, launch: dict[str, Any] | None = None, **options: Any) -> list[dict[str, Any]]:
    env = fsdp_launch_env(**{"dp_replicate": pool.world_size // 2, "dp_shard": 2, **(launch or {})})
    return pool.run(train, str(folder), env=env, init_group=False, limit_seconds=240, **options)


def native(model: nn.Module, batch: Batch, num_items: int) -> torch.Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return native_loss(model(**inputs), batch["labels"], num_items)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (4, "llama"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, "double"), (8, "llama"))),
        (8, "double"),
    ],
)
def test_is_the_reference(size: int, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """FL+FSDP with 2 groups of 2 shards, FL+HSDP with 2 groups of 2 replicas of 2 shards; 20 steps in rounds of 3."""
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    ranks = run(pool, tmp_path, kind=kind, native=kind == "double")
    result = refer(ranks, kind, loss=native if kind == "double" else None)
    assert result.borders[-2:] == [18, 20], "the last round must be short"
    assert min(map(min, result.grad_norms)) > MAX_GRAD_NORM, "every step must be clipped"
    assert max(abs(a - b) for a, b in result.num_items) > 20, "the groups must have unequal token counts"
    assert len(ranks[0]["batches"]) == 40
    _, moved = assert_matches(ranks, result, kind, 1e-12 if kind == "double" else 1e-4)
    assert moved > 5e-3


def short(pool: WorkerPool, folder: Path, kind: str = "llama", **options: Any) -> list[dict[str, Any]]:
    return run(pool, folder, kind=kind, max_steps=5, **options)


def test_the_reference_tells_faults_apart(world4: WorkerPool, tmp_path: Path) -> None:
    """Other periods, clipping or groups move the weights by more than any tolerance of this file."""
    ranks = short(world4, tmp_path)
    assert_matches(ranks, refer(ranks), "llama", 2e-5)
    for wrong in ({"sync_every": 4}, {"num_groups": 1}, {"max_grad_norm": None}):
        assert largest(refer(ranks, **wrong).state, ranks[0]["state"]) > 1e-4, wrong


@pytest.mark.parametrize("kind", ["tied", "frozen", "lora"])
def test_kinds_of_models(world4: WorkerPool, kind: str, tmp_path: Path) -> None:
    ranks = short(world4, tmp_path, kind)
    _, moved = assert_matches(ranks, refer(ranks, kind), kind, 2e-5)
    assert moved > 2e-3
    start = make_model(kind)
    frozen = {name for name, parameter in start.named_parameters() if not parameter.requires_grad}
    assert bool(frozen) == (kind != "tied")
    for name, tensor in start.state_dict().items():
        assert torch.equal(ranks[0]["state"].get(name, tensor), tensor) == (
            name in frozen or name not in ranks[0]["state"]
        )


def smoothed(model: nn.Module, batch: Batch, num_items: int) -> torch.Tensor:
    # Shifted, as without FSDP2, which renames the model's class so that stock Trainer trains each token on itself.
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    total = nn.functional.cross_entropy(
        logits, labels, ignore_index=IGNORED_LABEL, label_smoothing=0.1, reduction="sum"
    )
    return total / num_items


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}, {"native": True}], ids=["smoothing", "func"])
def test_losses_that_take_the_count(world4: WorkerPool, options: dict[str, Any], tmp_path: Path) -> None:
    ranks = short(world4, tmp_path, **options)
    result = refer(ranks, loss=native if "native" in options else smoothed)
    _, moved = assert_matches(ranks, result, "llama", 2e-5)
    assert moved > 2e-3


def no_count(model: nn.Module, batch: Batch, num_items: int) -> torch.Tensor:
    return model(**batch)["loss"] / num_items


def test_a_model_that_takes_no_count(world4: WorkerPool, tmp_path: Path) -> None:
    ranks = short(
        world4,
        tmp_path,
        "batchnorm",
        launch={"wrap_cls": "TinyBlock"},
        optim="sgd",
        learning_rate=0.5,
        weight_decay=0.0,
    )
    assert all(count is None for rank in ranks for count in rank["counts"])
    result = refer(ranks, "batchnorm", optimizer=sgd, learning_rate=0.5, loss=no_count, count=lambda batch: 1)
    # Two steps into the second round: the buffers are averaged over all ranks at both borders.
    _, moved = assert_matches(ranks, result, "batchnorm", 1e-5)
    assert moved > 1e-2


def test_means_of_ranks_on_demand(world4: WorkerPool, tmp_path: Path) -> None:
    """`average_tokens_across_devices=False` normalises by each rank's own tokens, as stock Trainer does."""
    ranks = short(world4, tmp_path, average_tokens_across_devices=False)
    counts = {tuple(rank["counts"]) for rank in ranks}
    assert len(counts) == 4
    for rank in ranks:
        windows = [rank["batches"][at : at + 2] for at in range(0, 10, 2)]
        assert [int(count) for count in rank["counts"][::2]] == [sum(map(num_label_tokens, w)) for w in windows]


def test_bf16_gets_the_exact_count(world4: WorkerPool, tmp_path: Path) -> None:
    ranks = short(
        world4,
        tmp_path,
        bf16=True,
        length=48,
        per_device_train_batch_size=6,
        optim="sgd",
        learning_rate=0.5,
        weight_decay=0.0,
    )
    result = refer(ranks, optimizer=sgd, learning_rate=0.5)
    inexact = 0
    for number, rank in enumerate(ranks):
        for step, count in enumerate(rank["counts"][::2]):
            expected = result.num_items[step][number // 2]
            # Trainer scales the loss by all ranks, FSDP2 takes the mean over the group's.
            assert float(count) == 2 * expected
            inexact += float(torch.tensor(float(count)).bfloat16()) != float(count)
    assert inexact > 10, "bf16 must not hold these counts, or nothing is shown"
    moved = {n: t - ranks[0]["state"][n] for n, t in make_model("llama").state_dict().items()}
    away = {n: t - ranks[0]["state"][n] for n, t in result.state.items()}
    norms = [sum(t.double().square().sum() for t in state.values()).sqrt().item() for state in (away, moved)]
    print(f"moved {norms[1]:.2e}, of which {norms[0] / norms[1]:.1%} is not the reference's")
    assert norms[0] < 0.05 * norms[1]


def test_plain_fsdp_launch(world4: WorkerPool, tmp_path: Path) -> None:
    ranks = short(world4, tmp_path, launch={"dp_replicate": None, "dp_shard": 4})
    assert_matches(ranks, refer(ranks), "llama", 2e-5)


@pytest.mark.parametrize(("replicate", "shard"), [pytest.param(1, 4, marks=pytest.mark.slow), (2, 2), (None, 4)])
def test_one_group_is_plain_fsdp2(world4: WorkerPool, replicate: int | None, shard: int, tmp_path: Path) -> None:
    launch = {"dp_replicate": replicate, "dp_shard": shard}
    federated, plain = (
        short(world4, tmp_path, launch=launch, num_groups=1, federated=federated) for federated in (True, False)
    )
    for ours, stock in zip(federated, plain, strict=True):
        assert all(
            torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(ours["batches"], stock["batches"], strict=True)
        )
        assert all(torch.equal(tensor, stock["state"][name]) for name, tensor in ours["state"].items())
    assert largest(plain[0]["state"], make_model("llama").state_dict()) > 2e-3


def test_h_1_with_sgd_is_fsdp_over_the_union(world4: WorkerPool, tmp_path: Path) -> None:
    options = {"optim": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "max_grad_norm": 0.0, "uneven": False}
    groups = short(world4, tmp_path, sync_every=1, **options)
    union = short(world4, tmp_path, sync_every=1, federated=False, **options)
    for ours, stock in zip(groups, union, strict=True):
        for mine, theirs in zip(ours["batches"], stock["batches"], strict=True):
            assert torch.equal(mine["input_ids"], theirs["input_ids"])
        assert all(torch.equal(tensor, groups[0]["state"][name]) for name, tensor in ours["state"].items())
    assert largest(groups[0]["state"], union[0]["state"]) < 1e-6
    assert largest(union[0]["state"], make_model("llama").state_dict()) > 1e-2
    rarely = short(world4, tmp_path, sync_every=5, **options)
    assert largest(rarely[0]["state"], union[0]["state"]) > 1e-5, "the period must matter"


def train_with_own_seed(folder: str) -> dict[str, Any] | str:
    from hf_fedshard import FederationMismatchError

    try:
        return train(folder, max_steps=5, seed=100 + int(os.environ["RANK"]))
    except FederationMismatchError as error:
        return str(error)


def test_unequal_seeds_draw_disjoint_data(world4: WorkerPool, tmp_path: Path) -> None:
    """Each rank would shuffle in an order of its own: either that is put right, or it is refused."""
    found = world4.run(train_with_own_seed, str(tmp_path), env=fsdp_launch_env(2, 2), init_group=False)
    if isinstance(found[0], str):
        assert all("seed" in message for message in found)
        return
    drawn = [tuple(row) for rank in found for batch in rank["batches"] for row in batch["input_ids"].tolist()]
    assert len(drawn) == len(set(drawn)) == 4 * 5 * 4
    assert_matches(found, refer(found), "llama", 2e-5)

"""How much a group counts: exact for unequal counts, the same on all ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_fedshard.config import FederationConfig
from hf_fedshard.weights import BY_NAME, GroupCounts, count_batch, find_weight_function, group_weights
from tests.harness.outer_runs import (
    GROUP_SIZE,
    NUM_RANKS,
    SYNC_EVERY,
    Run,
    assert_matches,
    double,
    draws,
    make_mesh,
    num_samples,
    num_tokens,
    refer,
    run_cases,
)
from tests.harness.pool import WorkerPool


def by_inverse_loss(counts: list[GroupCounts]) -> list[float]:
    return [1 / count.loss for count in counts]


CASES: dict[str, dict[str, Any]] = {
    "samples": {"group_weights": "samples"},
    "tokens": {"group_weights": "tokens"},
    "function": {"group_weights": by_inverse_loss},
    "outer": {"group_weights": "tokens", "outer_optimizer": "nesterov", "inner_moments": "average"},
    "poisoned": {"group_weights": "tokens", "poisoned": 1},
}


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, Any]]:
    return world8.run(run_cases, CASES, limit_seconds=240)


def counted(count: Any, number: int) -> list[float]:
    steps = range(number * SYNC_EVERY, (number + 1) * SYNC_EVERY)
    per_rank = [sum(count(draws(rank)[step]) for step in steps) for rank in range(NUM_RANKS)]
    return [sum(per_rank[:GROUP_SIZE]), sum(per_rank[GROUP_SIZE:])]


def shares(values: list[float]) -> list[float]:
    return [value / sum(values) for value in values]


def test_samples_and_tokens(runs: list[dict[str, Any]]) -> None:
    for case, count in (("samples", num_samples), ("tokens", num_tokens)):
        result = refer(weights=lambda number, items, count=count: shares(counted(count, number)))
        assert_matches([rank[case] for rank in runs], result)
        for number, metrics in enumerate(runs[0][case]["metrics"]):
            expected = counted(count, number)
            assert metrics.weights == tuple(value / max(expected) for value in expected)
            assert metrics.as_logs()["fedshard/weight/group_0"] == pytest.approx(expected[0] / expected[1], abs=1e-4)
    assert counted(num_samples, 0) == [8, 24]
    assert len({value / 3 for value in counted(num_tokens, 0)} & set(counted(num_tokens, 0))) == 0


def test_function_of_the_loss(runs: list[dict[str, Any]]) -> None:
    metrics = runs[0]["function"]["metrics"]
    inverse = [[1 / loss for loss in round.losses] for round in metrics]
    result = refer(weights=lambda number, items: shares(inverse[number]))
    assert_matches([rank["function"] for rank in runs], result, 1e-11)
    for round, expected in zip(metrics, inverse, strict=True):
        assert round.weights == pytest.approx([value / max(expected) for value in expected], rel=1e-12)
    assert all(rank["function"]["metrics"][0].weights == metrics[0].weights for rank in runs)


def test_a_poisoned_group_has_no_weight(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        first, second = rank["poisoned"]["metrics"]
        assert (first.weights, first.excluded) == ((1.0, 0.0), (1,))
        assert min(second.weights) > 0 and not second.excluded
        assert all(tensor.isfinite().all() for state in rank["poisoned"]["borders"] for tensor in state.values())


def _skipped_steps() -> Any:
    """Group 1 skips one of two updates, as a gradient scaler does."""
    mesh = make_mesh()
    run = Run(mesh, double(), group_weights="steps")
    inner = run.optimizer.step
    run.train_step = 0  # type: ignore[attr-defined]
    if mesh.group_index == 1:
        run.optimizer.step = lambda *args: None  # type: ignore[method-assign, assignment]
    run.train(0)
    run.optimizer.step = inner  # type: ignore[method-assign]
    return run.train(1).weights


def test_steps_are_updates(world8: WorkerPool) -> None:
    assert world8.run(_skipped_steps) == [(1.0, 0.5)] * NUM_RANKS


def _wrong(setting: Any, tell: dict[str, int]) -> None:
    run = Run(make_mesh(), double(), group_weights=setting)
    for _ in range(SYNC_EVERY):
        run.rounds.count_step(**tell)
    run.rounds.close()


def on_one_rank(counts: list[GroupCounts]) -> list[float]:
    if dist.get_rank() == 5:
        raise KeyError("nothing here")
    return [1.0 for _ in counts]


def negative(counts: list[GroupCounts]) -> list[float]:
    return [1.0, -1.0]


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("tokens", ["no group has counted any tokens", "fedavg.step(loss, tokens=...)"]),
        (negative, ["test_weights:negative gave [1.0, -1.0]", "one number for each group"]),
        (on_one_rank, ["on_one_rank"]),
    ],
    ids=["none counted", "negative", "one rank"],
)
def test_wrong_weights_stop_every_rank(world8: WorkerPool, setting: Any, parts: list[str]) -> None:
    errors = world8.run_failing(_wrong, setting, {"samples": 1})
    assert {error.type_name for error in errors} == {"ValueError"}
    for error in errors:
        assert all(part in error.message for part in parts), error.message
    if setting is on_one_rank:
        assert "failed: KeyError: 'nothing here'" in errors[5].message


ROWS = {"samples": [2.0, 6.0, 4.0], "tokens": [0.0, 5.0, 10.0], "updates": [3.0, 3.0, 3.0]}
PEERS: Any = SimpleNamespace(layout=SimpleNamespace(num_groups=3))


@pytest.mark.parametrize(
    ("setting", "excluded", "weights"),
    [
        ("uniform", (), (1.0, 1.0, 1.0)),
        ("uniform", (1,), (1.0, 0.0, 1.0)),
        ("samples", (), (1 / 3, 1.0, 2 / 3)),
        ("samples", (1,), (0.5, 0.0, 1.0)),
        ("tokens", (), (0.0, 0.5, 1.0)),
        ("steps", (0,), (0.0, 1.0, 1.0)),
    ],
)
def test_by_name(setting: str, excluded: tuple[int, ...], weights: tuple[float, ...]) -> None:
    assert group_weights(setting, ROWS, excluded, PEERS) == weights


def test_no_group_has_made_a_step() -> None:
    rows = {**ROWS, "updates": [0.0, 4.0, 0.0]}
    assert group_weights("steps", rows, (1,), PEERS) == (1.0, 0.0, 1.0), "they hold one model, which is the average"
    assert group_weights("steps", {**ROWS, "updates": [0.0] * 3}, (), PEERS) == (1.0, 1.0, 1.0)


def test_excluded_counts_do_not_matter() -> None:
    rows = {**ROWS, "tokens": [math.nan, 5.0, 10.0]}
    assert group_weights("tokens", rows, (0,), PEERS) == (0.0, 0.5, 1.0)


def test_functions() -> None:
    assert all(find_weight_function(name) is None for name in BY_NAME)
    assert find_weight_function(negative) is negative
    assert find_weight_function(f"{__name__}:by_inverse_loss").__name__ == "by_inverse_loss"  # type: ignore[union-attr]


def test_count_batch() -> None:
    ids = torch.ones(3, 5, dtype=torch.int64)
    labels = torch.tensor([[1, 2, -100, -100, -100], [1, 2, 3, 4, 5], [-100] * 5])
    assert count_batch({"input_ids": ids, "labels": labels}) == (3, 1 + 4)
    assert count_batch({"input_ids": ids}) == (3, 15)
    assert count_batch({"inputs": torch.ones(4, 2), "labels": torch.ones(4)}) == (4, None)
    assert count_batch([1, 2]) == (0, None)
    assert count_batch({"input_ids": ids, "labels": labels}, exactly=False) == (3, None)


def test_tokens_are_those_that_the_loss_counts() -> None:
    """Of an encoder-decoder or masked model the first position is predicted as all others."""
    ids = torch.ones(2, 4, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": torch.tensor([[1, 2, -100, -100], [-100, -100, 5, 6]])}
    assert count_batch(batch, shifts_labels=True) == (2, 3)
    assert count_batch(batch, shifts_labels=False) == (2, 4)
    # Where the collator has shifted them all are meant.
    shifted = torch.tensor([[2, -100, -100, -100], [-100, 5, 6, -100]])
    assert count_batch({**batch, "shift_labels": shifted}) == (2, 3)
    assert count_batch({**batch, "shift_labels": torch.ones_like(ids)}, shifts_labels=False) == (2, 8)


@pytest.mark.parametrize("options", [{}, {"position_ids_start": 2}, {"return_flash_attn_kwargs": True}])
def test_samples_without_padding(options: dict[str, Any]) -> None:
    """All in one row: as many as were strung together, whose first tokens nothing predicts."""
    from transformers import DataCollatorWithFlattening

    samples = [{"input_ids": list(range(5, 5 + length))} for length in (4, 2, 7, 3)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(samples)
    assert batch["input_ids"].shape == (1, 16)
    assert count_batch(batch) == (4, 3 + 1 + 6 + 2)
    # Filled up to a multiple, as TRL can, with positions that are all 0.
    filled = {
        name: torch.nn.functional.pad(batch[name], (0, 4), value=-100 if name == "labels" else 0)
        for name in ("input_ids", "labels", "position_ids")
    }
    assert count_batch(filled) == (4, 12)


def test_rows_of_single_samples_stay_rows() -> None:
    """With positions given, left padding and all."""
    ids = torch.ones(2, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert count_batch({"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids})[0] == 2
    assert count_batch({"input_ids": ids, "position_ids": torch.arange(4).expand(2, 4), "labels": ids})[0] == 2
    # Those of several axes, of images and text, say nothing of samples.
    assert count_batch({"input_ids": ids, "position_ids": torch.zeros(3, 2, 4), "labels": ids})[0] == 2


@pytest.mark.parametrize("shifts", [True, False])
def test_trainer_says_what_the_loss_counts(shifts: bool) -> None:
    """On ranks of a tensor-parallel axis, of which two are given the same batch."""
    from hf_fedshard.batch_counts import BatchCounts

    state: Any = SimpleNamespace(global_step=0)
    trainer: Any = SimpleNamespace(model=None, state=state, _loss_shifts_labels=shifts)
    mesh: Any = SimpleNamespace(layout=SimpleNamespace(inner={"dp_shard": 2, "tp": 2}))
    rounds, ids = mock.Mock(), torch.ones(2, 4, dtype=torch.int64)
    counts = BatchCounts(trainer, mesh, FederationConfig(group_weights="tokens"))
    counts.add([{"input_ids": ids, "labels": ids}] * 2)
    state.global_step = 1
    counts.count_steps(rounds, state)
    rounds.count_step.assert_called_once_with(tokens=8, samples=2, labels=6 if shifts else 8)

"""Inside a round no collective crosses a group border: whole runs of Trainer, counted between their borders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

from tests.harness.data import StreamDataset, hf_stream, token_samples
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.timeline import Timeline
from tests.harness.tiny_trainer import History, forget_meshes, tiny_trainer


FL_FSDP = fsdp_launch_env(2, 2)
FL_HSDP = fsdp_launch_env(4, 2)
LIMIT = 60.0


def rows_of(files: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from file


def unequal_files(sizes: list[int]) -> Any:
    """A stream of `datasets` with one file for each size."""
    from datasets import IterableDataset

    files = [token_samples(size, seed=seed) for seed, size in enumerate(sizes)]
    return IterableDataset.from_generator(rows_of, gen_kwargs={"files": files})


DATA = {
    "map": lambda: None,
    "torch stream": lambda: StreamDataset(token_samples(24)),
    "stream of one file": lambda: hf_stream(token_samples(24)),
    "stream of many unequal files": lambda: unequal_files([1, 7, 2, 3, 5, 1]),
}


def watched(folder: str, data: Any = "map", **changes: Any) -> dict[str, Any]:
    """Trains under a [`Timeline`] and returns what the assertions need."""
    forget_meshes()
    history = History()
    after = (*changes.pop("after", ()), history)
    trainer = tiny_trainer(
        folder, train_dataset=DATA[data]() if isinstance(data, str) else data, after=after, **changes
    )
    timeline = Timeline(2)
    with timeline.of(trainer):
        trainer.train()
    return {
        "leaks": timeline.crossing_inside_rounds(),
        "inside": len(timeline.inside_rounds()),
        "crossing": sum(collective.crosses(timeline.group_of) for collective in timeline.collectives),
        "borders": timeline.borders,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "logged": history.logged,
        "evaluated": history.evaluated,
        "saved": history.saved,
        "epoch_ends": history.epoch_ends,
        "history": trainer.state.log_history,
        "trainer_values": getattr(trainer, "values", []),
    }


def run_isolated(world: WorkerPool, *args: Any, env: dict[str, str] = FL_FSDP, **kwargs: Any) -> dict[str, Any]:
    """Runs [`watched`] and returns rank 0's result after the assertions that hold for every run."""
    results = world.run(watched, *args, env=env, limit_seconds=LIMIT, **kwargs)
    for rank, result in enumerate(results):
        assert not result["leaks"], f"rank {rank}\n" + "\n".join(result["leaks"][:3])
        assert result["inside"] > 10 * result["steps"]  # FSDP's own: the record is not empty
        assert result["crossing"] > 0
        assert result["borders"] == results[0]["borders"]
        assert result["borders"][-1] == result["steps"]
        for what in ("logged", "evaluated", "saved"):
            assert result[what] == results[0][what]
            assert set(result[what]) <= set(result["borders"]), what
        for what, strategy in (
            ("logged", "logging_strategy"),
            ("evaluated", "eval_strategy"),
            ("saved", "save_strategy"),
        ):
            # A callback may have asked where no schedule does.
            assert kwargs.get(strategy, "no") == "no" or result[what], what
    return results[0]


class LeakyTrainer(Trainer):
    """Has a collective of its own over the world in every loss, as a user's code may."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        dist.all_reduce(torch.ones(3))
        return super().compute_loss(*args, **kwargs)


def test_a_leak_is_seen(world4: WorkerPool, tmp_path: Path) -> None:
    for result in world4.run(
        watched, str(tmp_path), trainer_class=LeakyTrainer, max_steps=3, env=FL_FSDP, limit_seconds=LIMIT
    ):
        assert len(result["leaks"]) == 3
        assert "all_reduce over [0, 1, 2, 3], 12 bytes" in result["leaks"][0]


def test_over_an_epoch_border(world4: WorkerPool, tmp_path: Path) -> None:
    result = run_isolated(world4, str(tmp_path), num_train_epochs=2, max_steps=-1)
    assert result["epoch_ends"] == [6, 12]
    assert result["borders"] == [4, 8, 12]


def test_fl_hsdp(world8: WorkerPool, tmp_path: Path) -> None:
    result = run_isolated(
        world8,
        str(tmp_path),
        env=FL_HSDP,
        max_steps=7,
        gradient_accumulation_steps=2,
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        eval_samples=8,
        include_num_input_tokens_seen="all",
    )
    # 24 samples over 8 ranks: an epoch ends after 3 micro-batches, a window of 2 and a remainder of 1.
    assert result["epoch_ends"] == [2, 4, 6, 7]
    assert result["borders"] == result["logged"] == [4, 7]
    assert result["evaluated"] == [4, 7]


@pytest.mark.parametrize("data", ["torch stream", "stream of one file", "stream of many unequal files"])
def test_streams(world4: WorkerPool, tmp_path: Path, data: str) -> None:
    result = run_isolated(
        world4, str(tmp_path), data, max_steps=9, gradient_accumulation_steps=2, average_tokens_across_devices=True
    )
    assert result["borders"] == [4, 8, 9]
    if "unequal" not in data:
        assert result["epoch_ends"][0] == 3


class GatheringTrainer(Trainer):
    """Gathers in its loss as TRL's trainers do, several times in a micro-step."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        rank, accelerator = dist.get_rank(), self.accelerator
        # Part of the graph, and a view, as the log-probabilities of DPO are.
        mine = torch.tensor([float(rank), 0.0], requires_grad=True).split(1)[0]
        ragged = torch.full((rank + 1, 2), float(rank))
        padded = accelerator.pad_across_processes(ragged, dim=0, pad_index=-1)
        found = [
            accelerator.gather(mine).tolist(),
            accelerator.gather_for_metrics(mine).tolist(),
            accelerator.gather_for_metrics({"a": [rank, rank]}["a"], use_gather_object=True),
            accelerator.gather(torch.tensor(rank % 2 == 0)).tolist(),
            [accelerator.reduce(mine, reduction="sum").item(), accelerator.reduce(mine, reduction="mean").item()],
            list(padded.shape),
            accelerator.gather(padded)[:, 0].tolist(),
        ]
        accelerator.wait_for_everyone()
        if model.training:
            self.values = [*getattr(self, "values", []), found]
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)


def test_trainers_that_gather_in_the_loss(world4: WorkerPool, tmp_path: Path) -> None:
    results = world4.run(
        watched,
        str(tmp_path),
        trainer_class=GatheringTrainer,
        max_steps=5,
        gradient_accumulation_steps=2,
        env=FL_FSDP,
        limit_seconds=LIMIT,
    )
    # The values are the group's, in the world's shape: repeated for each group, sums times their number. So what a
    # trainer takes out by its process_index is its own.
    rows = [[0.0, -1.0, 1.0, 1.0], [2.0, 2.0, 2.0, -1.0, 3.0, 3.0, 3.0, 3.0]]
    for rank, result in enumerate(results):
        assert not result["leaks"], "\n".join(result["leaks"][:3])
        group = rank // 2
        low, high = float(2 * group), float(2 * group + 1)
        assert len(result["trainer_values"]) == 10
        for values in result["trainer_values"]:
            gathered, for_metrics, objects, flags, reduced, shape, padded = values
            assert gathered == for_metrics == [low, high] * 2
            assert gathered[rank] == rank
            assert objects == [low, low, high, high] * 2
            assert flags == [True, False] * 2
            assert reduced == [2 * (low + high), (low + high) / 2]
            assert shape == [2 * group + 2, 2]
            assert padded == rows[group] * 2


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}, {"average_tokens_across_devices": False}])
def test_losses(world4: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    run_isolated(world4, str(tmp_path), max_steps=5, gradient_accumulation_steps=2, **options)


@pytest.mark.parametrize("kind", ["all", "non_padding"])
def test_tokens_seen(world4: WorkerPool, tmp_path: Path, kind: str) -> None:
    result = run_isolated(
        world4,
        str(tmp_path),
        max_steps=10,
        logging_strategy="steps",
        logging_steps=1,
        include_num_input_tokens_seen=kind,
    )
    # 4 ranks, 12 tokens each in a step; no padding.
    seen = {row["step"]: row["num_input_tokens_seen"] for row in result["history"] if "loss" in row}
    assert seen == {4: 4 * 48, 8: 8 * 48, 10: 10 * 48}
    assert result["tokens"] == 480


def test_cadences_move_to_the_border(world4: WorkerPool, tmp_path: Path) -> None:
    result = run_isolated(
        world4,
        str(tmp_path),
        max_steps=14,
        logging_strategy="steps",
        logging_steps=1,
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=3,
        eval_samples=6,
        save_strategy="steps",
        save_steps=5,
    )
    assert result["borders"] == [4, 8, 12, 14]
    assert result["logged"] == [4, 8, 12, 14]
    assert result["evaluated"] == [4, 8, 12, 14]  # due at 3, 6, 9 and 12, and at the end
    assert result["saved"] == [8, 12, 14]  # due at 5, 10, and at the end
    assert all(row["loss"] > 0 for row in result["history"] if "loss" in row)


def test_epoch_strategies(world4: WorkerPool, tmp_path: Path) -> None:
    result = run_isolated(
        world4,
        str(tmp_path),
        max_steps=-1,
        num_train_epochs=3,
        logging_strategy="epoch",
        eval_strategy="epoch",
        eval_samples=6,
        save_strategy="epoch",
    )
    assert result["epoch_ends"] == [6, 12, 18]
    assert result["borders"] == [4, 8, 12, 16, 18]
    # The first epoch ends inside the second round, the second one at a border, the third one closes the run.
    assert result["logged"] == result["evaluated"] == result["saved"] == [8, 12, 18]

"""Which samples each rank draws: disjoint, all of them over an epoch, and nothing that makes a rank wait."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import IterableDataset

from tests.harness.data import BatchRecorder, ListDataset, StreamDataset, hf_stream, token_samples
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.timeline import Timeline
from tests.harness.tiny_trainer import forget_meshes, tiny_trainer
from tests.test_isolation import FL_FSDP, FL_HSDP, LIMIT, rows_of


def numbered(num_samples: int, first: int = 0) -> list[dict[str, list[int]]]:
    """Samples that tell their number: in two digits of base 90."""
    samples = token_samples(num_samples, uneven=False)
    for number, sample in enumerate(samples, start=first):
        sample["input_ids"][:2] = [3 + number // 90, 3 + number % 90]
        sample["labels"] = sample["input_ids"]
    return samples


def one_epoch_each(
    folder: str, data: Any, reseed: bool = False, **changes: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Trains; returns the numbers of the samples in each of this rank's batches, and what the timeline found."""
    forget_meshes()
    model = tiny_llama()
    recorder = BatchRecorder(model, keys=("input_ids",))
    trainer = tiny_trainer(folder, train_dataset=data, model=model, **changes)
    if reseed:
        torch.manual_seed(dist.get_rank())
    timeline = Timeline(2)
    with timeline.of(trainer):
        trainer.train()
    drawn = [[int((row[0] - 3) * 90 + row[1] - 3) for row in batch["input_ids"]] for batch in recorder.batches]
    recorder.remove()
    return drawn, {"leaks": timeline.crossing_inside_rounds(), "steps": trainer.state.global_step}


def drawn_by_ranks(world: WorkerPool, *args: Any, env: dict[str, str] = FL_FSDP, **kwargs: Any) -> list[list[int]]:
    """The samples of each rank, in order."""
    results = world.run(one_epoch_each, *args, env=env, limit_seconds=LIMIT, **kwargs)
    for _, found in results:
        assert not found["leaks"], found["leaks"][0]
    assert len({len(batches) for batches, _ in results}) == 1
    return [[number for batch in batches for number in batch] for batches, _ in results]


def check_epoch(drawn: list[list[int]], num_samples: int, batch_size: int) -> int:
    """Returns how many draws were repeats."""
    counts = Counter(number for numbers in drawn for number in numbers)
    assert set(counts) == set(range(num_samples))
    repeats = sum(counts.values()) - num_samples
    assert 0 <= repeats < len(drawn) * batch_size
    return repeats


EPOCH = {"max_steps": -1, "num_train_epochs": 1}


@pytest.mark.parametrize(("num_samples", "repeats"), [(24, 0), (29, 3), (33, 7), (3, 5)])
def test_an_epoch(world4: WorkerPool, tmp_path: Path, num_samples: int, repeats: int) -> None:
    data = ListDataset(numbered(num_samples))
    drawn = drawn_by_ranks(world4, str(tmp_path), data, per_device_train_batch_size=2, **EPOCH)
    assert check_epoch(drawn, num_samples, 2) == repeats


@pytest.mark.parametrize(("num_samples", "repeats"), [pytest.param(32, 0, marks=pytest.mark.slow), (35, 13)])
def test_an_epoch_in_fl_hsdp(world8: WorkerPool, tmp_path: Path, num_samples: int, repeats: int) -> None:
    data = ListDataset(numbered(num_samples))
    drawn = drawn_by_ranks(world8, str(tmp_path), data, env=FL_HSDP, per_device_train_batch_size=2, **EPOCH)
    assert check_epoch(drawn, num_samples, 2) == repeats


def test_workers(world4: WorkerPool, tmp_path: Path) -> None:
    drawn = drawn_by_ranks(world4, str(tmp_path), ListDataset(numbered(24)), dataloader_num_workers=1, **EPOCH)
    assert check_epoch(drawn, 24, 1) == 0


@pytest.mark.parametrize("seed_of", ["all", "rank"])
def test_sampler_without_a_seed(world4: WorkerPool, tmp_path: Path, seed_of: str) -> None:
    # The generator is synchronised once at the start and not at the epochs' beginnings, which lie inside rounds.
    drawn = drawn_by_ranks(
        world4,
        str(tmp_path),
        ListDataset(numbered(24)),
        max_steps=-1,
        num_train_epochs=3,
        sync_every=5,
        accelerator_config={"use_seedable_sampler": False},
        reseed=seed_of == "rank",
    )
    epochs = [[numbers[at : at + 6] for numbers in drawn] for at in (0, 6, 12)]
    for epoch in epochs:
        assert check_epoch(epoch, 24, 1) == 0
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("kind", ["torch", "datasets"])
def test_streams_are_sharded_by_rank(world4: WorkerPool, tmp_path: Path, kind: str) -> None:
    samples = numbered(24)
    data = StreamDataset(samples) if kind == "torch" else hf_stream(samples)
    drawn = drawn_by_ranks(world4, str(tmp_path), data, max_steps=6)
    assert check_epoch(drawn, 24, 1) == 0


def test_fewer_files_than_ranks(world4: WorkerPool, tmp_path: Path) -> None:
    drawn = drawn_by_ranks(world4, str(tmp_path), hf_stream(numbered(24), num_shards=3), max_steps=6)
    assert check_epoch(drawn, 24, 1) == 0


def files_of(sizes: list[int]) -> Any:
    """A stream with one file for each size; the samples of all files are numbered through."""
    files = [numbered(size, first=sum(sizes[:place])) for place, size in enumerate(sizes)]
    return IterableDataset.from_generator(rows_of, gen_kwargs={"files": files})


@pytest.mark.parametrize("accumulation", [1, 3])
def test_unequal_files_do_not_hang(world4: WorkerPool, tmp_path: Path, accumulation: int) -> None:
    sizes = [1, 7, 2, 5, 3, 1]
    drawn = drawn_by_ranks(
        world4, str(tmp_path), files_of(sizes), max_steps=8, gradient_accumulation_steps=accumulation
    )
    seen = [set(numbers) for numbers in drawn]
    for rank, numbers in enumerate(seen):
        assert len(drawn[rank]) == 8 * accumulation
        assert all(not numbers & other for place, other in enumerate(seen) if place != rank)
    if accumulation == 3:  # long enough to reach the end of every rank's files
        assert set.union(*seen) == set(range(sum(sizes)))


def fail_to_train(folder: str, data: Any, **changes: Any) -> None:
    forget_meshes()
    tiny_trainer(folder, train_dataset=data, **changes).train()


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (ListDataset(token_samples(24)), {"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
        (StreamDataset(token_samples(24)), {"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        (ListDataset([]), {}, "empty"),
        (ListDataset(token_samples(3)), {"dataloader_drop_last": True}, "fewer than one batch of all ranks"),
        (StreamDataset([]), {}, "empty|no example"),
        ("one empty file", {}, "rank 2 of 4 hold no example"),
        ("no example in any file", {}, "no example"),
        (ListDataset(token_samples(24)), {"accelerator_config": {"use_seedable_sampler": False}}, None),
    ],
    ids=[
        "dispatch",
        "dispatch stream",
        "empty",
        "all dropped",
        "empty stream",
        "empty file",
        "empty files",
        "control",
    ],
)
def test_bad_data(world4: WorkerPool, tmp_path: Path, data: Any, changes: dict[str, Any], words: str | None) -> None:
    if data == "one empty file":
        data = files_of([2, 3, 0, 4])
    elif data == "no example in any file":
        data = files_of([0, 0, 0, 0])
    if words is None:
        world4.run(fail_to_train, str(tmp_path), data, env=FL_FSDP, limit_seconds=LIMIT, max_steps=2, **changes)
        return
    errors = world4.run_failing(
        fail_to_train, str(tmp_path), data, env=FL_FSDP, limit_seconds=LIMIT, max_steps=2, **changes
    )
    for error in errors:
        assert error.type_name == "ValueError"
        assert re.search(words, error.message), error.message
    assert len({error.message for error in errors}) == 1

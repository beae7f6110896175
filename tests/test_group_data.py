"""A dataset for each group: what each rank draws from it, that nobody waits, and that training on it is the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset, Subset

from hf_fedshard import FedAvgCallback, GroupData, closing_rounds, group_dataset, split_by_column
from hf_fedshard.closing import make_row
from hf_fedshard.endless_stream import EndlessStream
from tests.harness.comparison import assert_matches, refer
from tests.harness.data import BatchRecorder, ListDataset, StreamDataset, collate, hf_stream, token_samples
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes, tiny_trainer
from tests.test_checkpoint_resume import assert_resumes
from tests.test_data import EPOCH, drawn_by_ranks, files_of, numbered, one_epoch_each
from tests.test_isolation import FL_FSDP, FL_HSDP, LIMIT
from tests.test_trainer_equivalence import native, run


def parts(*sizes: int, make: Any = ListDataset) -> list[Any]:
    """A dataset for each size; the samples are numbered through."""
    return [make(numbered(size, first=sum(sizes[:place]))) for place, size in enumerate(sizes)]


def by_group(drawn: list[list[int]]) -> list[Counter[int]]:
    half = len(drawn) // 2
    return [Counter(number for numbers in drawn[at : at + half] for number in numbers) for at in (0, half)]


def as_it_is(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("files", [(0, 0, 1, 1), (0, 0, 0, 1)], ids=["two each", "unequal"])
def test_a_column_that_follows_the_files(world4: WorkerPool, tmp_path: Path, files: tuple[int, ...]) -> None:
    """
    Each file of the stream is of one group: a rank that had files of its own could find nothing in them, or little, which
    it would draw again and again.
    """
    samples = [{**sample, "group": files[place // 4]} for place, sample in enumerate(numbered(16))]
    stream = split_by_column(hf_stream(samples, num_shards=4), "group", 2, assignment={0: 0, 1: 1})
    stream = stream.map(as_it_is, remove_columns="group")
    size = files.count(1) * 4
    drawn = drawn_by_ranks(world4, str(tmp_path), stream, max_steps=size // 2)
    groups = by_group(drawn)
    assert groups[1] == dict.fromkeys(range(16 - size, 16), 1)
    assert groups[0] == dict.fromkeys(range(size), 1)


@pytest.mark.parametrize("make", [ListDataset, Dataset.from_list], ids=["torch", "datasets"])
def test_an_epoch(world4: WorkerPool, tmp_path: Path, make: Any) -> None:
    """12 samples and 4: an epoch is one pass over the 12, in which the 4 are drawn three times each."""
    data = group_dataset(parts(12, 4, make=make))
    drawn = drawn_by_ranks(world4, str(tmp_path), data, per_device_train_batch_size=2, **EPOCH)
    assert [len(numbers) for numbers in drawn] == [6] * 4
    groups = by_group(drawn)
    assert groups[0] == dict.fromkeys(range(12), 1)
    assert groups[1] == dict.fromkeys(range(12, 16), 3)


def test_an_epoch_in_fl_hsdp(world8: WorkerPool, tmp_path: Path) -> None:
    data = group_dataset(parts(6, 16))
    drawn = drawn_by_ranks(world8, str(tmp_path), data, env=FL_HSDP, per_device_train_batch_size=2, **EPOCH)
    groups = by_group(drawn)
    assert groups[1] == dict.fromkeys(range(6, 22), 1)
    assert set(groups[0]) == set(range(6))
    assert sorted(groups[0].values()) == [2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("kind", ["torch", pytest.param("one file", marks=pytest.mark.slow), "files"])
@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_streams_of_unequal_length(size: int, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    if kind == "files":
        # More files than ranks of a group, fewer than ranks of the world.
        streams = [files_of([3, 2, 1, 2, 1][: size // 2 + 1]), StreamDataset(numbered(4, first=20))]
    else:
        streams = parts(9, 4, make=StreamDataset if kind == "torch" else hf_stream)
    env = FL_FSDP if size == 4 else FL_HSDP
    drawn = drawn_by_ranks(pool, str(tmp_path), group_dataset(streams), env=env, max_steps=6)
    assert [len(numbers) for numbers in drawn] == [6] * size
    groups = by_group(drawn)
    assert not set(groups[0]) & set(groups[1])
    if kind == "files":
        own = [set(numbers) for numbers in drawn[: size // 2]]
        assert sum(map(len, own)) == len(set.union(*own)), "each rank reads files of its own"
        assert set(groups[1]) == set(range(20, 24))
    else:
        # Taking turns, without end: 6 draws for each rank of the group.
        expected = [Counter(first + draw % length for draw in range(3 * size)) for first, length in ((0, 9), (9, 4))]
        assert groups == expected


class ReadOnce(IterableDataset[Any]):
    """A connection, say: what was read is gone."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = iter(samples)

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


def read_once(group: int) -> ReadOnce:
    return ReadOnce(numbered(14, first=14 * group))


def test_a_stream_that_is_read_once(world4: WorkerPool, tmp_path: Path) -> None:
    """Looking whether there is a sample must not lose it. Accelerate reads a batch of each rank ahead: 14 samples for 12."""
    data = group_dataset(read_once, 2, streaming=True)
    drawn = drawn_by_ranks(world4, str(tmp_path), data, max_steps=6)
    assert by_group(drawn) == [dict.fromkeys(range(12), 1), dict.fromkeys(range(14, 26), 1)]


def only_own(group: int) -> Any:
    """What a site holds: nothing of the others."""
    if group != dist.get_rank() // 2:
        raise FileNotFoundError(f"the data of group {group} is not here")
    return ListDataset(numbered(8 if group else 12, first=12 * group))


def test_a_function_of_the_group(world4: WorkerPool, tmp_path: Path) -> None:
    drawn = drawn_by_ranks(world4, str(tmp_path), group_dataset(only_own, 2), max_steps=6)
    groups = by_group(drawn)
    assert set(groups[0]) == set(range(12))
    assert set(groups[1]) == set(range(12, 20))
    with pytest.raises(ValueError, match="without federation groups there is nothing to train on"):
        group_dataset(lambda group: [1], 2)[0]


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_training_is_the_reference(size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    data = group_dataset([ListDataset(token_samples(150)), ListDataset(token_samples(40, seed=1))])
    ranks = run(pool, tmp_path, kind="double", native=True, max_steps=7, data=data)
    assert_matches(ranks, refer(ranks, "double", loss=native), "double", 1e-12)
    own = [{tuple(row) for batch in rank["batches"] for row in batch["input_ids"].tolist()} for rank in ranks]
    assert not set.union(*own[: size // 2]) & set.union(*own[size // 2 :])


def test_without_groups_it_is_the_union(world4: WorkerPool, tmp_path: Path) -> None:
    results = world4.run(
        one_epoch_each,
        str(tmp_path),
        group_dataset(parts(12, 4)),
        num_groups=1,
        env=FL_FSDP,
        limit_seconds=LIMIT,
        **EPOCH,
    )
    assert Counter(number for drawn, _ in results for batch in drawn for number in batch) == dict.fromkeys(
        range(16), 1
    )


def data_to_resume(kind: str) -> GroupData:
    samples = [token_samples(12), token_samples(5, seed=1)]
    make = {"map": ListDataset, "stream": hf_stream, "table": Dataset.from_list}[kind]
    return group_dataset([make(part) for part in samples])


@pytest.mark.parametrize(
    ("kind", "step"),
    [("map", 4), pytest.param("table", 8, marks=pytest.mark.slow), pytest.param("stream", 4, marks=pytest.mark.slow)],
)
def test_resumed_is_uninterrupted(world4: WorkerPool, tmp_path: Path, kind: str, step: int) -> None:
    """From the first epoch of 6 steps, the second one, and a stream that has begun again in one group."""
    assert_resumes(world4, tmp_path, step=step, data=data_to_resume(kind))


@pytest.mark.slow
def test_resumed_in_fl_hsdp(world8: WorkerPool, tmp_path: Path) -> None:
    assert_resumes(world8, tmp_path, step=8, num_groups=2, data=data_to_resume("map"))


def num_samples(folder: str, data: Any, **changes: Any) -> float:
    """What Trainer takes for the number of samples of the training."""
    forget_meshes()
    metrics = tiny_trainer(folder, train_dataset=data, per_device_train_batch_size=2, **changes).train().metrics
    return float(metrics["train_samples_per_second"] * metrics["train_runtime"])


@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_trainer_counts_all_groups(world4: WorkerPool, tmp_path: Path, own: bool) -> None:
    data = group_dataset(parts(12, 4)) if own else ListDataset(numbered(16))
    found = world4.run(num_samples, str(tmp_path), data, env=FL_FSDP, limit_seconds=LIMIT, **EPOCH)
    assert found == [pytest.approx(24 if own else 16, rel=0.02)] * 4


def counted(folder: str, data: Any) -> tuple[list[tuple[float, float]], list[float]]:
    """Samples and tokens of this rank in each round; and what group 1 counted in their averages, where that differs."""
    forget_meshes()
    found = []

    def row(*args: Any) -> dict[str, float]:
        values = make_row(*args)
        found.append((values["samples"], values["all_tokens"]))
        return values

    with mock.patch.object(closing_rounds, "make_row", row):
        callback = FedAvgCallback(num_groups=2, sync_every=3, group_weights="samples")
        options = {"train_dataset": data, "per_device_train_batch_size": 2, "max_steps": 6}
        trainer = tiny_trainer(folder, federated=False, before=(callback,), **options)
        trainer.train()
    key = "fedshard/weight/group_1"
    return found, [row[key] for row in trainer.state.log_history if key in row]


def test_counts_are_true(world4: WorkerPool, tmp_path: Path) -> None:
    """A sample that is drawn three times in an epoch counts as one of the epoch: over it the sum is the group's size."""
    ranks = world4.run(counted, str(tmp_path), group_dataset(parts(24, 8)), env=FL_FSDP, limit_seconds=LIMIT)
    for rank, samples in zip(ranks, (6, 6, 2, 2), strict=True):
        assert rank == ([pytest.approx((samples, 72))] * 2, [0.3333, 0.3333])
    ranks = world4.run(counted, str(tmp_path), None, env=FL_FSDP, limit_seconds=LIMIT)
    assert ranks == [([(6, 72)] * 2, [])] * 4


def loop(kind: str, through_plugin: bool = True, wrapped: bool = False) -> list[int]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from hf_fedshard import FederatedFSDPPlugin

    plugin = FederatedFSDPPlugin(num_groups=2, sync_every=2)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=plugin.parallelism_config,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
    )
    model = tiny_llama()
    recorder = BatchRecorder(model, keys=("input_ids",))
    make = {"map": ListDataset, "table": Dataset.from_list, "stream": StreamDataset}[kind]
    data = group_dataset(parts(12, 4, make=make))
    dataset = plugin.group_data(data) if through_plugin else data
    if wrapped:
        dataset = Subset(dataset, range(4))
    loader = DataLoader(dataset, batch_size=1, shuffle=kind != "stream", collate_fn=collate)
    import torch

    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    fedavg = plugin.federate(accelerator, model, optimizer)
    for step, batch in enumerate(loader):
        if step == 6:
            break
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        fedavg.step()
    fedavg.finish()
    return [int((row[0] - 3) * 90 + row[1] - 3) for batch in recorder.batches for row in batch["input_ids"]]


@pytest.mark.parametrize(
    "kind", ["map", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("table", "stream"))]
)
def test_in_a_loop(world4: WorkerPool, kind: str) -> None:
    drawn = world4.run(loop, kind, env=FL_FSDP, init_group=False, limit_seconds=LIMIT)
    groups = by_group(drawn)
    assert groups[0] == dict.fromkeys(range(12), 1)
    assert groups[1] == dict.fromkeys(range(12, 16), 3)


@pytest.mark.slow
def test_in_a_loop_of_fl_hsdp(world8: WorkerPool) -> None:
    drawn = world8.run(loop, "stream", env=FL_HSDP, init_group=False, limit_seconds=LIMIT)
    assert by_group(drawn) == [dict.fromkeys(range(12), 2), dict.fromkeys(range(12, 16), 6)]


def test_a_loop_that_forgets_the_plugin(world4: WorkerPool) -> None:
    errors = world4.run_failing(loop, "map", False, env=FL_FSDP, init_group=False, limit_seconds=LIMIT)
    assert all("plugin.group_data(data)" in error.message for error in errors)


def test_a_loop_that_wraps_the_data(world4: WorkerPool) -> None:
    """The ranks of all groups would share it, without a word."""
    errors = world4.run_failing(loop, "map", True, True, env=FL_FSDP, init_group=False, limit_seconds=LIMIT)
    for error in errors:
        assert error.type_name == "ValueError"
        assert "plugin.group_data(data.map(tokenize))" in error.message


def train_on(folder: str, data: Any, **changes: Any) -> None:
    forget_meshes()
    tiny_trainer(folder, train_dataset=data, **changes).train()


def other_lengths(group: int) -> Any:
    return ListDataset(token_samples(4 + dist.get_rank()))


def broken(group: int) -> Any:
    if group == 1:
        raise OSError("disk on fire")
    return ListDataset(token_samples(8))


def nothing(group: int) -> Any:
    return ListDataset(token_samples(8 * (1 - group)))


def half_empty() -> Any:
    """A filtered stream: its second file holds nothing."""
    samples = [{**sample, "kept": place < 2} for place, sample in enumerate(numbered(4))]
    return hf_stream(samples, num_shards=2).filter(_is_kept)


def _is_kept(sample: dict[str, Any]) -> bool:
    return bool(sample["kept"])


def a_stream(group: int) -> Any:
    return StreamDataset(token_samples(8))


WRONG = {
    "number": (
        lambda: group_dataset(parts(4, 4, 4)),
        {},
        "holds data for 3 groups, but the federation has num_groups=2",
    ),
    "lengths": (lambda: group_dataset(other_lengths, 2), {}, "hold datasets of different lengths"),
    "fault": (lambda: group_dataset(broken, 2), {}, "disk on fire"),
    "empty": (lambda: group_dataset(nothing, 2), {}, "group 1 is empty"),
    "kind": (lambda: group_dataset(a_stream, 2), {}, "streaming=..."),
    "function without groups": (
        lambda: group_dataset(only_own, 2),
        {"num_groups": 1},
        "without federation groups there is nothing to train on",
    ),
    "empty files": (
        lambda: group_dataset([half_empty(), half_empty()]),
        {},
        "those of this one hold no sample",
    ),
    "empty stream": (lambda: group_dataset(parts(4, 0, make=StreamDataset)), {}, "group 1 is empty"),
    "split": (
        lambda: group_dataset(parts(8, 8)),
        {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4},
        "split_batches",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_on_ranks(world4: WorkerPool, tmp_path: Path, case: str) -> None:
    make, changes, words = WRONG[case]
    errors = world4.run_failing(
        train_on, str(tmp_path), make(), env=FL_FSDP, limit_seconds=LIMIT, max_steps=2, **changes
    )
    for error in errors:
        assert error.type_name == "ValueError"
        assert words in error.message, error.message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: group_dataset([]), "0 datasets were given"),
        (lambda: group_dataset(parts(2, 2), 3), "2 datasets were given for num_groups=3"),
        (lambda: group_dataset([ListDataset([]), ListDataset([1])]), "group 0 is empty"),
        (lambda: group_dataset([StreamDataset([]), ListDataset([1])]), "some are not"),
        (lambda: group_dataset(only_own), "num_groups must be given"),
        (lambda: group_dataset(parts(2, 2)).map(str), "group 0 is a ListDataset, which has no `map`"),
        (lambda: group_dataset(read_once, 2, True).map(str).of_group(1), "group 1 is a ReadOnce, which has no `map`"),
    ],
)
def test_wrong_use(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_stream_that_cannot_be_read_again() -> None:
    once = iter([1, 2])
    stream = iter(EndlessStream(once))
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(RuntimeError, match="cannot be read a second time"):
        next(stream)


def test_more_workers_than_files() -> None:
    """Those without a file have nothing to read; the others read theirs again and again."""
    stream = EndlessStream(hf_stream(numbered(4), num_shards=2))
    samples = islice(DataLoader(stream, batch_size=None, num_workers=3), 12)
    drawn = [int(sample["input_ids"][1]) - 3 for sample in samples]
    assert Counter(drawn) == dict.fromkeys(range(4), 3)

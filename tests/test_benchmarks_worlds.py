"""The benchmark in worlds of processes: seeds, evaluations beside a run, and whole runs of a tiny workload."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.contenders import Contender, make_contender
from benchmarks.launcher import make_env, run_side_by_side
from benchmarks.records import Records
from benchmarks.results import Results
from benchmarks.saving import NUM_SAVES
from benchmarks.variants import CEILING, Variant
from benchmarks.workload import Batches, Blocks, make_model
from benchmarks.world import World
from hf_fedshard.shards import local_shards
from tests.harness.benchmark_records import TINY
from tests.harness.pool import WorkerPool


def seeded_batches() -> tuple[list[Any], list[Any]]:
    """Body: first batches and weights of three seeds, the middle one twice."""
    train = torch.arange(64, dtype=torch.int32).view(32, 2)
    small = replace(TINY, block_size=2, seed=5)
    world = World(small, Blocks(train, train[:4]), None, ("127.0.0.1",) * 2)
    worlds = [world.with_seed(seed) for seed in (5, 6, 6, 7)]
    assert worlds[0] is world and all(other.federation is world.federation for other in worlds)
    batches = [Batches(other.blocks.train, other.workload, 0, 1).next().tolist() for other in worlds]
    return batches, [next(make_model(other.workload).parameters()).sum().item() for other in worlds]


def test_a_seed_is_weights_and_order(world4: WorkerPool) -> None:
    for found in world4.run(seeded_batches):
        for first, second, again, third in found:
            assert second == again
            assert first != second != third != first


BESIDE = {
    "blocking": {"sync_every": 4},
    "delayed": {"sync_every": 4, "overlap_steps": 2},
    "fragments": {"sync_every": 4, "overlap_steps": 4, "num_fragments": 2, "outer_optimizer": "nesterov"},
}


@torch.no_grad()
def loss_of_mean(contender: Contender, world: World) -> float:
    """Without FSDP: the groups' whole models, their mean, one process."""
    mean = make_model(world.workload)
    for name, param in mean.named_parameters():
        own = contender.model.get_parameter(name)
        assert isinstance(own, DTensor)
        whole = own.full_tensor()
        parts = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(parts, whole, group=world.federation.fed)
        param.copy_((parts[0] + parts[1]) / 2)
    rows = world.blocks.evaluation.long()
    return mean(input_ids=rows, labels=rows).loss.item()


def evaluate_on_the_way(settings: dict[str, Any]) -> tuple[list[tuple[float, float]], list[Any]]:
    """Body: the same run watched after every step and not; the losses, and what each run came to."""
    made = torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(512, (size, 32), dtype=torch.int32, generator=made) for size in (64, 16))
    world = World(TINY, Blocks(train, held_out), None, ("127.0.0.1",) * 2)
    losses, ends = [], []
    for watched in (True, False):
        contender = make_contender(Variant("x", "x", "ours", {}, settings), world)
        for step in range(11):
            contender.step()
            if watched:
                loss = contender.evaluate()
                if step in (4, 6, 9):  # inside a round, with something in flight and without
                    losses.append((loss, loss_of_mean(contender, world)))
        ends.append((local_shards(contender.model), contender.num_averagings))
        contender.close()
    return losses, [(num, {name: shard.clone() for name, shard in shards.items()}) for shards, num in ends]


@pytest.mark.parametrize("name", BESIDE)
def test_an_evaluation_leaves_the_run_alone(world4: WorkerPool, name: str) -> None:
    for losses, ((num_watched, watched), (num_alone, alone)) in world4.run(evaluate_on_the_way, BESIDE[name]):
        # The last fragment of round 2 is still on its way.
        assert num_watched == num_alone == (1 if name == "fragments" else 2)
        assert all(torch.equal(watched[param], shard) for param, shard in alone.items())
        assert all(loss == pytest.approx(expected, rel=1e-5) for loss, expected in losses)
        assert len({loss for loss, _ in losses}) == 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The blocks of the tiny workload, which several runs share."""
    folder = tmp_path_factory.mktemp("corpus")
    Records(folder).check_workload(TINY)
    run_side_by_side([([sys.executable, "-m", "benchmarks.prepare", str(folder)], {})], folder / "log")
    return folder


def run_benchmark(corpus: Path, folder: Path, *words: str) -> str:
    if not (folder / "blocks.pt").exists():
        shutil.copy(corpus / "blocks.pt", folder)
    sizes = [text for name, value in asdict(TINY).items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.two_tier", "--output_dir", str(folder), "--eval_every", "4", *sizes]
    done = subprocess.run([*command, *words], env=make_env(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_plain_run_and_resume(corpus: Path, tmp_path: Path) -> None:
    words = ["--plain", "--shapes", "2x2", "--rounds", "2", "--learning_steps", "4"]
    words += ["--variants", "fsdp", "hsdp", "ddp", "local_sgd", "fp32", "--parts", "turns", "learning", "report"]
    run_benchmark(corpus, tmp_path, *words)
    content = json.loads((tmp_path / "results.json").read_text())
    (block,) = content["blocks"]
    rows = {row["variant"]: row for row in block["rows"]}
    assert set(rows) == {CEILING, "ddp", "fsdp", "hsdp", "local_sgd", "fp32"}
    assert all(row["tokens_per_second"]["count"] >= 2 for row in rows.values())
    assert content["failures"] == {}
    curves = {curve["variant"]: curve for curve in content["curves"]}
    assert curves["fsdp"]["steps"] == [0, 4] and curves["fp32"]["steps"] == [0, 4, 8]
    # The same first weights, hence the same loss.
    assert curves["fsdp"]["losses"][0] == pytest.approx(curves["fp32"]["losses"][0], rel=1e-5)
    assert curves["fp32"]["losses"][-1] < curves["fp32"]["losses"][0]
    before = (tmp_path / "turns.jsonl").read_text()
    assert "measured already" in run_benchmark(corpus, tmp_path, *words)
    assert (tmp_path / "turns.jsonl").read_text() == before


@pytest.mark.slow
def test_memory_own_time_and_saving(corpus: Path, tmp_path: Path) -> None:
    words = ["--plain", "--shapes", "2x2", "--variants", "fp32"]
    run_benchmark(corpus, tmp_path, *words, "--parts", "memory", "own_time", "saving")
    records = Records(tmp_path)
    memory = {record["variant"]: record["peak_bytes"] for record in records.read("memory")}
    assert set(memory) == {CEILING, "fp32"}
    assert all(0 < peak < 2**30 for peak in memory.values())
    ways = {record["way"]: record["shares"] for record in records.read("own_time")}
    assert set(ways) == {"Trainer", "loop"}
    assert all(0 < share < 1 for shares in ways.values() for share in shares)
    (saving,) = records.read("saving")
    assert len(saving["ours"]) == len(saving["stock"]) == NUM_SAVES
    # Two groups' moments beside the weights against one group's; of so small a model names and descriptions are a part.
    assert 1.2 < saving["ours"][0][1] / saving["stock"][0][1] < 2.0


@pytest.mark.netns
@pytest.mark.slow
def test_run_on_the_link(netns: None, corpus: Path, tmp_path: Path) -> None:
    """What one averaging sends is what theory asks for; a ceiling sends nothing."""
    words = ["--shapes", "2x2", "--rates", "200", "--rounds", "2", "--variants", "fp32"]
    run_benchmark(corpus, tmp_path, *words, "--parts", "turns", "report")
    results = Results(tmp_path)
    sent = results.link_bytes("2x2", 200, "fp32")
    assert sent is not None
    # The metrics of a border, headers and acknowledgements weigh more on a small model.
    assert 1.0 <= sent / results.bound_bytes < 1.3
    assert (results.link_bytes("2x2", 200, CEILING) or 0) < 0.2 * sent

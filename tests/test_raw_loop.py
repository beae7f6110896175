"""The plain Accelerate loop with `FederatedFSDPPlugin`, against the reference."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.harness.comparison import largest
from tests.harness.data import Batch, ListDataset, batches_by_step, collate, token_samples
from tests.harness.delayed import Delayed
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import full_state, tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.reference import train_reference
from tests.test_wrong_use_loop import Loop


SYNC_EVERY = 2
ACCUMULATION = 2
MAX_GRAD_NORM = 0.2


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def raw_loop(
    num_epochs: int,
    num_batches: int,
    seedable: bool = False,
    federated: bool = True,
    num_training_steps: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

    from hf_fedshard import FederatedFSDPPlugin, cpu

    if federated:
        plugin: Any = FederatedFSDPPlugin(sync_every=SYNC_EVERY, bucket_size_bytes=4096, **options)
    else:
        cpu.install()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=plugin.parallelism_config if federated else None,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    # Nobody promises equal seeds: neither for the weights nor for the order of the samples.
    torch.manual_seed(100 + rank)
    model = tiny_llama(seed=rank)
    samples = token_samples(2 * num_batches * world, seed=5)
    loader = DataLoader(ListDataset(samples), batch_size=2, shuffle=True, collate_fn=collate)
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    fedavg = None
    if federated:
        fedavg = plugin.federate(accelerator, model, optimizer, num_training_steps=num_training_steps)
    found: dict[str, Any] = {"start": full_state(model), "epochs": [], "rates": [], "rounds": [], "norms": []}
    for _ in range(num_epochs):
        batches = []
        for batch in loader:
            batches.append({key: value.clone() for key, value in batch.items()})
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                    found["norms"].append(float(getattr(norm, "full_tensor", lambda n=norm: n)()))
                    found["rates"].append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if fedavg and accelerator.sync_gradients and (metrics := fedavg.step(loss)):
                found["rounds"].append(metrics.steps)
        found["epochs"].append(batches)
    if fedavg and (metrics := fedavg.finish()):
        found["rounds"].append(metrics.steps)
    return {**found, "state": full_state(model)}


def run(pool: WorkerPool, *args: Any, dp_replicate: int | None = None, **options: Any) -> list[dict[str, Any]]:
    env = fsdp_launch_env(dp_replicate or pool.world_size // 2, 2)
    return pool.run(raw_loop, *args, env=env, init_group=False, limit_seconds=120, **options)


def refer(ranks: list[dict[str, Any]], num_groups: int = 2, sync_every: Any = SYNC_EVERY, **changes: Any) -> Any:
    group_size = len(ranks) // num_groups

    def initial() -> nn.Module:
        model = tiny_llama(seed=1)
        model.load_state_dict(ranks[0]["start"], strict=False)
        return model

    def loss(model: nn.Module, batch: Batch, num_items: int) -> torch.Tensor:
        # Accelerate divides by the accumulation steps, also in a window that the end of the data cuts short.
        return model(**batch).loss / (ACCUMULATION * group_size)

    recorded = [[batch for epoch in rank["epochs"] for batch in epoch] for rank in ranks]
    return train_reference(
        initial,
        batches_by_step(recorded, num_groups, ACCUMULATION),
        sync_every,
        adamw,
        learning_rate=lambda step: ranks[0]["rates"][step],
        max_grad_norm=MAX_GRAD_NORM,
        loss=loss,
        **changes,
    )


def assert_matches(ranks: list[dict[str, Any]], result: Any) -> None:
    for rank in ranks:
        assert all(torch.equal(tensor, ranks[0]["start"][name]) for name, tensor in rank["start"].items())
        assert all(torch.equal(tensor, ranks[0]["state"][name]) for name, tensor in rank["state"].items())
        assert rank["rates"] == ranks[0]["rates"]
    assert ranks[0]["rates"][0] > 1.01 * ranks[0]["rates"][-1], "the scheduler must have run"
    norms = [[rank["norms"][step] for rank in ranks[:: len(ranks) // 2]] for step in range(len(result.grad_norms))]
    for seen, expected in zip(norms, result.grad_norms, strict=True):
        assert seen == pytest.approx(expected, rel=1e-4)
        assert min(expected) > MAX_GRAD_NORM
    error, moved = largest(ranks[0]["state"], result.state), largest(ranks[0]["start"], result.state)
    print(f"largest difference {error:.2e}, the weights have moved by {moved:.2e}")
    assert error < 2e-5
    assert moved > 5e-3


def test_averaging_beside_the_steps(world4: WorkerPool) -> None:
    ranks = run(world4, 2, 6, overlap_steps=1)
    num_steps = len(ranks[0]["rates"])
    delayed = Delayed(SYNC_EVERY, 1, borders=(num_steps,))
    assert_matches(ranks, refer(ranks, sync_every=(num_steps,), after_step=delayed))
    assert len(delayed.landed) >= 2
    assert sum(ranks[0]["rounds"]) == num_steps


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_is_the_reference(size: int, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{size}")
    # Three steps in an epoch and rounds of two: a round spans the border of the epochs.
    ranks = run(pool, 2, 6, num_groups=2)
    result = refer(ranks)
    assert ranks[0]["rounds"] == [2, 2, 2]
    assert result.borders == [2, 4, 6]
    assert_matches(ranks, result)
    for epoch in range(2):
        drawn = [row for rank in ranks for row in rows(rank["epochs"][epoch])]
        assert len(drawn) == len(set(drawn)) == 2 * 6 * size, "each sample once, by one rank"
    assert rows(ranks[0]["epochs"][0]) != rows(ranks[0]["epochs"][1]), "it must shuffle"


def test_short_windows_and_rounds(world4: WorkerPool) -> None:
    ranks = run(world4, 1, 5)  # the groups of the launch; windows of 2, 2, 1; rounds of 2, 1
    assert ranks[0]["rounds"] == [2, 1]
    assert_matches(ranks, refer(ranks))


def seeds_of_samplers() -> list[dict[str, Any]] | str:
    from hf_fedshard import FederationMismatchError

    try:
        return raw_loop(1, 4, seedable=True)["epochs"]
    except FederationMismatchError as error:
        return str(error)


def test_seedable_sampler_with_unequal_seeds(world4: WorkerPool) -> None:
    """Its order comes from each rank's own seed: either that is put right, or it is refused."""
    found = world4.run(seeds_of_samplers, env=fsdp_launch_env(2, 2), init_group=False)
    if isinstance(found[0], str):
        assert all("seed" in message for message in found)
        return
    drawn = [row for epochs in found for row in rows(epochs[0])]
    assert len(drawn) == len(set(drawn))


def test_one_group_is_plain_fsdp2(world4: WorkerPool) -> None:
    """One group of 2 replicas of 2 shards, against Accelerate's own plugin: bit for bit."""
    federated, plain = run(world4, 1, 4, num_groups=1), run(world4, 1, 4, federated=False)
    for ours, stock in zip(federated, plain, strict=True):
        assert rows(ours["epochs"][0]) == rows(stock["epochs"][0])
        assert all(torch.equal(tensor, stock["state"][name]) for name, tensor in ours["state"].items())
    assert federated[0]["rounds"] == [2]
    assert largest(plain[0]["start"], plain[0]["state"]) > 2e-3


PAUSE, STEP = 2.0, 0.3


def paused_at_a_border() -> tuple[list[float], list[float], bool]:
    """Two rounds, with an evaluation between them that takes its time, and so do the micro-batches of a step."""
    from accelerate import Accelerator

    from hf_fedshard import FederatedFSDPPlugin

    plugin = FederatedFSDPPlugin(sync_every=2)
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, parallelism_config=plugin.parallelism_config, gradient_accumulation_steps=2
    )
    model = tiny_llama()
    samples = token_samples(8 * dist.get_world_size(), seed=5)
    loader = DataLoader(ListDataset(samples), batch_size=1, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), loader)
    before = accelerator.backward
    fedavg = plugin.federate(accelerator, model, optimizer)
    seconds, began, lasted = [], time.perf_counter(), []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if number == 4:  # the first micro-batch of the second round
                time.sleep(STEP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and (metrics := fedavg.step(loss)):
            seconds.append(metrics.seconds)
            lasted.append(time.perf_counter() - began)
            time.sleep(PAUSE if len(seconds) == 1 else 0)
            began = time.perf_counter()
    fedavg.finish()
    return seconds, lasted, accelerator.backward == before


def test_what_is_done_at_a_border_is_no_part_of_a_round(world4: WorkerPool) -> None:
    """Or the time of a step, by which sync_every="auto" chooses, would hold the evaluations."""
    ranks = world4.run(paused_at_a_border, env=fsdp_launch_env(2, 2), init_group=False)
    longest = max(lasted[1] for _, lasted, _ in ranks)
    for seconds, _, is_put_back in ranks:
        assert len(seconds) == 2 and is_put_back
        # Without the pause, however long a busy machine takes for the rest.
        assert STEP <= seconds[1] <= longest


def waited(folder: str) -> bool:
    """Rank 0 writes at a border, while the model is in training mode; inside a round group 0 waits for group 1 by a file alone."""
    loop, rank = Loop(), dist.get_rank()
    written, passed = Path(folder, "written"), Path(folder, "passed")
    if rank == 0:
        time.sleep(0.5)
        written.touch()
    loop.accelerator.wait_for_everyone()
    is_there = written.exists()
    loop.step()
    while rank == 0 and not passed.exists():
        time.sleep(0.01)
    loop.accelerator.wait_for_everyone()
    if rank == 2:
        passed.touch()
    loop.rounds.finish()
    return is_there


def test_waiting_is_for_all_at_a_border_and_for_the_group_in_a_round(world4: WorkerPool, tmp_path: Path) -> None:
    assert (
        world4.run(waited, str(tmp_path), env=fsdp_launch_env(2, 2), init_group=False, limit_seconds=60) == [True] * 4
    )


def waited_after_a_skipped_step() -> list[int]:
    """In the first step of each round a gradient scaler, say, skips the step of group 0 alone; then everyone waits."""
    loop, borders = Loop(), []
    for number in range(4):
        loop.accelerator.backward(loop.model(**collate(token_samples(1))).loss)
        if number % 2 or dist.get_rank() >= 2:
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.accelerator.wait_for_everyone()
        if loop.rounds.step() is not None:
            borders.append(number)
    return borders


def test_waiting_in_a_step_that_one_group_skips_is_for_the_group(world4: WorkerPool) -> None:
    env = fsdp_launch_env(2, 2)
    assert world4.run(waited_after_a_skipped_step, env=env, init_group=False, limit_seconds=60) == [[1, 3]] * 4


def rounds_of_one_number() -> list[tuple[float, float]]:
    """A round is begun, and begins again under the same number, after a pause: of a model put back, and of a border."""
    loop = Loop()
    found = []
    for again in (lambda: loop.rounds.restore({"round": 0, "steps": 0}), loop.rounds.close):
        loop.accelerator.backward(loop.model(**collate(token_samples(1))).loss)
        again()
        time.sleep(0.1)
        began = time.perf_counter()
        loop.step()
        metrics = loop.step()
        found.append((metrics.seconds, time.perf_counter() - began))
    loop.rounds.finish()
    return found


def test_the_clock_of_a_round_that_begins_again(world4: WorkerPool) -> None:
    for rank in world4.run(rounds_of_one_number, env=fsdp_launch_env(2, 2), init_group=False):
        for seconds, lasted in rank:
            assert seconds <= lasted

"""`save_state` and `load_state` in an Accelerate loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_fedshard import FederatedFSDPPlugin, export_checkpoint
from hf_fedshard.manifest import find_damage
from hf_fedshard.shards import reshard
from tests.harness.checkpoint_runs import checkpoints, differences, make_model
from tests.harness.data import BatchRecorder, ListDataset, collate, token_samples
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes


LIMIT = 120.0
STEPS = 9


class Counter:
    """An object that a loop registers."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Loop:
    """A loop over two epochs of 6 steps with all that can be saved."""

    def __init__(
        self,
        folder: str,
        num_groups: int = 2,
        seed: int = 0,
        kind: str = "llama",
        sync_every: int | str = 2,
        **options: Any,
    ) -> None:
        forget_meshes()
        self.plugin = FederatedFSDPPlugin(num_groups=num_groups, sync_every=sync_every, **options)
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = Accelerator(
            fsdp_plugin=self.plugin,
            parallelism_config=self.plugin.parallelism_config,
            project_config=project,
            cpu=True,
        )
        model = make_model(kind, seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(
            ListDataset(token_samples(6 * self.accelerator.num_processes)), 1, shuffle=True, collate_fn=collate
        )
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.fedavg = self.plugin.federate(self.accelerator, self.model, num_training_steps=STEPS)
        self.recorder = BatchRecorder(self.model)

    def train(self, until: int, save_at: tuple[int, ...] = ()) -> None:
        while self.counter.count < until:
            epoch, done = divmod(self.counter.count, 6)
            self.loader.set_epoch(epoch)
            for batch in self.accelerator.skip_first_batches(self.loader, done) if done else self.loader:
                self.accelerator.backward(self.model(**batch).loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.counter.count += 1
                self.fedavg.step()
                if self.counter.count in save_at:
                    self.accelerator.save_state()
                if self.counter.count == until:
                    break

    def state(self) -> dict[str, Any]:
        reshard(self.model)
        names = {id(param): name for name, param in self.model.named_parameters()}
        inner = self.optimizer.optimizer
        return {
            "model": {name: value.full_tensor() for name, value in self.model.state_dict().items()},
            "optimizer": {
                names[id(param)]: {
                    key: value.full_tensor() if hasattr(value, "full_tensor") else value
                    for key, value in state.items()
                }
                for param, state in inner.state.items()
            },
            "rates": [group["lr"] for group in inner.param_groups],
            "count": self.counter.count,
            "schedule": str(self.schedule.state_dict()),
            "round": self.fedavg.round,
            "batches": self.recorder.batches,
        }


def through(folder: str, save_at: tuple[int, ...], until: int = STEPS, **options: Any) -> dict[str, Any]:
    loop = Loop(folder, **options)
    loop.train(until, save_at)
    loop.fedavg.finish()
    state = loop.state()
    dist.barrier()
    return state


def resumed(folder: str, name: str | None, until: int | None = STEPS, **options: Any) -> dict[str, Any]:
    loop = Loop(folder, seed=3, **options)
    loop.accelerator.load_state(name)
    if until is not None:
        loop.train(until)
        loop.fedavg.finish()
    state = loop.state()
    dist.barrier()
    return state


def run(pool: WorkerPool, body: Any, folder: Path, *args: Any, env: Any = None, **options: Any) -> list[Any]:
    env = env or fsdp_launch_env(pool.world_size // 2, 2)
    return pool.run(body, str(folder), *args, env=env, init_group=False, limit_seconds=LIMIT, **options)


@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_resume_is_exact(size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue(f"world{size}")
    samples = {"until": 5} if size == 8 else {}
    whole = run(pool, through, tmp_path, (4,), **samples)
    again = run(pool, resumed, tmp_path, None, **samples)
    for before, after in zip(whole, again, strict=True):
        drawn = len(after["batches"])
        assert drawn == (5 if size == 4 else 1)
        assert not differences(before.pop("batches")[-drawn:], after.pop("batches"))
        assert not differences(before, after)
    groups = {str(rank["optimizer"]) for rank in whole}
    assert len(groups) == 2
    checkpoint = tmp_path / "checkpoints" / "checkpoint_0"
    assert find_damage(checkpoint) == [] and not list(checkpoint.rglob("*.pkl"))
    exported = AutoModelForCausalLM.from_pretrained(export_checkpoint(checkpoint, tmp_path / "out"))
    loaded = run(pool, resumed, tmp_path, str(checkpoint), until=None)
    assert not differences(exported.state_dict(), loaded[0]["model"])


def evaluated(folder: str, **options: Any) -> Any:
    """Evaluated and saved at one border: a forward without backward leaves FSDP2's last modules gathered."""
    loop = Loop(folder, **options)
    loop.train(4)
    if not loop.fedavg.at_border:
        loop.fedavg.close()
    loop.model.eval()
    with torch.no_grad():
        for batch in loop.loader:
            loop.model(**batch)
    loop.model.train()
    loop.accelerator.save_state()
    return loop.state()["model"]


@pytest.mark.parametrize(
    "options",
    [
        {"outer_optimizer": "nesterov", "wire_format": "int8"},
        pytest.param({"outer_optimizer": "nesterov"}, marks=pytest.mark.slow),
        pytest.param({"wire_format": "int8", "overlap_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"proximal_mu": 0.1, "local_parameters": "*.norm.*"}, marks=pytest.mark.slow),
        pytest.param(
            {"overlap_steps": 2, "num_fragments": 2, "outer_optimizer": "fedadam", "wire_format": "int4"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_saved_right_after_an_evaluation(world4: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    saved = run(world4, evaluated, tmp_path, **options)
    loaded = run(world4, resumed, tmp_path, None, until=None, **options)
    for before, after in zip(saved, loaded, strict=True):
        assert not differences(before, after["model"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sync_steps_at_start": 5}, marks=pytest.mark.slow),
        {"sync_steps_at_end": 5},
        pytest.param({"sync_every": "1x1,3x1,2x1,3", "sync_steps_at_end": 1}, marks=pytest.mark.slow),
        pytest.param({"sync_every": "drift", "max_drift": 0.02, "max_sync_every": 4}, marks=pytest.mark.slow),
    ],
    ids=["synchronous start", "synchronous end", "list", "drift"],
)
def test_resume_on_course(world4: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """The place in the run is restored: the period, and whether the next steps are synchronous."""
    whole = run(world4, through, tmp_path, (4,), **options)
    again = run(world4, resumed, tmp_path, None, **options)
    for before, after in zip(whole, again, strict=True):
        assert not differences(before.pop("batches")[-5:], after.pop("batches"))
        assert not differences(before, after)


def test_limit_and_damage(world4: WorkerPool, tmp_path: Path) -> None:
    run(world4, through, tmp_path, (2, 4, 6))
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    (folder / "checkpoint_2/federation/group_00001/index.json").unlink()
    env = fsdp_launch_env(2, 2)
    errors = world4.run_failing(resumed, str(tmp_path), None, env=env, init_group=False, limit_seconds=LIMIT)
    assert len({error.message for error in errors}) == 1
    assert "group_00001/index.json is missing" in errors[0].message
    assert f"accelerator.load_state('{folder}/checkpoint_1')" in errors[0].message


def test_another_shape(world8: WorkerPool, tmp_path: Path) -> None:
    old = run(world8, through, tmp_path, (2,), until=2, num_groups=4)
    new = run(world8, resumed, tmp_path, None, until=None, num_groups=2)
    for rank, state in enumerate(new):
        source = old[2 * [1, 3][rank // 4]]
        for part in ("model", "optimizer", "rates", "count", "schedule", "round"):
            assert not differences(state[part], source[part])


def test_lora(world4: WorkerPool, tmp_path: Path) -> None:
    whole = run(world4, through, tmp_path, (4,), kind="lora", until=5)
    again = run(world4, resumed, tmp_path, None, kind="lora", until=5)
    assert not differences(whole[0]["model"], again[0]["model"])


def wrong(folder: str) -> list[str]:
    loop = Loop(folder)
    messages = []

    def attempt(what: Any) -> None:
        with pytest.raises((RuntimeError, ValueError)) as raised:
            what()
        messages.append(str(raised.value))

    loop.train(1)
    attempt(loop.accelerator.save_state)
    loop.train(2)
    attempt(lambda: loop.accelerator.save_state(safe_serialization=False))
    attempt(loop.accelerator.load_state)
    loop.accelerator.project_configuration.automatic_checkpoint_naming = False
    attempt(loop.accelerator.save_state)
    attempt(loop.accelerator.load_state)
    attempt(lambda: loop.accelerator.save_state(folder))
    attempt(lambda: loop.accelerator.load_state(folder + "/nothing"))
    return messages


def test_wrong_use(world4: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    parts = ["1 steps into a round", "pickles nothing", "no checkpoint in", "an output_dir", "Name the checkpoint"]
    parts += ["is no checkpoint, and would be replaced", "no such folder"]
    for messages in run(world4, wrong, tmp_path):
        assert [part in message for part, message in zip(parts, messages, strict=True)] == [True] * len(parts), (
            messages
        )
    assert (tmp_path / "note.txt").exists() and not checkpoints(tmp_path)


def failing_to_load(folder: str) -> None:
    """In synchronous steps at the end, where going on is collective, one rank cannot read."""
    loop = Loop(folder, sync_steps_at_end=5)

    def fail(models: Any, name: str) -> None:
        if dist.get_rank() == 1:
            raise OSError("no such disk")

    loop.train(6, save_at=(6,))
    loop.accelerator.register_load_state_pre_hook(fail)
    loop.accelerator.load_state()


def test_one_rank_that_cannot_load(world4: WorkerPool, tmp_path: Path) -> None:
    env = fsdp_launch_env(2, 2)
    for error in world4.run_failing(failing_to_load, str(tmp_path), env=env, init_group=False, limit_seconds=LIMIT):
        assert error.type_name == "CheckpointError"
        assert "Loading a checkpoint failed. On rank 1: OSError: no such disk" in error.message

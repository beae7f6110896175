"""Resuming with other groups, shards and worlds: exact weights, and optimizer state by a stated rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_fedshard import trainer_resuming
from tests.harness.checkpoint_runs import differences, make_trainer, state_of
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.marks import quick_and_slow
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes


LIMIT = 240.0
# groups, replicas in the launch file, shards
Shape = tuple[int, int, int]


def loaded(folder: str, **options: Any) -> dict[str, Any]:
    """The state right before the first step: what was taken from the checkpoint. Then trains on, to step 6."""
    forget_meshes()
    trainer = make_trainer(folder, seed=5, save_strategy="no", max_steps=6, **options)
    found: dict[str, Any] = {}

    def keep(original: Any) -> Any:
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not found:
                found.update(state_of(trainer))
            return original(*args, **kwargs)

        return training_step

    warnings: list[str] = []
    trainer_resuming.logger.warning = lambda text, *args: warnings.append(text)  # type: ignore[method-assign]
    try:
        trainer.training_step = keep(trainer.training_step)  # type: ignore[method-assign]
        trainer.train(resume_from_checkpoint=True)
    finally:
        del trainer_resuming.logger.warning
    assert trainer.state.global_step == 6
    dist.barrier()
    return {**found, "said": warnings, "group": (trainer.model.lm_head.weight.device_mesh.mesh.flatten().tolist())}  # type: ignore[union-attr]


def saved(folder: str, **options: Any) -> dict[str, Any]:
    forget_meshes()
    trainer = make_trainer(folder, max_steps=4, **options)
    trainer.train()
    dist.barrier()
    return state_of(trainer)


def go(pool: WorkerPool, body: Any, folder: Path, shape: Shape, **options: Any) -> list[dict[str, Any]]:
    groups, replicas, shards = shape
    env = fsdp_launch_env(replicas, shards)
    return pool.run(body, str(folder), env=env, init_group=False, limit_seconds=LIMIT, num_groups=groups, **options)


def mean(states: list[dict[str, dict[str, torch.Tensor]]]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {
            key: torch.stack([state[name][key] for state in states]).mean(0) if value.ndim else value
            for key, value in states[0][name].items()
        }
        for name in states[0]
    }


CASES: dict[str, tuple[Shape, Shape, list[Any]]] = {
    # From, to, and which old group each new one takes its optimizer from.
    "2 to 4 groups": ((2, 4, 2), (4, 4, 2), [0, 0, 1, 1]),
    "4 to 2 groups": ((4, 4, 2), (2, 4, 2), [1, 3]),
    "shards of 2 to shards of 4": ((2, 4, 2), (2, 2, 4), [0, 1]),
    "to FSDP": ((2, 2, 4), (1, 1, 8), [1]),
    "to HSDP": ((2, 4, 2), (1, 4, 2), [1]),
    "from HSDP": ((1, 4, 2), (2, 4, 2), [0, 0]),
    "from FSDP to 4": ((1, 1, 8), (4, 4, 2), [0, 0, 0, 0]),
    "the same": ((2, 4, 2), (2, 4, 2), [0, 1]),
}


@pytest.mark.parametrize("case", quick_and_slow(CASES, {"2 to 4 groups", "to FSDP"}))
def test_shapes(world8: WorkerPool, tmp_path: Path, case: str) -> None:
    before, after, sources = CASES[case]
    old = go(world8, saved, tmp_path, before)
    new = go(world8, loaded, tmp_path, after)
    check(old, new, before, after, sources)


def check(old: list[Any], new: list[Any], before: Shape, after: Shape, sources: list[int]) -> None:
    old_size, new_size = len(old) // before[0], len(new) // after[0]
    for rank, state in enumerate(new):
        assert not differences(state["model"], old[0]["model"])
        source = old[sources[rank // new_size] * old_size]
        for part in ("optimizer", "rates", "schedule"):
            assert not differences(state[part], source[part])
    said = new[0]["said"]
    assert all(not state["said"] for state in new[1:])
    if before == after:
        assert not said
    else:
        assert len(said) == 1 and "The weights are taken over exactly" in said[0]
        if before[0] != after[0]:
            assert f"optimizer_on_reshape=nearest: optimizer state of group 0 from {sources[0]}" in said[0]


@pytest.mark.slow
def test_another_world(world8: WorkerPool, world4: WorkerPool, tmp_path: Path) -> None:
    for pools, before, after, sources in (
        ((world8, world4), (4, 4, 2), (2, 2, 2), [1, 3]),
        ((world4, world8), (2, 2, 2), (2, 4, 2), [0, 1]),
    ):
        folder = tmp_path / f"{before}"
        old = go(pools[0], saved, folder, before)
        new = go(pools[1], loaded, folder, after)
        check(old, new, before, after, sources)
        assert "ranks drew the data, now" in new[0]["said"][0]


@pytest.mark.parametrize(
    "shapes", [((4, 4, 2), (2, 4, 2)), pytest.param(((2, 4, 2), (4, 4, 2)), marks=pytest.mark.slow)]
)
def test_average(world8: WorkerPool, tmp_path: Path, shapes: tuple[Shape, Shape]) -> None:
    before, after = shapes
    old = go(world8, saved, tmp_path, before)
    new = go(world8, loaded, tmp_path, after, rule="average")
    expected = mean([old[group * 8 // before[0]]["optimizer"] for group in range(before[0])])
    assert "mean of all groups' optimizer moments" in new[0]["said"][0]
    for state in new:
        for name, moments in expected.items():
            for key, value in moments.items():
                torch.testing.assert_close(state["optimizer"][name][key], value, rtol=1e-6, atol=1e-12)
    assert not differences(new[0]["optimizer"], new[-1]["optimizer"])

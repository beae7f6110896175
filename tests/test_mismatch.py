"""Ranks that were set up differently: the same error on all of them, with each value and who holds it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_fedshard import FedAvgCallback, FederationMismatchError
from hf_fedshard.handshake import agree
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import tiny_trainer
from tests.test_wrong_use import HSDP, PLAIN_FSDP, check
from tests.test_wrong_use_loop import Loop


def _rank() -> int:
    return int(os.environ["RANK"])


def _agree(values: list[Any], errors: list[str | None]) -> None:
    agree("the weather", {"rain": values[_rank()], "wind": 3}, errors[_rank()])


def test_agreement(world4: WorkerPool) -> None:
    world4.run(_agree, [1, 1, 1, 1], [None] * 4)
    errors = world4.run_failing(_agree, [1, 2, 1, 1], [None] * 4)
    assert errors[0].is_a(FederationMismatchError)
    check(errors, "FederationMismatchError", "disagree about the weather", "rain: 1 on ranks 0, 2-3; 2 on rank 1")
    assert "wind" not in errors[0].message


def test_one_error_reaches_every_rank(world4: WorkerPool) -> None:
    errors = world4.run_failing(_agree, [1, 1, 1, 1], [None, None, "no umbrella", None])
    check(errors, "ValueError", "On rank 2: no umbrella")
    errors = world4.run_failing(_agree, [1, 2, 3, 4], ["a", "b", "b", "a"])
    check(errors, "ValueError", "On ranks 0, 3: a\nOn ranks 1-2: b")
    errors = world4.run_failing(_agree, [1, 1, 1, 1], ["no umbrella"] * 4)
    assert [error.message for error in errors] == ["no umbrella"] * 4


def _at_construction(folder: str, name: str, values: list[Any]) -> None:
    tiny_trainer(folder, **{name: values[_rank()]})


@pytest.mark.parametrize(
    ("env", "name", "values", "part"),
    [
        pytest.param(
            PLAIN_FSDP, "num_groups", [2, 1, 2, 2], "num_groups: 2 on ranks 0, 2-3; 1 on rank 1", id="groups"
        ),
        pytest.param(HSDP, "sync_every", [8, 8, 8, 4], "sync_every: 8 on ranks 0-2; 4 on rank 3", id="period"),
        pytest.param(
            HSDP,
            "enable_jit_checkpoint",
            [True, True, False, True],
            "enable_jit_checkpoint: True on ranks 0-1, 3; False on rank 2",
            id="pre-emption",
        ),
    ],
)
def test_settings(
    world4: WorkerPool, tmp_path: Path, env: dict[str, str], name: str, values: list[Any], part: str
) -> None:
    errors = world4.run_failing(_at_construction, str(tmp_path), name, values, env=env, init_group=False)
    check(errors, "FederationMismatchError", "disagree about the federation", part)


def _other_environment(folder: str, name: str, value: str) -> None:
    with mock.patch.dict(os.environ, {name: value} if _rank() == 1 else {}):
        tiny_trainer(folder)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("FEDSHARD_SYNC_EVREY", "3", "Unknown environment variable FEDSHARD_SYNC_EVREY. hf_fedshard reads "),
        ("FEDSHARD_WIRE_FORMAT", "fp8", "wire_format must be one of"),
    ],
)
def test_a_wrong_environment_of_one_rank(world4: WorkerPool, tmp_path: Path, name: str, value: str, part: str) -> None:
    errors = world4.run_failing(_other_environment, str(tmp_path), name, value, env=HSDP, init_group=False)
    check(errors, "ValueError", f"On rank 1: {part}")


def _other_versions(folder: str) -> None:
    import hf_fedshard.agreement

    held = {"torch": f"2.{13 + _rank() // 2}.0", "accelerate": "1.15.0", "transformers": "5.24.0"}
    with mock.patch.object(hf_fedshard.agreement, "versions", lambda: held):
        tiny_trainer(folder)


def test_versions(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(_other_versions, str(tmp_path), env=HSDP, init_group=False)
    check(errors, "FederationMismatchError", "torch: '2.13.0' on ranks 0-1; '2.14.0' on ranks 2-3")


def _error_on_one_rank(folder: str) -> None:
    extra = (FedAvgCallback(num_groups=2),) if _rank() == 2 else ()
    tiny_trainer(folder, after=extra)


def test_wrong_use_on_one_rank(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(_error_on_one_rank, str(tmp_path), env=HSDP, init_group=False)
    check(errors, "ValueError", "On rank 2: FedAvgCallback was given 2 times")


def _at_training(folder: str, name: str, values: list[Any]) -> None:
    tiny_trainer(folder, **{name: values[_rank()]}).train()


@pytest.mark.parametrize(
    ("name", "values", "part"),
    [
        ("max_steps", [4, 4, 5, 4], "max_steps: 4 on ranks 0-1, 3; 5 on rank 2"),
        (
            "gradient_accumulation_steps",
            [1, 2, 1, 1],
            "gradient_accumulation_steps: 1 on ranks 0, 2-3; 2 on rank 1",
        ),
        ("max_grad_norm", [1.0, 1.0, 0.5, 0.5], "max_grad_norm: 1.0 on ranks 0-1; 0.5 on ranks 2-3"),
        ("per_device_train_batch_size", [1, 1, 2, 1], "train batch size: 1 on ranks 0-1, 3; 2 on rank 2"),
        ("learning_rate", [1e-2, 1e-4, 1e-2, 1e-2], "optimizer: "),
        ("average_tokens_across_devices", [True, True, True, False], "average_tokens_across_devices: "),
    ],
)
def test_schedule(world4: WorkerPool, tmp_path: Path, name: str, values: list[Any], part: str) -> None:
    errors = world4.run_failing(_at_training, str(tmp_path), name, values, env=HSDP, init_group=False)
    check(errors, "FederationMismatchError", "disagree about the training schedule", part)


def _other_cadence(folder: str) -> None:
    steps = 2 if _rank() == 0 else 3
    tiny_trainer(folder, logging_strategy="steps", logging_steps=steps, eval_samples=4).train()


def test_cadence(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(_other_cadence, str(tmp_path), env=HSDP, init_group=False)
    check(errors, "FederationMismatchError", "logging_steps: ", "2) on rank 0", "3) on ranks 1-3")


def _other_model(folder: str, what: str) -> None:
    other = _rank() >= 2
    # Ranks of one group shard the same model; the groups hold different ones.
    model = tiny_llama(
        num_layers=1 if other and what == "number" else 2, hidden_size=16 if other and what == "shape" else 32
    )
    if other and what == "requires_grad":
        model.lm_head.weight.requires_grad_(False)
    if other and what == "dtype":
        model.to(torch.bfloat16)
    tiny_trainer(folder, model=model).train()


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("number", "number of parameters and buffers: 23 on ranks 0-1; 14 on ranks 2-3"),
        ("shape", "lm_head.weight: [(96, 32), 'torch.float32', True] on ranks 0-1; [(96, 16), "),
        ("requires_grad", "'torch.float32', True] on ranks 0-1; [(96, 32), 'torch.float32', False] on ranks 2-3"),
        ("dtype", "lm_head.weight: [(96, 32), 'torch.float32', True] on ranks 0-1; [(96, 32), 'torch.bfloat16'"),
    ],
)
def test_model(world4: WorkerPool, tmp_path: Path, what: str, part: str) -> None:
    errors = world4.run_failing(_other_model, str(tmp_path), what, env=HSDP, init_group=False)
    check(errors, "FederationMismatchError", "disagree about the federated model", part)


def _loop(plugin: dict[str, list[Any]] | None = None, **options: list[Any]) -> None:
    mine = {name: values[_rank()] for name, values in options.items()}
    Loop(plugin={name: values[_rank()] for name, values in (plugin or {}).items()}, **mine)


@pytest.mark.parametrize(
    ("env", "options", "part"),
    [
        pytest.param(
            HSDP, {"plugin": {"sync_every": [8, 8, 8, 4]}}, "sync_every: 8 on ranks 0-2; 4 on rank 3", id="H"
        ),
        pytest.param(
            HSDP,
            {"gradient_accumulation_steps": [1, 1, 2, 2]},
            "gradient_accumulation_steps: 1 on ranks 0-1; 2 on ranks 2-3",
            id="accumulation",
        ),
        pytest.param(
            PLAIN_FSDP, {"plugin": {"num_groups": [2, 1, 2, 2]}}, "num_groups: 2 on ranks 0, 2-3; 1 on rank 1", id="G"
        ),
        pytest.param(
            fsdp_launch_env(4, 2) | {"WORLD_SIZE": "8"},
            {"plugin": {"num_groups": [2, 2, 2, 2, 2, 2, 4, 4]}},
            "num_groups: 2 on ranks 0-5; 4 on ranks 6-7",
            id="G of 8",
        ),
    ],
)
def test_loop(request: Any, env: dict[str, str], options: dict[str, Any], part: str) -> None:
    pool: WorkerPool = request.getfixturevalue("world8" if env.get("WORLD_SIZE") == "8" else "world4")
    errors = pool.run_failing(_loop, env=env, init_group=False, **options)
    check(errors, "FederationMismatchError", part)


def _unfrozen(only_in_one_group: bool) -> None:
    model = tiny_llama()
    model.lm_head.weight.requires_grad_(False)
    loop = Loop(model=model)
    loop.step()
    if _rank() >= 2 or not only_in_one_group:
        loop.model.lm_head.weight.requires_grad_(True)
    loop.step()


def test_parameters_unfrozen_in_one_group_only(world4: WorkerPool) -> None:
    world4.run(_unfrozen, False, env=HSDP, init_group=False)
    errors = world4.run_failing(_unfrozen, True, env=HSDP, init_group=False)
    check(
        errors, "FederationMismatchError", "train different parameters", "This rank's group averages", num_messages=2
    )
    assert len(errors) == 4


def _unequal_steps() -> None:
    loop = Loop(plugin={"sync_every": 4})
    for _ in range(2 if dist.get_rank() < 2 else 3):
        loop.step()
    loop.rounds.finish()


def test_groups_with_unequal_numbers_of_steps(world4: WorkerPool) -> None:
    errors = world4.run_failing(_unequal_steps, env=HSDP, init_group=False)
    check(errors, "FederationMismatchError", "[2, 3] in group 0, 1", "same number of steps")

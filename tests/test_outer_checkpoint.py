"""The outer loop in checkpoints: interrupted and resumed is uninterrupted, bit for bit, and in any shape."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_fedshard import export_checkpoint, local_layers, outer_checkpoint, residual_checkpoint
from hf_fedshard.manifest import find_damage
from hf_fedshard.residual_checkpoint import take_residuals
from hf_fedshard.shards import as_sharded
from tests.harness.checkpoint_runs import differences, make_trainer, state_of
from tests.harness.data import BatchRecorder
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes
from tests.test_checkpoint_accelerate import Loop


LIMIT = 240.0
ALL = {
    "outer_optimizer": "fedadam",
    "outer_schedule": "cosine",
    "outer_schedule_rounds": 5,
    "outer_max_norm": 10.0,
    "group_weights": "tokens",
    "inner_moments": "average",
    "proximal_mu": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    "all": {"kind": "small", **ALL},
    "nesterov in bfloat16": {"kind": "bfloat16", "outer_optimizer": "nesterov"},
    "local": {
        "kind": "small",
        "outer_optimizer": "nesterov",
        "local_parameters": "lm_head.weight,*norm*",
        "inner_moments": "reset",
    },
    "products": {"kind": "lora", "lora_average": "product"},
    "frozen": {"kind": "lora", "lora_average": "freeze_a", "outer_optimizer": "Adagrad"},
}

SLOW = tuple(case for case in CASES if case != "all")


def outer_of(rounds: Any) -> dict[str, Any]:
    averager = rounds.averager
    parameters = dict(averager.model.named_parameters())
    found: dict[str, Any] = {"num_steps": averager.outer.num_steps}
    for name, rest in averager.outer.apart.remainders.items():
        found[f"{name}/rest"] = as_sharded(rest, parameters[name]).full_tensor()
    for name, anchor in averager.outer.anchors.items():
        found[f"{name}/anchor"] = as_sharded(anchor, parameters[name]).full_tensor()
        for key, value in averager.outer.optimizer.state[anchor].items() if averager.outer.optimizer else ():
            found[f"{name}/{key}"] = as_sharded(value, parameters[name]).full_tensor() if value.ndim else value
    return found


def train(folder: str, resume: Any = None, **options: Any) -> dict[str, Any]:
    forget_meshes()
    trainer = make_trainer(folder, max_steps=6, save_steps=4, **options)
    recorder = BatchRecorder(trainer.model)  # type: ignore[arg-type]
    found: dict[str, Any] = {}

    def keep(original: Any) -> Any:
        def call_event(event: str, *args: Any, **kwargs: Any) -> Any:
            session = trainer_binding(trainer).session
            if event == "on_train_end" and session is not None:
                found.update(outer_of(session.rounds))
            return original(event, *args, **kwargs)

        return call_event

    trainer.callback_handler.call_event = keep(trainer.callback_handler.call_event)  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=resume)
    weights = [row.get("fedshard/weight/group_0") for row in trainer.state.log_history if "fedshard/round" in row]
    result = {**state_of(trainer), "outer": found, "batches": recorder.batches, "weights": weights}
    dist.barrier()
    return result


def trainer_binding(trainer: Any) -> Any:
    from hf_fedshard import FedAvgCallback

    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, FedAvgCallback))._binding


def run(pool: WorkerPool, body: Any, folder: Path, *args: Any, **options: Any) -> list[Any]:
    env = fsdp_launch_env(pool.world_size // 2, 2)
    return pool.run(body, str(folder), *args, env=env, init_group=False, limit_seconds=LIMIT, **options)


def assert_resumes(pool: WorkerPool, folder: Path, **options: Any) -> list[dict[str, Any]]:
    whole = run(pool, train, folder / "whole", **options)
    (folder / "again").mkdir()
    shutil.copytree(folder / "whole" / "checkpoint-4", folder / "again" / "checkpoint-4")
    assert find_damage(folder / "again" / "checkpoint-4") == []
    resumed = run(pool, train, folder / "again", resume=True, seed=7, **options)
    for before, after in zip(whole, resumed, strict=True):
        before["batches"] = before["batches"][-2:]
        for state in (before, after):  # a resumed log has the rounds before
            state["weights"] = state["weights"][-1:]
        assert len(after["batches"]) == 2
        assert not differences(before, after)
    return whole


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_trainer(world4: WorkerPool, case: str, tmp_path: Path) -> None:
    whole = assert_resumes(world4, tmp_path, **CASES[case])
    saved = json.loads((tmp_path / "whole/checkpoint-4/federation/federation.json").read_text())
    stored = tmp_path / "whole/checkpoint-4/federation/outer/index.json"
    names = json.loads(stored.read_text()) if stored.exists() else {}
    if case == "all":
        assert saved["outer"]["num_steps"] == 2 and whole[0]["outer"]["num_steps"] == 3
        assert {name.rpartition("/")[2] for name in names} == {"exp_avg", "exp_avg_sq"}
        labels = [count_labels(rank["batches"]) for rank in whole]
        # The last round, of two steps: what the labels of the groups' batches say.
        groups = [sum(labels[:2]), sum(labels[2:])]
        expected = None if groups[0] == groups[1] else round(groups[0] / max(groups), 4)
        assert whole[0]["weights"] == [expected]
    elif case == "nesterov in bfloat16":
        assert {name.rpartition("/")[2] for name in names} == {"anchor", "momentum_buffer"}
        assert whole[0]["outer"]["lm_head.weight/anchor"].dtype == torch.float32
    elif case == "products":
        assert not names and saved["outer"] == {"optimizer": None}
    if case == "local":
        check_local(whole, tmp_path, saved["local"])


def count_labels(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def check_local(whole: list[dict[str, Any]], folder: Path, local: list[str]) -> None:
    assert local == [
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    for name, tensor in whole[0]["model"].items():
        assert torch.equal(tensor, whole[1]["model"][name])
        assert torch.equal(tensor, whole[2]["model"][name]) == (name not in local), name
    checkpoint = folder / "whole" / "checkpoint-4"
    models = [
        AutoModelForCausalLM.from_pretrained(export_checkpoint(checkpoint, folder / f"out{group}", group=group))
        for group in range(2)
    ]
    differing = {n for n, t in models[0].state_dict().items() if not torch.equal(t, models[1].state_dict()[n])}
    assert differing == set(local)
    with pytest.raises(ValueError, match="group=2 cannot be exported: the checkpoint is of 2 groups"):
        export_checkpoint(checkpoint, folder / "out2", group=2)


@pytest.mark.slow
def test_trainer_of_eight(world8: WorkerPool, tmp_path: Path) -> None:
    assert_resumes(world8, tmp_path, **CASES["all"], num_groups=2)


def state_of_loop(loop: Loop) -> dict[str, Any]:
    """All that a border leaves behind; what a group owes under a lossy wire format as whole tensors."""
    owed = {name: tensor.full_tensor() for name, tensor in take_residuals(loop.fedavg.averager).items()}  # type: ignore[attr-defined]
    return {**loop.state(), "outer": outer_of(loop.fedavg), "owed": owed}


def through(folder: str, save_at: tuple[int, ...], until: int, **options: Any) -> dict[str, Any]:
    loop = Loop(folder, kind="small", **options)
    loop.train(until, save_at)
    state = state_of_loop(loop)
    loop.fedavg.finish()
    dist.barrier()
    return state


def resumed(folder: str, until: int | None, **options: Any) -> dict[str, Any]:
    loop = Loop(folder, seed=3, kind="small", **options)
    warnings: list[str] = []
    with contextlib.ExitStack() as stack:
        for module in (local_layers, outer_checkpoint, residual_checkpoint):
            note = mock.patch.object(module.logger, "warning", lambda text, *args: warnings.append(text % args))
            stack.enter_context(note)
        loop.accelerator.load_state()
    if until is not None:
        loop.train(until)
    state = {**state_of_loop(loop), "warnings": warnings}
    loop.fedavg.finish()
    dist.barrier()
    return state


LOOP = {**ALL, "group_weights": "uniform", "local_parameters": "lm_head.weight"}


@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_loop(size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue(f"world{size}")
    whole = run(pool, through, tmp_path, (2,), 4, **LOOP)
    again = run(pool, resumed, tmp_path, 4, **LOOP)
    for before, after in zip(whole, again, strict=True):
        assert after.pop("warnings") == []
        before["batches"] = before["batches"][-len(after["batches"]) :]
        assert not differences(before, after)
    assert whole[0]["outer"]["num_steps"] == 2


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", "amsgrad=True"), pytest.param("RMSprop", "centered=True, momentum=0.5", marks=pytest.mark.slow)],
)
def test_options_that_keep_more(world4: WorkerPool, tmp_path: Path, name: str, options: str) -> None:
    """They go on from what is stored, and begin with what they add."""
    run(world4, through, tmp_path, (2,), 2, outer_optimizer=name)
    new = run(world4, resumed, tmp_path, 4, outer_optimizer=name, outer_options=options)
    assert new[0]["warnings"] == [
        f"Outer settings were changed since the checkpoint: outer_options='{options}' (was '')."
    ]
    for rank in new:
        assert rank["outer"]["num_steps"] == 2
        assert all(torch.as_tensor(value).isfinite().all() for value in rank["outer"].values())
        kept = {entry.rpartition("/")[2] for entry in rank["outer"]}
        assert kept >= ({"max_exp_avg_sq"} if name == "AdamW" else {"momentum_buffer", "grad_avg"})


def test_layers_that_are_local_no_more(world4: WorkerPool, tmp_path: Path) -> None:
    """What was each group's own is group 0's in all groups, and has a fresh state in the outer optimizer."""
    settings = {"outer_optimizer": "Adagrad", "outer_learning_rate": 0.1}
    old = run(world4, through, tmp_path, (2,), 2, local_parameters="lm_head.weight,*norm*", **settings)
    assert not torch.equal(old[0]["model"]["lm_head.weight"], old[2]["model"]["lm_head.weight"])
    for until in (None, 4):
        new = run(world4, resumed, tmp_path, until, local_parameters="*norm*", **settings)
        for rank, state in enumerate(new):
            shared = {name: tensor for name, tensor in state["model"].items() if "norm" not in name}
            if until is None:
                assert not differences(shared, {name: old[0]["model"][name] for name in shared})
                norms = {name: tensor for name, tensor in state["model"].items() if name not in shared}
                assert not differences(norms, {name: old[rank]["model"][name] for name in norms})
            else:
                assert not differences(shared, {name: new[0]["model"][name] for name in shared})
        assert (
            len(new[0]["warnings"]) == 1
            and "first lm_head.weight: all groups begin with those of" in new[0]["warnings"][0]
        )


@pytest.mark.slow
def test_another_shape_and_other_settings(world8: WorkerPool, tmp_path: Path) -> None:
    """The outer loop is of no group: it goes on exactly with another number of groups and shards."""
    settings = {"outer_optimizer": "nesterov", "local_parameters": "lm_head.weight"}
    old = run(world8, through, tmp_path, (2,), 2, num_groups=4, **settings)
    new = run(world8, resumed, tmp_path, None, num_groups=2, outer_learning_rate=0.5, **settings)
    for rank, state in enumerate(new):
        assert not differences(state["outer"], old[0]["outer"])
        source = old[2 * [1, 3][rank // 4]]  # the group at the same place in the row
        assert not differences(state["model"], source["model"])
        assert not differences(state["optimizer"], source["optimizer"])
    assert new[0]["warnings"] == [
        "Outer settings were changed since the checkpoint: outer_learning_rate=0.5 (was None)."
    ]
    plain = run(world8, resumed, tmp_path, None, num_groups=1)
    assert not differences(plain[0]["model"], old[4]["model"]) and plain[0]["outer"]["num_steps"] == 0
    env = fsdp_launch_env(4, 2)
    for other, text in (
        ({}, "this run's fedavg as plain averaging"),
        ({"outer_optimizer": "fedadam"}, "this run's fedadam"),
    ):
        errors = world8.run_failing(
            resumed, str(tmp_path), None, env=env, init_group=False, limit_seconds=LIMIT, num_groups=4, **other
        )
        for error in errors:
            assert error.type_name == "CheckpointError"
            assert f"The checkpoint's outer optimizer is nesterov, {text}" in error.message

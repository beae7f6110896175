"""Wrong use under Trainer: an error at start, on every rank, with the numbers and the way out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_fedshard import FedAvgCallback, cpu, guard
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.reports import RankError
from tests.harness.tiny_trainer import tiny_trainer


HSDP = fsdp_launch_env(2, 2)
PLAIN_FSDP = fsdp_launch_env(None, 4) | {"WORLD_SIZE": "4"}


def check(errors: list[RankError], kind: str, *parts: str, num_messages: int = 1) -> None:
    """All ranks failed, with so many messages between them: more than one where each group says what it holds."""
    assert errors
    for error in errors:
        assert error.type_name == kind, error.traceback
        for part in parts:
            assert part in error.message, f"{part!r} is not in: {error.message}\n{error.traceback}"
    assert len({error.message for error in errors}) == num_messages


def _make(folder: str, **options: Any) -> Any:
    """A worker has run other bodies: their meshes are gone, and it may have been started without a launch around it."""
    guard.reset()
    cpu.install()
    return tiny_trainer(folder, **options)


@pytest.mark.parametrize(
    ("env", "num_groups", "parts"),
    [
        pytest.param(PLAIN_FSDP, 3, ["num_groups=3", "world of 4 processes", "[1, 2, 4]"], id="world not divisible"),
        pytest.param(PLAIN_FSDP, 4, ["num_groups=4", "one rank in each group", "[1, 2]"], id="one rank in each group"),
        pytest.param(PLAIN_FSDP, None, ["single group", "4 processes", "FEDSHARD_NUM_GROUPS"], id="one group"),
        pytest.param(HSDP, 3, ["num_groups=3", "dp_replicate_size=2", "[1, 2]"], id="groups that do not divide"),
        pytest.param(HSDP, 4, ["num_groups=4", "dp_replicate_size=2", "[1, 2]"], id="more groups than replicas"),
    ],
)
def test_groups(world4: WorkerPool, tmp_path: Path, env: dict[str, str], num_groups: int, parts: list[str]) -> None:
    errors = world4.run_failing(_make, str(tmp_path), env=env, init_group=False, num_groups=num_groups)
    check(errors, "ValueError", *parts)


@pytest.mark.parametrize(
    ("env", "changes", "parts"),
    [
        pytest.param({}, {}, ["FSDP is not in force", "MULTI_CPU", "accelerate_configs"], id="no FSDP"),
        pytest.param(
            PLAIN_FSDP | {"FSDP_VERSION": "1"}, {}, ["FSDP version 2 only", "FSDP version 1"], id="FSDP1 in the launch"
        ),
        pytest.param(
            {},
            {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}},
            ["FSDP version 2 only", "FSDP version 1", "fsdp_config={'version': 2}"],
            id="FSDP1 in Trainer",
        ),
        pytest.param(
            fsdp_launch_env(2, 2, mixed_precision="fp16"),
            {},
            ["mixed_precision=fp16", "CPU", "bf16"],
            id="fp16 on CPU",
        ),
        pytest.param(
            HSDP,
            {"enable_jit_checkpoint": True, "save_only_model": True},
            ["save_only_model=True", "enable_jit_checkpoint=True"],
            id="jit",
        ),
        pytest.param(
            HSDP,
            {"accelerator_config": {"dispatch_batches": True}},
            ["dispatch_batches=True", "accelerator_config={'dispatch_batches': False}"],
            id="dispatch_batches",
        ),
        pytest.param(HSDP, {"train_dataset": []}, ["train_dataset is empty"], id="empty dataset"),
    ],
)
def test_launch(world4: WorkerPool, tmp_path: Path, env: dict[str, str], changes: Any, parts: list[str]) -> None:
    errors = world4.run_failing(_make, str(tmp_path), env=env, init_group=False, **changes)
    check(errors, "ValueError", *parts)


@pytest.mark.parametrize("env", [PLAIN_FSDP, HSDP], ids=["plain FSDP", "parallelism_config"])
def test_independent_processes(world4: WorkerPool, tmp_path: Path, env: dict[str, str]) -> None:
    """The launcher does not hand `use_cpu` on: each process is alone, believes it is the main one, and trains."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without accelerators")
    errors = world4.run_failing(_make, str(tmp_path), env=env, init_group=False, use_cpu=False)
    check(errors, "ValueError", "4 processes were launched", "runs alone", "use_cpu=True")


def test_single_process(world4: WorkerPool, tmp_path: Path) -> None:
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    errors = world4.run_failing(_make, str(tmp_path), env=alone, init_group=False)
    check(errors, "ValueError", "single process", "accelerate launch")


@pytest.mark.parametrize("sync_every", [0, -1, 2.5])
def test_period(sync_every: Any) -> None:
    with pytest.raises(ValueError, match=f"sync_every must be an integer of at least 1, .* but got {sync_every}"):
        FedAvgCallback(num_groups=2, sync_every=sync_every)


def _twice(folder: str) -> None:
    _make(folder, after=(FedAvgCallback(num_groups=2),))


def test_callback_given_twice(world4: WorkerPool, tmp_path: Path) -> None:
    check(world4.run_failing(_twice, str(tmp_path), env=HSDP, init_group=False), "ValueError", "2 times", "once")


def _bert(folder: str) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=99
    )
    _make(folder, model=BertForMaskedLM(config))


def test_layers_that_hold_the_embedding(world4: WorkerPool, tmp_path: Path) -> None:
    """Accelerate's own default for BERT, which fails in `prepare` for a reason that nobody would guess."""
    env = fsdp_launch_env(2, 2, wrap_cls=None, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    errors = world4.run_failing(_bert, str(tmp_path), env=env, init_group=False)
    check(errors, "ValueError", "BertEmbeddings holds the input", "--fsdp_transformer_layer_cls_to_wrap BertLayer.")


def _deepspeed(folder: str) -> None:
    from accelerate.utils import DistributedType

    trainer = _make(folder, federated=False)
    # Stands for a state that DeepSpeed has made: what is read of it before the refusal.
    trainer.accelerator.state = SimpleNamespace(
        num_processes=4, distributed_type=DistributedType.DEEPSPEED, parallelism_config=None
    )
    trainer.add_callback(callback := FedAvgCallback(num_groups=2))
    callback.bind(trainer)


def test_deepspeed(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(_deepspeed, str(tmp_path), env=HSDP, init_group=False)
    check(errors, "ValueError", "DeepSpeed", "accelerate_configs")


def _added_late(folder: str, bind: bool) -> list[dict[str, Any]]:
    trainer = _make(folder, federated=False, max_steps=2, logging_strategy="steps", logging_steps=1)
    trainer.add_callback(callback := FedAvgCallback(num_groups=2, sync_every=2))
    if bind:
        callback.bind(trainer)
    trainer.train()
    return list(trainer.state.log_history)


def test_added_late(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(_added_late, str(tmp_path), False, env=HSDP, init_group=False)
    check(errors, "RuntimeError", "added after its Trainer was made", "bind(trainer)")
    for history in world4.run(_added_late, str(tmp_path), True, env=HSDP, init_group=False):
        assert [logs["fedshard/round"] for logs in history if "fedshard/round" in logs] == [1]


def _change_upstream(owner_name: str, method: str, gone: bool, folder: str) -> None:
    from accelerate import Accelerator
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

    owner = {"Trainer": Trainer, "Accelerator": Accelerator, "CallbackHandler": CallbackHandler}[owner_name]
    original = getattr(owner, method)

    def other_arguments(self: Any, *something: Any, **kwargs: Any) -> Any:
        return original(self, *something, **kwargs)

    setattr(owner, method, other_arguments)
    if gone:
        delattr(owner, method)
    try:
        _make(folder)
    finally:
        setattr(owner, method, original)


@pytest.mark.parametrize(
    ("owner", "method", "gone"),
    [
        ("Trainer", "_get_num_items_in_batch", False),
        ("Trainer", "_save_checkpoint", True),
        ("Accelerator", "gather_for_metrics", False),
        ("CallbackHandler", "call_event", False),
    ],
)
def test_upstream_changed(world4: WorkerPool, tmp_path: Path, owner: str, method: str, gone: bool) -> None:
    env = {**HSDP, "TRANSFORMERS_VERBOSITY": "error"}
    errors = world4.run_failing(_change_upstream, owner, method, gone, str(tmp_path), env=env, init_group=False)
    now = "is missing" if gone else "takes (something, kwargs)"
    check(errors, "UpstreamChangedError", f".{owner}.{method} {now}", "tested with torch 2.13, accelerate 1.15")


def _second_trainer_in_mid_run(folder: str) -> None:
    from transformers import TrainerCallback

    class MakesAnother(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            tiny_trainer(folder, federated=False, after=(ours,))

    trainer = _make(folder, max_steps=2, after=(MakesAnother,))
    ours = next(item for item in trainer.callback_handler.callbacks if isinstance(item, FedAvgCallback))
    trainer.train()


def test_one_callback_in_two_trainers(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(_second_trainer_in_mid_run, str(tmp_path), env=HSDP, init_group=False)
    check(errors, "RuntimeError", "training another Trainer", "one callback for each Trainer")


def _one_after_the_other(folder: str) -> None:
    """Both of its Trainers are made, or it is added to one; only the one that it is bound to trains with it."""
    callback = FedAvgCallback(num_groups=2, sync_every=2)
    first, second = (_make(folder, federated=False, after=(callback,), max_steps=2) for _ in range(2))
    third = _make(folder, federated=False, max_steps=2)
    third.add_callback(callback)
    refusal = "bound to another Trainer.*one callback for each Trainer"
    for trainer in (first, third):  # ahead of the one that it is bound to
        with pytest.raises(RuntimeError, match=refusal):
            trainer.train()
    second.train()
    for trainer in (first, third):  # and behind it, when Accelerate's state is stock again
        with pytest.raises(RuntimeError, match=refusal):
            trainer.train()
    fourth = _make(folder, federated=False, max_steps=2)
    fourth.add_callback(callback)
    callback.bind(fourth)
    fourth.train()
    for trainer in (second, fourth):
        assert [row["fedshard/round"] for row in trainer.state.log_history if "fedshard/round" in row] == [1]


def test_one_callback_in_trainers_one_after_the_other(world4: WorkerPool, tmp_path: Path) -> None:
    world4.run(_one_after_the_other, str(tmp_path), env=HSDP, init_group=False)


def _train_without_callback(folder: str) -> None:
    """The federated model of a first Trainer, trained on by a second one that averages nothing."""
    first = _make(folder, max_steps=1)
    first.train()
    model = first.model_wrapped
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(3, 11)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def test_groups_that_nobody_averages(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(_train_without_callback, str(tmp_path), env=HSDP, init_group=False)
    check(errors, "RuntimeError", "nothing averages the groups", "callbacks=[FedAvgCallback(...)]")


def _sharded_when_loaded(folder: str) -> None:
    trainer = _make(folder, federated=False)
    trainer.is_distributed_loading_by_transformers = True
    trainer.add_callback(callback := FedAvgCallback(num_groups=2))
    callback.bind(trainer)


def test_model_sharded_by_transformers(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(_sharded_when_loaded, str(tmp_path), env=HSDP, init_group=False)
    check(errors, "ValueError", "distributed_config", "sharded when it was loaded")

"""Wrong use of `FederatedFSDPPlugin` in a loop of one's own: an error on every rank, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from hf_fedshard import FederatedFSDPPlugin, guard
from tests.harness.data import ListDataset, StreamDataset, collate, token_samples
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.test_wrong_use import PLAIN_FSDP, check


HSDP = fsdp_launch_env(2, 2)


class Loop:
    """A prepared loop of a tiny Llama."""

    def __init__(
        self,
        model: nn.Module | None = None,
        data: Any = None,
        federate: bool = True,
        plugin: dict[str, Any] | None = None,
        with_parallelism: bool = True,
        **accelerator: Any,
    ) -> None:
        guard.reset()
        self.plugin = FederatedFSDPPlugin(**{"num_groups": 2, "sync_every": 2, **(plugin or {})})
        if with_parallelism:
            accelerator["parallelism_config"] = self.plugin.parallelism_config
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=self.plugin, **accelerator)
        model = tiny_llama() if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = ListDataset(token_samples(16)) if data is None else data
        loader = torch.utils.data.DataLoader(data, batch_size=1, collate_fn=collate)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        if federate:
            self.rounds = self.plugin.federate(self.accelerator, self.model)

    def step(self, count: bool = True) -> Any:
        batch = collate(token_samples(1))
        self.accelerator.backward(self.model(**batch).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.rounds.step() if count else None


def _loop(**options: Any) -> None:
    Loop(**options)


@pytest.mark.parametrize("where", ["argument", "launch"])
def test_fsdp1(world4: WorkerPool, where: str) -> None:
    plugin = {"fsdp_version": 1} if where == "argument" else {}
    env = HSDP if where == "argument" else PLAIN_FSDP | {"FSDP_VERSION": "1"}
    errors = world4.run_failing(_loop, env=env, init_group=False, plugin=plugin)
    check(errors, "ValueError", "FSDP version 2 only", "FSDP version 1", "fsdp_version: 2")


@pytest.mark.parametrize(
    ("env", "plugin", "parts"),
    [
        pytest.param(PLAIN_FSDP, {"num_groups": 3}, ["num_groups=3", "[1, 2, 4]"], id="world not divisible"),
        pytest.param(HSDP, {"num_groups": 4}, ["num_groups=4", "dp_replicate_size=2"], id="groups do not divide"),
        pytest.param(HSDP, {"sync_every": 0}, ["sync_every", "at least 1", "got 0"], id="period"),
        pytest.param(
            HSDP | {"FEDSHARD_TIMEOUT_SECONDS": "-1"}, {}, ["timeout_seconds", "positive", "-1.0"], id="timeout"
        ),
        pytest.param(HSDP | {"WORLD_SIZE": "1"}, {}, ["world size is 1", "accelerate launch"], id="single process"),
    ],
)
def test_settings(world4: WorkerPool, env: dict[str, str], plugin: dict[str, Any], parts: list[str]) -> None:
    check(world4.run_failing(_loop, env=env, init_group=False, plugin=plugin), "ValueError", *parts)


def _without_parallelism_config(stock: bool) -> None:
    from hf_fedshard import cpu

    cpu.install()
    loop = Loop(federate=False, with_parallelism=False)
    if not stock:
        _ = loop.plugin.parallelism_config  # made, and handed to nobody
    loop.plugin.federate(loop.accelerator, loop.model)


@pytest.mark.parametrize("stock", [True, False])
def test_parallelism_config_not_given(world4: WorkerPool, stock: bool) -> None:
    errors = world4.run_failing(_without_parallelism_config, stock, env=HSDP, init_group=False)
    check(errors, "ValueError", "not made with this plugin's parallelism_config", "Accelerator(fsdp_plugin=plugin")


def _unprepared() -> None:
    loop = Loop(federate=False)
    loop.plugin.federate(loop.accelerator, tiny_llama())


def test_unprepared_model(world4: WorkerPool) -> None:
    errors = world4.run_failing(_unprepared, env=HSDP, init_group=False)
    check(errors, "ValueError", "no FSDP2 module", "accelerator.prepare(model, optimizer)")


def _nothing_trainable() -> None:
    loop = Loop(federate=False)
    loop.model.requires_grad_(False)
    loop.plugin.federate(loop.accelerator, loop.model)


def test_nothing_trainable(world4: WorkerPool) -> None:
    errors = world4.run_failing(_nothing_trainable, env=HSDP, init_group=False)
    check(errors, "ValueError", "no trainable parameter")


def _outside_fsdp(num_parameters: int) -> None:
    loop = Loop(federate=False)
    for index in range(num_parameters):
        loop.model.register_parameter(f"late{index}", nn.Parameter(torch.ones(2)))
    loop.plugin.federate(loop.accelerator, loop.model)


@pytest.mark.parametrize(
    ("number", "parts"), [(1, ["1 trainable", "late0. "]), (7, ["7 trainable", "late0, late1", "late4 and 2 more"])]
)
def test_trainable_parameters_outside_fsdp(world4: WorkerPool, number: int, parts: list[str]) -> None:
    errors = world4.run_failing(_outside_fsdp, number, env=HSDP, init_group=False)
    check(errors, "ValueError", "not managed by FSDP2", "ignored_modules", *parts)


def _ignored_modules() -> None:
    model = tiny_llama()
    Loop(model=model, plugin={"ignored_modules": [model.model.norm]})


def test_ignored_modules(world4: WorkerPool) -> None:
    errors = world4.run_failing(_ignored_modules, env=HSDP, init_group=False)
    check(errors, "ValueError", "1 trainable", "model.norm.weight", "ignored_modules")


def _shared_layers() -> None:
    model = tiny_llama()
    first, second = model.model.layers[:2]
    second.mlp = first.mlp
    Loop(model=model).step()


def test_layers_that_share_a_module(world4: WorkerPool) -> None:
    """Refused where each is sharded by itself, and trained where the model is sharded as one, or the shared module as well."""
    errors = world4.run_failing(_shared_layers, env=HSDP, init_group=False)
    names = [
        "model.layers.0 and model.layers.1",
        "model.layers.0.mlp.gate_proj.weight",
        "LlamaDecoderLayer",
        "NO_WRAP",
    ]
    check(errors, "ValueError", *names)
    for wrapped in (None, "LlamaDecoderLayer,LlamaMLP"):
        world4.run(_shared_layers, env=fsdp_launch_env(2, 2, wrap_cls=wrapped), init_group=False)


def _frozen_ignored_modules() -> None:
    model = tiny_llama()
    model.model.norm.requires_grad_(False)
    Loop(model=model, plugin={"ignored_modules": [model.model.norm]}).step()


def test_frozen_ignored_modules_are_allowed(world4: WorkerPool) -> None:
    world4.run(_frozen_ignored_modules, env=HSDP, init_group=False)


def _dispatching() -> None:
    config = DataLoaderConfiguration(dispatch_batches=True)
    Loop(data=StreamDataset(token_samples(16)), dataloader_config=config)


def test_dispatched_batches(world4: WorkerPool) -> None:
    errors = world4.run_failing(_dispatching, env=HSDP, init_group=False)
    check(errors, "ValueError", "dispatch_batches=True", "dispatch_batches=False (DataLoaderConfiguration")


def test_random_states_synchronised_at_each_epoch(world4: WorkerPool) -> None:
    errors = world4.run_failing(_loop, env=HSDP, init_group=False, rng_types=["torch", "generator"])
    check(errors, "ValueError", "rng_types=['torch']", "default")


def _inside_a_round(what: str, folder: str) -> None:
    loop = Loop()
    calls = {
        "save_state": lambda: loop.accelerator.save_state(folder),
        "get_state_dict": lambda: loop.accelerator.get_state_dict(loop.model),
    }
    calls[what]()  # before the first step every group holds the same model
    loop.step()
    try:
        calls[what]()
    finally:
        loop.step()
        calls[what]()  # and at a border


@pytest.mark.parametrize("what", ["save_state", "get_state_dict"])
def test_saving_inside_a_round(world4: WorkerPool, tmp_path: Path, what: str) -> None:
    errors = world4.run_failing(_inside_a_round, what, str(tmp_path / "state"), env=HSDP, init_group=False)
    check(errors, "RuntimeError", f"accelerator.{what} was called 1 steps into a round", "fedavg.close()")


def _never_averaged(attached: bool) -> None:
    loop = Loop(federate=attached)
    for _ in range(4):
        loop.step(count=False)
    if not attached:
        raise AssertionError("not noticed at the first step")
    loop.step(count=False)


def test_step_is_never_called(world4: WorkerPool) -> None:
    errors = world4.run_failing(_never_averaged, True, env=HSDP, init_group=False)
    check(errors, "RuntimeError", "5 optimizer steps", "sync_every=2", "fedavg.step()")


def test_federate_is_never_called(world4: WorkerPool) -> None:
    errors = world4.run_failing(_never_averaged, False, env=HSDP, init_group=False)
    check(errors, "RuntimeError", "nothing averages the groups", "plugin.federate(accelerator, model")

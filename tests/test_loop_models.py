"""Two models that one Accelerate loop has federated: checkpoints of both, and either federation may end first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from hf_fedshard import FederatedFSDPPlugin, export_checkpoint
from hf_fedshard.manifest import find_damage
from tests.harness.checkpoint_runs import differences
from tests.harness.data import collate, token_samples
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import full_state, tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes


HSDP = fsdp_launch_env(2, 2)
SETTINGS: dict[str, Any] = {"sync_every": 2, "outer_optimizer": "nesterov", "wire_format": "int8"}


class Pair:
    """A generator and a critic, each with a federation of its own on one accelerator."""

    def __init__(self, seed: int = 0, num_models: int = 2) -> None:
        forget_meshes()
        self.plugin = FederatedFSDPPlugin(**SETTINGS)
        self.accelerator = Accelerator(
            cpu=True, fsdp_plugin=self.plugin, parallelism_config=self.plugin.parallelism_config
        )
        pairs = []
        for number in range(num_models):
            model = tiny_llama(seed=seed + number, num_layers=1 + number)
            pairs.append(self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
        self.models, self.optimizers = zip(*pairs, strict=True)
        # Both optimizers are prepared by now: each federation takes that of its model.
        self.rounds = [self.plugin.federate(self.accelerator, model) for model in self.models]

    def train(self, steps: range) -> None:
        for step in steps:
            batch = collate(token_samples(1, seed=100 * step + dist.get_rank()))
            for model, optimizer, rounds in zip(self.models, self.optimizers, self.rounds, strict=True):
                self.accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                rounds.step()

    def state(self) -> list[dict[str, torch.Tensor]]:
        return [full_state(model) for model in self.models]


def saved(folder: str) -> tuple[list[Any], list[Any]]:
    pair = Pair()
    taken = [rounds.optimizers for rounds in pair.rounds]
    assert taken == [[optimizer.optimizer] for optimizer in pair.optimizers]
    pair.train(range(2))
    pair.accelerator.save_state(folder)
    at_border = pair.state()
    pair.train(range(2, 4))
    return at_border, pair.state()


def resumed(folder: str, num_models: int = 2) -> tuple[list[Any], list[Any]]:
    pair = Pair(5, num_models)
    pair.accelerator.load_state(folder)
    at_border = pair.state()
    pair.train(range(2, 4))
    return at_border, pair.state()


def test_both_models_are_saved_and_resumed(world4: WorkerPool, tmp_path: Path) -> None:
    """With all that belongs to each: inner and outer optimizer, residuals, and where its rounds stand."""
    folder = tmp_path / "state"
    before = world4.run(saved, str(folder), env=HSDP, init_group=False)
    after = world4.run(resumed, str(folder), env=HSDP, init_group=False)
    at_border, end = before[0]
    assert not differences(before, after) and differences(at_border, end)
    for number, of_model in enumerate((folder, folder / "model_1")):
        assert find_damage(of_model) == []
        exported = AutoModelForCausalLM.from_pretrained(export_checkpoint(of_model, tmp_path / f"out{number}"))
        state = exported.state_dict()
        assert not differences(state, {name: at_border[number][name] for name in state})
    for error in world4.run_failing(resumed, str(folder), 1, env=HSDP, init_group=False):
        assert error.type_name == "CheckpointError"
        assert "holds 2 federated models, and this run has federated 1. Call plugin.federate" in error.message


def ended(order: tuple[int, int]) -> Any:
    """What `gather` reaches, and whether a state dict is given: in a round, after the first end, after both."""
    pair = Pair()
    accelerator, ours = pair.accelerator, torch.tensor([dist.get_rank()])
    stock = tiny_llama()
    pair.train(range(1))

    def seen() -> Any:
        taken = []
        for model in (*pair.models, stock):
            try:
                taken.append(bool(accelerator.get_state_dict(model)) or True)
            except RuntimeError as error:
                taken.append("steps into a round" in str(error) and None)
        return accelerator.gather(ours).tolist(), taken

    found = [seen()]
    for number in order:
        pair.rounds[number].finish()
        found.append(seen())
    replaced = {"gather", "reduce", "backward", "get_state_dict", "wait_for_everyone"} & set(vars(accelerator))
    return found, replaced


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_either_may_end_first(world4: WorkerPool, order: tuple[int, int]) -> None:
    ranks = world4.run(ended, order, env=HSDP, init_group=False)
    for rank, (found, replaced) in enumerate(ranks):
        own = [0, 1, 0, 1] if rank < 2 else [2, 3, 2, 3]
        half: list[Any] = [None, None, True]
        half[order[0]] = True
        assert found == [(own, [None, None, True]), (own, half), ([0, 1, 2, 3], [True, True, True])]
        assert not replaced


def evaluated_after_one_has_trained() -> Any:
    """The second alone is trained, to a border; the first, at its border ever since, has seen the backward passes too."""
    pair = Pair()
    for step in range(2):
        batch = collate(token_samples(1, seed=100 * step + dist.get_rank()))
        pair.accelerator.backward(pair.models[1](**batch).loss)
        pair.optimizers[1].step()
        pair.optimizers[1].zero_grad()
        pair.rounds[1].step()
    for model in pair.models:
        model.eval()
    return pair.accelerator.gather(torch.tensor([dist.get_rank()])).tolist()


def test_an_evaluation_at_both_borders_is_for_the_world(world4: WorkerPool) -> None:
    assert world4.run(evaluated_after_one_has_trained, env=HSDP, init_group=False) == [[0, 1, 2, 3]] * 4


def one_after_the_other(folder: str) -> Any:
    pair = Pair(num_models=1)
    pair.train(range(2))
    pair.rounds[0].finish()
    pair.accelerator.free_memory()
    model = tiny_llama(seed=7)
    model, optimizer = pair.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    pair.models, pair.optimizers = (model,), (optimizer,)
    pair.rounds = [pair.plugin.federate(pair.accelerator, model)]
    pair.train(range(2))
    pair.accelerator.save_state(folder)
    kept = pair.state()
    pair.train(range(2, 4))
    pair.accelerator.load_state(folder)
    return kept, pair.state()


def test_a_model_that_was_freed_is_in_no_checkpoint(world4: WorkerPool, tmp_path: Path) -> None:
    for kept, loaded in world4.run(one_after_the_other, str(tmp_path / "state"), env=HSDP, init_group=False):
        assert not differences(kept, loaded)
    assert not (tmp_path / "state" / "model_1").exists()

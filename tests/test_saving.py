"""What a federated run leaves on disk: the average, as `from_pretrained` loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

from hf_fedshard import Rounds, export_checkpoint
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import add_lora, full_state, tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes, tiny_trainer


State = dict[str, torch.Tensor]


class SavesInsideARound(TrainerCallback):
    """Calls `save_model` of its own accord, one step after a border."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.trainer.save_model(f"{args.output_dir}/inside")


def _train(folder: str, kind: str, inside: bool = False, **changes: Any) -> list[tuple[int, State]]:
    """Returns the steps of the borders, with this rank's group's model just before each average."""
    forget_meshes()
    model = tiny_llama(tied=kind == "tied")
    saver = SavesInsideARound()
    trainer = tiny_trainer(
        folder,
        model=add_lora(model) if kind == "lora" else model,
        sync_every=3,
        max_steps=6,
        after=(saver,) if inside else (),
        **changes,
    )
    saver.trainer = trainer
    borders = []
    original = Rounds.close

    def close(rounds: Rounds, *args: Any, **kwargs: Any) -> Any:
        borders.append((trainer.state.global_step, full_state(trainer.model)))
        return original(rounds, *args, **kwargs)

    with mock.patch.object(Rounds, "close", close):
        trainer.train()
    trainer.save_model(f"{folder}/final")
    return borders


def _averages(ranks: list[list[tuple[int, State]]]) -> dict[int, State]:
    """The groups' averages at the borders. The mean of two is rounded once, so it has one right value."""
    found = {}
    for (step, first), (other_step, second) in zip(ranks[0], ranks[2], strict=True):
        assert step == other_step
        assert any(not torch.equal(first[name], second[name]) for name in first)
        found[step] = {name: (first[name] + second[name]) / 2 for name in first}
    return found


def _check_loaded(folder: Path, average: State, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    parameters = dict(loaded.named_parameters())
    assert ("lm_head.weight" in parameters) != tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert set(parameters) == {name for name in average if "inv_freq" not in name}
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, average[name]), name


@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_final_model(world4: WorkerPool, tmp_path: Path, state_dict_type: str, kind: str) -> None:
    env = fsdp_launch_env(2, 2, state_dict_type)
    averages = _averages(world4.run(_train, str(tmp_path), kind, env=env, init_group=False))
    assert list(averages) == [3, 6]
    _check_loaded(tmp_path / "final", averages[6], kind == "tied")


@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_save_model_inside_a_round(world4: WorkerPool, tmp_path: Path, state_dict_type: str) -> None:
    """A border is made for it, and the directory holds that border's average, whatever Trainer was told to write."""
    env = fsdp_launch_env(2, 2, state_dict_type)
    averages = _averages(world4.run(_train, str(tmp_path), "llama", inside=True, env=env, init_group=False))
    assert 4 in averages
    _check_loaded(tmp_path / "inside", averages[4], tied=False)
    _check_loaded(tmp_path / "final", averages[6], tied=False)


def test_checkpoints(world4: WorkerPool, tmp_path: Path) -> None:
    """Asked for inside a round, written at its end."""
    changes = {"save_strategy": "steps", "save_steps": 2}
    env = fsdp_launch_env(2, 2)
    averages = _averages(world4.run(_train, str(tmp_path), "llama", env=env, init_group=False, **changes))
    written = {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")}
    assert written == {3, 6}
    for step in written:
        export_checkpoint(tmp_path / f"checkpoint-{step}", tmp_path / f"exported-{step}")
        _check_loaded(tmp_path / f"exported-{step}", averages[step], tied=False)


def test_final_model_of_fl_hsdp(world8: WorkerPool, tmp_path: Path) -> None:
    ranks = world8.run(_train, str(tmp_path), "llama", env=fsdp_launch_env(4, 2), init_group=False)
    averages = _averages([ranks[0], ranks[2], ranks[4]])
    _check_loaded(tmp_path / "final", averages[6], tied=False)


@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_adapter(world4: WorkerPool, tmp_path: Path, state_dict_type: str) -> None:
    from peft import PeftModel

    env = fsdp_launch_env(2, 2, state_dict_type)
    averages = _averages(world4.run(_train, str(tmp_path), "lora", env=env, init_group=False))
    loaded = dict(PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "final")).named_parameters())
    adapters = [name for name in averages[6] if "lora_" in name]
    assert len(adapters) == 2 * 2 * 2  # layers, projections, factors
    start = dict(add_lora(tiny_llama()).named_parameters())
    for name in adapters:
        assert torch.equal(loaded[name], averages[6][name]), name
        assert not torch.equal(loaded[name], start[name])
    assert not list((tmp_path / "final").glob("model*.safetensors")), "the base model is not copied"

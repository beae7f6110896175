"""The life of a Trainer with the callback: made, trained several times, broken off, beside other Trainers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from hf_fedshard import FedAvgCallback, cpu
from tests.harness.data import ListDataset, collate, token_samples
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes, tiny_arguments, tiny_trainer


FL_FSDP = fsdp_launch_env(2, 2)
LIMIT = 100.0


def run(world: WorkerPool, body: Any, *args: Any, **kwargs: Any) -> list[Any]:
    kwargs.setdefault("env", FL_FSDP)
    return world.run(body, *args, limit_seconds=LIMIT, **kwargs)


def weights(trainer: Trainer) -> torch.Tensor:
    """All parameters, gathered over the mesh they are sharded on."""
    parts = [parameter.detach() for parameter in trainer.model.parameters()]
    return torch.cat([(part.full_tensor() if isinstance(part, DTensor) else part).flatten() for part in parts])


def is_one_model(trainer: Trainer) -> bool:
    """Whether all ranks hold the same weights."""
    mine = weights(trainer)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def fsdp_ranks(trainer: Trainer) -> list[int]:
    """The ranks that the model is sharded over and replicated on, seen from this rank."""
    return sorted(trainer.model.lm_head.weight.device_mesh.mesh.flatten().tolist())


def group_ranks() -> list[int]:
    return [0, 1] if dist.get_rank() < 2 else [2, 3]


def num_rounds(trainer: Trainer) -> int:
    return max((int(row.get("fedshard/round", 0)) for row in trainer.state.log_history), default=0)


def bare_class(folder: str) -> Any:
    forget_meshes()
    trainer = Trainer(
        model=tiny_llama(),
        args=tiny_arguments(folder, max_steps=10),
        train_dataset=ListDataset(token_samples(24)),
        data_collator=collate,
        callbacks=[FedAvgCallback],
    )
    trainer.train()
    return is_one_model(trainer), num_rounds(trainer), fsdp_ranks(trainer) == group_ranks()


def test_bare_class(world4: WorkerPool, tmp_path: Path) -> None:
    # In new processes: on CPU the import has to prepare Accelerate, before the class is instantiated.
    for result in run(world4, bare_class, str(tmp_path), fresh=True):
        assert result == (True, 2, True)  # rounds of 8 and 2 steps


def several_trainings(folder: str) -> Any:
    forget_meshes()
    trainer = tiny_trainer(folder)
    found = []
    for _ in range(3):
        before = weights(trainer) if found else None
        trainer.train()
        changed = before is None or not torch.equal(before, weights(trainer))
        found.append((changed, is_one_model(trainer), num_rounds(trainer), fsdp_ranks(trainer) == group_ranks()))
    return found


def test_several_trainings(world4: WorkerPool, tmp_path: Path) -> None:
    for found in run(world4, several_trainings, str(tmp_path)):
        assert found == [(True, True, 2, True)] * 3


def trainers_in_a_row(folder: str, made_together: bool, same_arguments: bool) -> Any:
    forget_meshes()
    first = tiny_trainer(folder)
    args = first.args if same_arguments else None
    stock = first.accelerator.state.parallelism_config
    second = tiny_trainer(folder, sync_every=3, args=args) if made_together else None
    first.train()
    second = second or tiny_trainer(folder, sync_every=3, args=args)
    second.train()
    state = AcceleratorState()
    restored = type(state.parallelism_config).__name__, tuple(state.device_mesh.mesh_dim_names)
    plain = tiny_trainer(folder, federated=False, args=args)
    plain.train()
    return {
        "federated before": type(stock).__name__,
        "restored": restored,
        "second": (is_one_model(second), num_rounds(second), fsdp_ranks(second) == group_ranks()),
        "plain": (is_one_model(plain), num_rounds(plain), fsdp_ranks(plain)),
        "gathered": plain.accelerator.gather(torch.tensor([dist.get_rank()])).tolist(),
    }


@pytest.mark.parametrize(
    ("made_together", "same_arguments"),
    [
        (True, True),
        (False, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, False), (False, True))),
    ],
)
def test_trainers_in_a_row(world4: WorkerPool, tmp_path: Path, made_together: bool, same_arguments: bool) -> None:
    for found in run(world4, trainers_in_a_row, str(tmp_path), made_together, same_arguments):
        assert found == {
            "federated before": "FederatedParallelismConfig",
            "restored": ("ParallelismConfig", ("dp_replicate", "dp_shard")),
            "second": (True, 2, True),
            "plain": (True, 0, [0, 1, 2, 3]),
            "gathered": [0, 1, 2, 3],
        }


# On the same arguments: new ones make Trainer set Accelerate's state up anew.
def same_model_without_callback(folder: str) -> None:
    forget_meshes()
    first = tiny_trainer(folder)
    first.train()
    tiny_trainer(folder, federated=False, model=first.model, args=first.args).train()


def other_model_while_federated(folder: str) -> None:
    forget_meshes()
    first = tiny_trainer(folder)  # made and not trained: the federated mesh is in force
    tiny_trainer(folder, federated=False, args=first.args).train()


@pytest.mark.parametrize("body", [same_model_without_callback, other_model_while_federated])
def test_unaveraged_training_is_refused(world4: WorkerPool, tmp_path: Path, body: Any) -> None:
    for error in world4.run_failing(body, str(tmp_path), env=FL_FSDP, limit_seconds=LIMIT):
        assert error.type_name == "RuntimeError"
        assert "nothing averages the groups" in error.message


class Fail(TrainerCallback):
    def __init__(self, message: str = "out of luck") -> None:
        self.message = message
        self.times = 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and self.times:
            self.times -= 1
            raise RuntimeError(self.message)


def broken_off(folder: str) -> Any:
    forget_meshes()
    trainer = tiny_trainer(folder, after=(Fail,))
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    kind = type(trainer.accelerator.state.parallelism_config).__name__
    gathered = trainer.accelerator.gather(torch.tensor([dist.get_rank()])).tolist()
    trainer.train()
    return kind, gathered, is_one_model(trainer), num_rounds(trainer), trainer.state.global_step


def test_an_exception_puts_everything_back(world4: WorkerPool, tmp_path: Path) -> None:
    for found in run(world4, broken_off, str(tmp_path)):
        assert found == ("ParallelismConfig", [0, 1, 2, 3], True, 2, 6)


def smaller_batches(folder: str) -> Any:
    forget_meshes()
    message = "CUDA out of memory. Tried to allocate more than there is."
    # As if a batch of 4 did not fit.
    trainer = tiny_trainer(
        folder, after=(lambda: Fail(message),), auto_find_batch_size=True, per_device_train_batch_size=4
    )
    trainer.train()
    return trainer._train_batch_size < 4, is_one_model(trainer), num_rounds(trainer), trainer.state.global_step


def test_auto_find_batch_size(world4: WorkerPool, tmp_path: Path) -> None:
    for found in run(world4, smaller_batches, str(tmp_path)):
        assert found == (True, True, 2, 6)


def added_late(folder: str, bind: bool) -> Any:
    forget_meshes()
    cpu.install()
    trainer = tiny_trainer(folder, federated=False)
    callback = FedAvgCallback(num_groups=2, sync_every=4)
    trainer.add_callback(callback)
    if bind:
        callback.bind(trainer)
    trainer.train()
    return is_one_model(trainer), num_rounds(trainer), fsdp_ranks(trainer) == group_ranks()


def test_added_late(world4: WorkerPool, tmp_path: Path) -> None:
    for error in world4.run_failing(added_late, str(tmp_path), False, env=FL_FSDP, limit_seconds=LIMIT):
        assert "FedAvgCallback was added after its Trainer was made" in error.message
        assert "callback.bind(trainer)" in error.message
    for found in run(world4, added_late, str(tmp_path), True):
        assert found == (True, 2, True)


def make_model() -> Any:
    return tiny_llama()


def search(folder: str) -> Any:
    forget_meshes()
    trainer = tiny_trainer(folder, options={"model_init": make_model})
    first = trainer.accelerator
    # What `hyperparameter_search` does for each trial, without the package that draws the trials.
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
    found = []
    for number, learning_rate in enumerate((1e-3, 1e-2)):
        trial = SimpleNamespace(number=number, params={"learning_rate": learning_rate})
        with mock.patch("transformers.integrations.hp_params", trainer.hp_space):
            trainer.train(trial=trial)
        found.append((is_one_model(trainer), num_rounds(trainer), fsdp_ranks(trainer) == group_ranks()))
    return found, trainer.accelerator is not first, trainer.args.learning_rate


def test_hyperparameter_search(world4: WorkerPool, tmp_path: Path) -> None:
    for found in run(world4, search, str(tmp_path)):
        assert found == ([(True, 2, True)] * 2, True, 1e-2)

"""
The two sides of a cell: the federated run, and each group as a launch of its own without this package, the two of which
exchange their weights through files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_fedshard import FedAvgCallback, cpu
from tests.harness.data import Batch, ListDataset, collate
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.timeline import Timeline
from tests.harness.tiny_trainer import tiny_arguments
from tests.harness.trainer_runs import State

from .borders import Borders, trained_state
from .cell import NUM_GROUPS, Cell
from .cells import CELLS


DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "optim": "adamw_torch",
}


def launch_of(cell: Cell, size: int, groups: int) -> dict[str, str]:
    """
    Args:
        cell ([`Cell`]):
            The cell.
        size (`int`):
            Ranks of the launch.
        groups (`int`):
            Federation groups in it: 1 for a launch without a federation.

    Returns:
        `dict[str, str]`: The variables of the launch.
    """
    inner = {"dp_shard": 2, **cell.inner}
    replicas = size
    for axis in inner.values():
        replicas //= axis
    env = fsdp_launch_env(**{"dp_replicate": replicas, "dp_shard": inner["dp_shard"], **cell.launch})
    for axis in ("tp", "cp", "sp"):
        env[f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"] = str(inner.get(axis, 1))
    return env


def make_trainer(cell: Cell, folder: str, data: Any, callbacks: list[Any], **changes: Any) -> Trainer:
    """
    Args:
        cell ([`Cell`]):
            The cell.
        folder (`str`):
            Output folder.
        data (`Any`):
            Training data.
        callbacks (`list`):
            Ahead of the cell's own.
        changes (`Any`):
            Arguments of `TrainingArguments`.

    Returns:
        `Trainer`: The Trainer.
    """
    options = dict(cell.options())
    trainer_class = options.pop("trainer_class", Trainer)
    own = options.pop("callbacks", [])
    args = {**DEFAULTS, "max_steps": cell.steps, **cell.args, **changes}
    defaults: dict[str, Any] = {"data_collator": collate}
    if "model_init" not in options:
        defaults["model"] = cell.model()
    return trainer_class(
        **{**defaults, **options, "args": tiny_arguments(folder, **args), "train_dataset": data},
        callbacks=[*callbacks, *own],
    )


def federated(name: str, folder: str) -> dict[str, Any]:
    """
    Args:
        name (`str`):
            Name of a cell.
        folder (`str`):
            Output folder.

    Returns:
        `dict[str, Any]`: What a rank saw: `state`, `borders`, `batches`, `leaks`, ...
    """
    cell = CELLS[name]
    watcher = Borders(cell)
    ours = FedAvgCallback(num_groups=NUM_GROUPS, sync_every=cell.sync_every)
    trainer = make_trainer(cell, folder, cell.data(), [ours, watcher])
    watcher.trainer = trainer
    timeline = Timeline(NUM_GROUPS)
    batches: list[Batch] = []
    with recorded_batches(trainer, batches), timeline.of(trainer):
        result = (cell.train or plain_train)(trainer)
    if cell.check is not None:
        cell.check(trainer)
    return {
        "state": trained_state(trainer.model),
        "borders": watcher.states,
        "batches": batches,
        "result": result,
        "after": cell.after(trainer) if cell.after is not None else {},
        "leaks": timeline.crossing_inside_rounds(),
        "inside": len(timeline.inside_rounds()),
        "rounds": timeline.borders,
        "log": trainer.state.log_history,
    }


def group_alone(name: str, folder: str, exchange: str, group: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """
    One group as a stock launch.

    Args:
        name (`str`):
            Name of a cell.
        folder (`str`):
            Output folder.
        exchange (`str`):
            Folder in which the groups leave their weights for each other.
        group (`int`):
            Which group it is.
        samples (`list`):
            What the group drew in the federated run, in order.

    Returns:
        `dict[str, Any]`: `state`, `borders`, `result`, `drift`.
    """
    cell = CELLS[name]
    cpu.install()
    watcher = Borders(cell, Path(exchange), group)
    changes = {"train_sampling_strategy": "sequential", **cell.reference_args}
    trainer = make_trainer(cell, f"{folder}{group}", ListDataset(samples), [watcher], **changes)
    watcher.trainer = trainer
    if cell.mend is not None:
        cell.mend(trainer)
    result = (cell.train or plain_train)(trainer)
    return {
        "state": trained_state(trainer.model),
        "borders": watcher.states,
        "result": result,
        "drift": watcher.drift,
        "log": trainer.state.log_history,
    }


def unfederated(name: str, folder: str) -> None:
    """The script of a cell on the whole world, without the callback."""
    cell = CELLS[name]
    cpu.install()
    trainer = make_trainer(cell, folder, cell.data(), [])
    (cell.train or plain_train)(trainer)


def single(name: str, folder: str, state: State) -> dict[str, Any]:
    """
    What a single process that holds the weights gets.

    Args:
        name (`str`):
            Name of a cell.
        folder (`str`):
            Output folder.
        state (`dict[str, torch.Tensor]`):
            The weights that were trained.

    Returns:
        `dict[str, Any]`: From the cell's `after`.
    """
    cell = CELLS[name]
    assert cell.after is not None
    trainer = make_trainer(cell, folder, cell.data(), [])
    trainer.model.load_state_dict(state)
    return cell.after(trainer)


def plain_train(trainer: Trainer) -> None:
    """Trains."""
    trainer.train()


@contextlib.contextmanager
def recorded_batches(trainer: Any, batches: list[Batch]) -> Iterator[None]:
    """
    Keeps what a Trainer draws.

    Args:
        trainer (`Trainer`):
            The Trainer.
        batches (`list`):
            Where to.
    """
    original = trainer.get_batch_samples

    def recording(*args: Any, **kwargs: Any) -> Any:
        drawn, num_items = original(*args, **kwargs)
        batches.extend({key: value.detach().clone() for key, value in batch.items()} for batch in drawn)
        return drawn, num_items

    trainer.get_batch_samples = recording
    try:
        yield
    finally:
        trainer.get_batch_samples = original


def samples_of_group(ranks: list[dict[str, Any]], group: int, num_copies: int) -> list[dict[str, Any]]:
    """
    The samples of one group, in the order in which a launch of its ranks alone draws them without shuffling.

    Args:
        ranks (`list`):
            What [`federated`] returned.
        group (`int`):
            Which group.
        num_copies (`int`):
            Ranks in a row that are given the same data.

    Returns:
        `list`: Samples.
    """
    size = len(ranks) // NUM_GROUPS
    drawn = [rank["batches"] for rank in ranks[group * size : (group + 1) * size : num_copies]]
    found = []
    for batches in zip(*drawn, strict=True):
        for batch in batches:
            rows = {key: value.tolist() for key, value in batch.items()}
            found += [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    return found

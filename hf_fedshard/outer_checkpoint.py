"""The outer loop in a checkpoint: moments and anchors once, sharded as the parameters are, and where it stands."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from .averaging import ModelAverager
from .checkpoint_layout import OUTER_FOLDER, read_description
from .checkpoint_state import OuterState, Place
from .local_layers import load_local_layers
from .manifest import CheckpointError
from .outer_optimizers import format_options
from .parts import PART
from .residual_checkpoint import describe_residuals, load_residuals, take_residuals
from .selection import plain_name
from .shards import as_sharded, reshard, shards_of
from .shared_errors import together
from .state_values import decode, encode
from .tensor_store import load_tensors, stored_tensors


logger = logging.getLogger(__name__)

_SETTINGS = (
    "outer_learning_rate",
    "outer_options",
    "outer_schedule",
    "outer_warmup_rounds",
    "outer_schedule_rounds",
    "outer_max_norm",
)
_ANCHOR = "anchor"
_REST = "rest"


def take_outer_state(averager: ModelAverager, inside: bool = False) -> OuterState:
    """
    What the outer loop of a model must remember. Nothing is copied but the residuals of a lossy wire format; these make it
    collective over the replicas of a shard, see [`take_residuals`].

    At a border the anchor is the model, and not stored again, but for parameters with fewer bits than fp32, which round
    it, and for fragments whose turn it was not, which have left it. Inside a round all have, and it is stored, also where only
    a proximal term or the wire format needs it.

    Args:
        averager ([`ModelAverager`]):
            What averages the model.
        inside (`bool`, defaults to `False`):
            Whether a round is running.
    """
    # An evaluation ahead of it, at the same border say, has left modules gathered, and what is sharded is told by them.
    reshard(averager.model)
    outer = averager.outer
    local = frozenset(plain_name(name) for name in averager.trained.local_names())
    if averager.mesh.layout.num_groups == 1:
        return OuterState({}, {"optimizer": None}, local)
    residuals = take_residuals(averager)
    if outer.optimizer is None and not inside:
        return OuterState({}, {"optimizer": None, **describe_residuals(averager)}, local, residuals)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    on_cpu: set[str] = set()
    for name, anchor in outer.anchors.items():
        param = averager.model.get_parameter(name)
        plain = plain_name(name)
        if inside or param.dtype != anchor.dtype or name in outer.apart.names:
            tensors[f"{plain}/{_ANCHOR}"] = as_sharded(anchor, param)
        if name in outer.apart.remainders:
            tensors[f"{plain}/{_REST}"] = as_sharded(outer.apart.remainders[name], param)
        state = {} if outer.optimizer is None else outer.optimizer.state.get(anchor, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == anchor.shape:
                tensors[f"{plain}/{key}"] = as_sharded(value, param)
            elif isinstance(value, torch.Tensor):
                assert value.ndim == 0, key
                tensors[f"{plain}/{key}"] = value
                if value.device.type == "cpu":
                    on_cpu.add(key)
            elif value is not None:
                values[f"{plain}/{key}"] = encode(value, f"outer_optimizer: {key}")
    description = {
        "optimizer": None if outer.optimizer is None else averager.config.outer_optimizer,
        "settings": _settings(averager),
        "num_steps": outer.num_steps,
        "values": values,
        "on_cpu": sorted(on_cpu),
        **describe_residuals(averager),
    }
    return OuterState(tensors, description, local, residuals)


def load_outer_state(folder: Path, averager: ModelAverager) -> None:
    """
    Goes on with the outer loop of a checkpoint, whatever its groups and shards, or of this group's part of one. The model
    has been read and the outer loop begun anew from it, see [`~ModelAverager.restart`]. Without communication.

    Args:
        folder (`Path`):
            The checkpoint.
        averager ([`ModelAverager`]):
            What averages the model.

    Raises:
        CheckpointError: If it is of another outer optimizer.
    """
    saved = read_description(folder)
    inside = saved.get("kind") == PART
    stored = saved.get("outer") or {}
    outer, main = averager.outer, averager.mesh.is_main
    name = stored.get("optimizer")
    if averager.mesh.layout.num_groups == 1:
        return
    load_residuals(folder, saved, averager)
    if name is None and outer.optimizer is None:
        if inside:
            _read(folder, stored, averager, inside)
        return
    if name is None and saved["num_groups"] == 1:
        if main:
            logger.warning(
                "The checkpoint is of one group, which makes no outer steps: the outer loop begins with it."
            )
        return
    if name is None or outer.optimizer is None or name != averager.config.outer_optimizer:
        ours = averager.config.outer_optimizer
        raise CheckpointError(
            f"The checkpoint's outer optimizer is {name or 'plain averaging'}, this run's {ours}"
            f"{' as plain averaging' if outer.optimizer is None else ''}. Resume with the same outer_optimizer, or start "
            "from the checkpoint's weights."
        )
    changed = [
        f"{key}={now!r} (was {decode(stored['settings'][key])!r})"
        for key, now in _settings(averager).items()
        if decode(stored["settings"][key]) != now
    ]
    if changed and main:
        logger.warning("Outer settings were changed since the checkpoint: %s.", ", ".join(changed))
    _read(folder, stored, averager, inside)
    outer.num_steps = int(stored["num_steps"])


def resume_outer_state(folder: Path, averager: ModelAverager, place: Place) -> None:
    """
    [`load_local_layers`] and [`load_outer_state`] on all ranks: an error of one is raised by all. Collective over the world.

    Args:
        folder (`Path`):
            The checkpoint.
        averager ([`ModelAverager`]):
            What averages the model.
        place ([`Place`]):
            This rank's.

    Raises:
        CheckpointError: On every rank, if it cannot be loaded on any.
    """
    error: Exception | None = None
    try:
        load_local_layers(folder, averager, place)
        load_outer_state(folder, averager)
    except Exception as problem:  # whatever it is, the other ranks must not be left waiting
        error = problem
    together("Resuming", error)


def _settings(averager: ModelAverager) -> dict[str, Any]:
    config = averager.config
    return {name: getattr(config, name) for name in _SETTINGS} | {
        "outer_options": format_options(config.outer_options)
    }


def _read(folder: Path, stored: dict[str, Any], averager: ModelAverager, inside: bool) -> None:
    outer = averager.outer
    names = {plain_name(name): name for name in outer.anchors}
    entries = stored_tensors(folder / OUTER_FOLDER) if (folder / OUTER_FOLDER).exists() else {}
    if inside:
        _keep_anchors(
            folder, {entry.rpartition("/")[0] for entry in entries if entry.endswith(f"/{_ANCHOR}")}, averager
        )
    wanted: dict[str, torch.Tensor] = {}
    state: dict[Any, dict[str, Any]] = {}
    # Of the parameters, which copies from host memory go to: anchors may lie in it, and what is read there has to be pinned too.
    shards = shards_of({name: averager.model.get_parameter(name) for name in outer.anchors})
    devices = {outer.anchors[name]: shard.device for name, shard in shards.items()}
    for entry, tensor in entries.items():
        plain, _, key = entry.rpartition("/")
        if plain not in names:
            raise CheckpointError(
                f"The outer state in {folder} is of {plain}, which this run does not average. Freeze and select the "
                "parameters, and set proximal_mu and wire_format, as in the run that was saved."
            )
        anchor = outer.anchors[names[plain]]
        param = averager.model.get_parameter(names[plain])
        if key == _ANCHOR:
            wanted[entry] = as_sharded(anchor, param)
            outer.apart.names.add(names[plain])  # until it is stepped: another checkpoint may be made ahead of that
        elif tensor.shape == param.shape:
            own = outer.memory.copy(torch.empty_like(anchor, dtype=tensor.dtype), devices[anchor])
            if key == _REST:
                outer.apart.remainders[names[plain]] = own
            else:
                state.setdefault(anchor, {})[key] = own
            wanted[entry] = as_sharded(own, param)
        else:
            device = "cpu" if key in stored["on_cpu"] else devices[anchor]
            wanted[entry] = state.setdefault(anchor, {})[key] = torch.empty((), dtype=tensor.dtype, device=device)
    if wanted:
        load_tensors(wanted, folder / OUTER_FOLDER)
    if outer.optimizer is not None:
        fresh = outer.fresh_state()
        for anchor, held in state.items():
            for key, value in fresh.items():
                if key in held:
                    continue
                if value.ndim:
                    held[key] = outer.memory.copy(torch.full_like(anchor, float(value)), devices[anchor])
                else:
                    held[key] = value.clone()
    for entry, value in stored.get("values", {}).items():
        plain, _, key = entry.rpartition("/")
        state.setdefault(outer.anchors[names[plain]], {})[key] = decode(value)
    if outer.optimizer is not None:
        # What was made at construction is replaced, and stays for parameters that the checkpoint did not average.
        outer.optimizer.state.update(state)


def _keep_anchors(folder: Path, stored: set[str], averager: ModelAverager) -> None:
    """Inside a round exactly the stored anchors hold: what began to train in it gets one at the next border."""
    outer = averager.outer
    if outer.anchors and not stored:
        raise CheckpointError(
            f"{folder} was saved inside a round without the model that the round began with, which proximal_mu="
            f"{averager.config.proximal_mu} or wire_format={averager.config.wire_format} needs. Resume with the proximal_mu "
            "and the wire_format of the run that was saved, and change them at the next checkpoint."
        )
    outer.forget([name for name in outer.anchors if plain_name(name) not in stored])

"""Writes and reads a federated checkpoint: the averaged weights once, each group's optimizer, schedule and scaler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .checkpoint_layout import (
    DESCRIPTION_NAME,
    FORMAT,
    LOCAL_PREFIX,
    MODEL_FOLDER,
    OUTER_FOLDER,
    RESIDUAL_PREFIX,
    group_folder,
    read_description,
)
from .checkpoint_state import GroupState, OuterState, Place
from .manifest import CheckpointError, read_json, write_json
from .optimizer_state import parameter_names, put_optimizer_state, take_optimizer_state
from .reshape import nearest_group
from .selection import plain_name
from .shards import persistent_buffers, reshard
from .shared_errors import together
from .state_values import decode, encode
from .tensor_store import load_tensors, save_tensors, stored_tensors
from .versions import versions


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """
    The tensors that are a model's state in a checkpoint, aliasing it: parameters and persistent buffers. Of a PEFT
    model the adapters and whatever else trains; its base model is where the run got it from.

    Args:
        model (`nn.Module`):
            The prepared model; it is resharded.
    """
    reshard(model)
    adapters = set(getattr(model, "peft_config", None) or ())
    tensors = {}
    for name, param in model.named_parameters():
        if not adapters or param.requires_grad or adapters & set(name.split(".")):
            tensors[plain_name(name)] = param.detach()
    if not adapters:
        tensors |= {plain_name(name): buffer for name, buffer in persistent_buffers(model).items()}
    return tensors


def save_federation(
    folder: Path,
    model: nn.Module,
    state: GroupState,
    place: Place,
    description: Mapping[str, Any],
    scope: dist.ProcessGroup | None = None,
    outer: OuterState | None = None,
) -> dict[str, int]:
    """
    Writes a model and the groups' states: at a border, collective over the world; inside a round one group's alone,
    collective over the group.

    Order on every rank: what all ranks of the scope hold together, over the scope, the model and then the outer loop's;
    each group's optimizer tensors, local layers and residuals, inside the group; one agreement over the scope. A rank that fails in
    one of them takes part in the next, so nobody waits for it.

    Args:
        folder (`Path`):
            The checkpoint.
        model (`nn.Module`):
            The prepared model; all ranks of the scope hold the same bits.
        state ([`GroupState`]):
            This group's.
        place ([`Place`]):
            This rank's.
        description (`Mapping[str, Any]`):
            More about the run: `round`, `global_step`, `sync_every`.
        scope (`ProcessGroup`, *optional*):
            The ranks that save together: `None` for the world, or the group of `place`.
        outer ([`OuterState`], *optional*):
            The outer loop's; by default there is none.

    Returns:
        `dict[str, int]`: crc32 of the files that this rank has written, by path in `folder`.

    Raises:
        CheckpointError: On every rank, if any rank cannot write.
    """
    written: dict[str, int] = {}
    error: BaseException | None = None
    try:
        taken = _take(model, state)
    except ValueError as problem:
        error = problem
    # Before the first collective: a state that cannot be stored is found on some ranks only, after skipped steps say.
    together("Saving a checkpoint", error, scope)
    tensors, values = taken
    outer = outer or OuterState()
    everything = model_tensors(model)
    shared = {name: tensor for name, tensor in everything.items() if name not in outer.local}
    tensors |= {LOCAL_PREFIX + name: everything[name] for name in everything if name in outer.local}
    tensors |= {RESIDUAL_PREFIX + name: tensor for name, tensor in outer.residuals.items()}
    try:
        for part, held in ((MODEL_FOLDER, shared), (OUTER_FOLDER, outer.tensors)):
            checksums = save_tensors(held, folder / part, scope) if held else {}
            written |= {f"{part}/{name}": crc32 for name, crc32 in checksums.items()}
    except CheckpointError as problem:
        error = problem
    # The failure of a collective store is every rank's, so all take the same way here.
    if error is None:
        own = group_folder(place.group_index)
        try:
            checksums = save_tensors(tensors, folder / own, place.group)
            written |= {f"{own}/{name}": crc32 for name, crc32 in checksums.items()}
            if place.group.rank() == 0:
                write_json(folder / own / "state.json", values)
            if dist.get_rank(scope) == 0:
                more = {"outer": dict(outer.description), "local": sorted(outer.local)}
                write_json(folder / DESCRIPTION_NAME, {**_describe(model, place), **more, **description})
        except (CheckpointError, OSError, ValueError) as problem:
            error = problem
    together("Saving a checkpoint", error, scope)
    return written


def load_model(
    folder: Path, model: nn.Module, place: Place, is_local: Callable[[str], bool] = lambda name: True
) -> None:
    """
    Reads a checkpoint's weights and buffers into a model of any shape of mesh. Without communication.

    What every group had for itself (`local_parameters`) is read from the group at the same place in the row of groups, and
    what is averaged from now on from group 0, so that all groups begin with one.

    Args:
        folder (`Path`):
            The checkpoint.
        model (`nn.Module`):
            The prepared model.
        place ([`Place`]):
            This rank's.
        is_local (`Callable[[str], bool]`, *optional*):
            Which names are local in this run; by default all that were.

    Raises:
        CheckpointError: If the checkpoint is of another model; the message names what differs.
    """
    tensors = model_tensors(model)
    stored = stored_tensors(folder / MODEL_FOLDER)
    description = read_description(folder)
    local = {name for name in description.get("local", ()) if name in tensors}
    missing, foreign = sorted(set(tensors) - set(stored) - local), sorted(set(stored) - set(tensors))
    if missing or foreign:
        parts = [f"{len(missing)} tensors of the model are not in it, first {missing[0]}"] if missing else []
        parts += [f"{len(foreign)} of its tensors are not in the model, first {foreign[0]}"] if foreign else []
        raise CheckpointError(f"The checkpoint {folder} is of another model: {' and '.join(parts)}.")
    load_tensors({name: tensor for name, tensor in tensors.items() if name not in local}, folder / MODEL_FOLDER)
    source = nearest_group(place.group_index, place.layout.num_groups, int(description["num_groups"]))
    for name_is_local, origin in ((True, source), (False, 0)):
        names = sorted(name for name in local if is_local(name) == name_is_local)
        if names:  # the part of one group has no folder of group 0
            load_tensors({LOCAL_PREFIX + name: tensors[name] for name in names}, folder / group_folder(origin))


def load_group_state(folder: Path, model: nn.Module, state: GroupState, place: Place, rule: str) -> None:
    """
    Reads this group's optimizers, schedules and scaler. Without communication.

    With as many groups as the checkpoint has, each takes its own state, whatever its shards. With another number they
    follow a rule: `"nearest"`, the group at the same place in the row of groups; `"average"`, the mean of all groups'
    moments, with the counters, schedule and scaler of the nearest.

    Args:
        folder (`Path`):
            The checkpoint.
        model (`nn.Module`):
            The prepared model.
        state ([`GroupState`]):
            What to read into.
        place ([`Place`]):
            This rank's.
        rule (`str`):
            `"nearest"` or `"average"`.

    Raises:
        CheckpointError: If something cannot be carried over; the message names it.
    """
    stored_groups = int(read_description(folder)["num_groups"])
    nearest = nearest_group(place.group_index, place.layout.num_groups, stored_groups)
    reshaped = stored_groups != place.layout.num_groups
    sources = range(stored_groups) if reshaped and rule == "average" else [nearest]
    values = read_json(folder / group_folder(nearest) / "state.json")
    _check_others(state, values)
    names = parameter_names(model)
    if len(values["optimizers"]) != len(state.optimizers):
        raise CheckpointError(
            f"The checkpoint holds {len(values['optimizers'])} optimizers, this run has {len(state.optimizers)}."
        )
    for index, optimizer in enumerate(state.optimizers):
        folders = [folder / group_folder(source) for source in sources]
        put_optimizer_state(optimizer, names, values["optimizers"][index], folders, prefix=f"{index}/")
    for name, value in values["others"].items():
        state.others[name].load_state_dict(decode(value))


def _take(model: nn.Module, state: GroupState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    reshard(model)
    names = parameter_names(model)
    tensors: dict[str, torch.Tensor] = {}
    descriptions = []
    for index, optimizer in enumerate(state.optimizers):
        taken = take_optimizer_state(optimizer, names)
        tensors |= {f"{index}/{name}": tensor for name, tensor in taken.tensors.items()}
        descriptions.append(taken.description)
    others = {
        name: encode(item.state_dict(), f"{name} ({type(item).__name__})") for name, item in state.others.items()
    }
    return tensors, {"optimizers": descriptions, "others": others}


def _describe(model: nn.Module, place: Place) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "num_groups": place.layout.num_groups,
        "replicate_size": place.layout.replicate_size,
        "inner": place.layout.inner,
        "world_size": place.layout.world_size,
        "adapters": sorted(getattr(model, "peft_config", None) or ()),
        "versions": versions(),
    }


def _check_others(state: GroupState, values: Mapping[str, Any]) -> None:
    missing, foreign = set(state.others) - set(values["others"]), set(values["others"]) - set(state.others)
    if missing or foreign:
        parts = [f"this run has {', '.join(sorted(missing))}, the checkpoint has not"] if missing else []
        parts += [f"the checkpoint has {', '.join(sorted(foreign))}, this run has not"] if foreign else []
        raise CheckpointError(f"The state cannot be carried over: {'; '.join(parts)}.")

"""The state of a group's optimizer: taken apart into tensors and plain values, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .manifest import CheckpointError
from .selection import plain_name
from .state_values import decode, encode
from .tensor_store import StoredTensor, load_tensors, stored_tensors
from .tensors import accumulation_dtype


@dataclass(frozen=True)
class OptimizerState:
    """
    One optimizer's state on one rank.

    Args:
        tensors (`dict[str, torch.Tensor]`):
            `<parameter>/<state>`: the moments, sharded as the parameters are, and counters that are tensors.
        description (`dict[str, Any]`):
            The rest, for JSON: class, parameter groups with their hyper-parameters, plain values, where counters live.
    """

    tensors: dict[str, torch.Tensor]
    description: dict[str, Any]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """
    The name of each parameter, by its `id`.

    Args:
        model (`nn.Module`):
            The prepared model, resharded.
    """
    return {id(param): plain_name(name) for name, param in model.named_parameters()}


def take_optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerState:
    """
    Takes an optimizer's state apart. Nothing is copied.

    Args:
        optimizer (`torch.optim.Optimizer`):
            The inner optimizer, not Accelerate's wrapper.
        names (`Mapping[int, str]`):
            From [`parameter_names`].

    Raises:
        ValueError: If it keeps something that cannot be stored; the message names it.
    """
    kind = type(optimizer).__name__
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    on_cpu: set[str] = set()
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for param, state in optimizer.state.items():
        if id(param) not in stepped:
            continue  # left from before FSDP2 exchanged the parameters
        if id(param) not in names:
            raise ValueError(
                f"{kind} keeps state of a parameter of shape {tuple(param.shape)} that is not in the model."
            )
        for key, value in state.items():
            name = f"{names[id(param)]}/{key}"
            if isinstance(value, DTensor):
                tensors[name] = value.detach()
            elif isinstance(value, torch.Tensor) and value.ndim == 0:
                tensors[name] = value.detach()
                if value.device.type == "cpu" and param.device.type != "cpu":
                    on_cpu.add(key)
            elif isinstance(value, torch.Tensor):
                raise ValueError(
                    f"{kind} keeps {name} as a plain tensor of shape {tuple(value.shape)} on each rank. A checkpoint "
                    "can hold state that is sharded like its parameter (a DTensor), or a single number. Use an "
                    "optimizer of torch.optim."
                )
            else:
                values[name] = encode(value, f"{kind}: {name}")
    groups = [
        {
            "names": [names[id(param)] for param in group["params"]],
            "options": {key: encode(value, f"{kind}: {key}") for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return OptimizerState(tensors, {"class": kind, "groups": groups, "values": values, "on_cpu": sorted(on_cpu)})


def put_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    description: Mapping[str, Any],
    folders: Sequence[Path],
    prefix: str = "",
) -> None:
    """
    Puts a stored state into an optimizer, in place of what it holds. Without communication.

    Args:
        optimizer (`torch.optim.Optimizer`):
            The inner optimizer.
        names (`Mapping[int, str]`):
            From [`parameter_names`].
        description (`Mapping[str, Any]`):
            From the group whose hyper-parameters are taken.
        folders (`Sequence[Path]`):
            The tensors of one group, or those of several to be averaged: sharded state by its mean over the groups that
            have it, counters by their maximum.
        prefix (`str`, *optional*):
            What stands before the names of this optimizer's tensors.

    Raises:
        CheckpointError: If the optimizer is another one or steps other parameters; the message names them.
    """
    _check_same(optimizer, names, description)
    stores = [
        {
            name.removeprefix(prefix): tensor
            for name, tensor in stored_tensors(folder).items()
            if name.startswith(prefix)
        }
        for folder in folders
    ]
    by_parameter: dict[str, dict[str, StoredTensor]] = {}
    for store in stores:
        for name, tensor in store.items():
            by_parameter.setdefault(name.rpartition("/")[0], {}).setdefault(name.rpartition("/")[2], tensor)
    state: dict[Any, dict[str, Any]] = {}
    for group, stored_group in zip(optimizer.param_groups, description["groups"], strict=True):
        for param in group["params"]:
            name = names[id(param)]
            if name in by_parameter:
                on_cpu = set(description["on_cpu"])
                if not (group.get("capturable") or group.get("fused")):
                    on_cpu.add("step")  # torch's own rule, whatever device the checkpoint comes from
                state[param] = _templates(param, name, by_parameter[name], on_cpu)
        options = {key: decode(value) for key, value in stored_group["options"].items()}
        for key, value in options.items():
            held = group.get(key)
            # A capturable optimizer reads its learning rate from the device.
            group[key] = (
                value.to(held.device) if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) else value
            )
    flat = {f"{names[id(param)]}/{key}": value for param, own in state.items() for key, value in own.items()}
    _read(flat, folders, stores, prefix)
    for name, value in description["values"].items():
        parameter, _, key = name.rpartition("/")
        for group in optimizer.param_groups:
            for param in group["params"]:
                if names[id(param)] == parameter:
                    state.setdefault(param, {})[key] = decode(value)
    # Not `optimizer.load_state_dict`: it casts the state to the parameter's dtype.
    optimizer.state.clear()
    optimizer.state.update(state)


def _check_same(optimizer: torch.optim.Optimizer, names: Mapping[int, str], description: Mapping[str, Any]) -> None:
    kind = type(optimizer).__name__
    if description["class"] != kind:
        raise CheckpointError(
            f"The checkpoint holds the state of {description['class']}, but this run steps with {kind}. Resume with "
            "the same optimizer, or start from the checkpoint's weights."
        )
    stored = [group["names"] for group in description["groups"]]
    now = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    if stored == now:
        return
    gone = sorted(set(sum(stored, [])) - set(sum(now, [])))
    new = sorted(set(sum(now, [])) - set(sum(stored, [])))
    what = [f"{_few(gone)} are trained in the checkpoint only"] if gone else []
    what += [f"{_few(new)} are trained in this run only"] if new else []
    raise CheckpointError(
        "The optimizer's parameters are not those of the checkpoint: "
        f"{'; '.join(what) or 'they are the same, but divided into other parameter groups'}. Freeze and group the "
        "parameters as in the run that was saved, or start from the checkpoint's weights."
    )


def _templates(
    param: torch.Tensor, name: str, stored: Mapping[str, StoredTensor], on_cpu: set[str]
) -> dict[str, torch.Tensor]:
    """Tensors for the state of one parameter, to be read into."""
    own: dict[str, torch.Tensor] = {}
    for key, tensor in stored.items():
        if not tensor.shape and (param.shape or key == "step"):
            own[key] = torch.empty((), dtype=tensor.dtype, device="cpu" if key in on_cpu else param.device)
        elif tensor.shape == param.shape:
            own[key] = torch.empty_like(param, dtype=tensor.dtype, requires_grad=False)
        else:
            raise CheckpointError(
                f"{name}/{key} has the shape {tuple(tensor.shape)}, unlike its parameter {tuple(param.shape)}."
            )
    return own


def _read(
    flat: Mapping[str, torch.Tensor],
    folders: Sequence[Path],
    stores: Sequence[Mapping[str, StoredTensor]],
    prefix: str,
) -> None:
    if len(folders) == 1:
        load_tensors({prefix + name: tensor for name, tensor in flat.items()}, folders[0])
        return
    for name, tensor in flat.items():
        holders = [folder for folder, store in zip(folders, stores, strict=True) if name in store]
        # One tensor and one group at a time: all groups' states together would not fit.
        part = torch.empty_like(tensor)
        total: torch.Tensor | None = None
        merge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add if tensor.ndim else torch.maximum
        for folder in holders:
            load_tensors({prefix + name: part}, folder)
            wide = part.to(accumulation_dtype(part.dtype)).clone()
            total = wide if total is None else merge(total, wide)
        assert total is not None
        with torch.no_grad():
            tensor.copy_(total / len(holders) if tensor.ndim else total)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

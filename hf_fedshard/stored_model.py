"""The weights in a checkpoint, read by one process: where each tensor of the model lies, and the mean of what groups hold."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch

from .checkpoint_layout import LOCAL_PREFIX, MODEL_FOLDER, group_folder
from .group_checkpoint import BUFFERS_FOLDER
from .tensor_store import StoredTensor, load_tensors, stored_tensors
from .tensors import accumulation_dtype


# Of each tensor of the model: folders with stored tensors, and its name in them.
Sources: TypeAlias = dict[str, list[tuple[Path, str]]]


def sources_at_border(checkpoint: Path, group: int | None) -> Sources:
    """
    Where each tensor of the model lies: with the weights, or with a group's own layers.

    Args:
        checkpoint (`Path`):
            A checkpoint of a border.
        group (`int`, *optional*):
            Whose own layers are taken; `None` where the groups have none.
    """
    sources = {name: [(checkpoint / MODEL_FOLDER, name)] for name in stored_tensors(checkpoint / MODEL_FOLDER)}
    return sources if group is None else sources | _own_layers(checkpoint, group)


def sources_in_parts(parts: list[Path], group: int) -> Sources:
    """
    What makes one model of the groups': their parameters, and the buffers of all ranks. Of what each group has for itself,
    that of one group.

    Args:
        parts (`list[Path]`):
            The parts of all groups, in their order.
        group (`int`):
            Whose own layers are taken.
    """
    buffers: Sources = {}
    for part in parts:
        for name in stored_tensors(part / BUFFERS_FOLDER):
            buffers.setdefault(name.partition("/")[2], []).append((part / BUFFERS_FOLDER, name))
    sources = {
        name: buffers.get(name) or [(part / MODEL_FOLDER, name) for part in parts]
        for name in stored_tensors(parts[0] / MODEL_FOLDER)
    }
    for name, own in _own_layers(parts[group], group).items():
        of_ranks = [found for found in buffers.get(name, ()) if found[0].is_relative_to(parts[group])]
        sources[name] = of_ranks or own
    return sources


def read_sources(sources: Sources, dtype: str | None) -> dict[str, torch.Tensor]:
    """
    The tensors of a model; of several sources the mean, as a border would have made it.

    Args:
        sources (`Sources`):
            Where they lie.
        dtype (`str`, *optional*):
            Of floating-point tensors; by default the stored one.

    Returns:
        `dict[str, torch.Tensor]`: By name, whole, on CPU.
    """
    indices = {folder: stored_tensors(folder) for found in sources.values() for folder, _ in found}
    state: dict[str, torch.Tensor] = {}
    whole: dict[Path, dict[str, torch.Tensor]] = {}
    for name, found in sources.items():
        folder, stored_name = found[0]
        stored = indices[folder][stored_name]
        floating = stored.dtype.is_floating_point
        kind = getattr(torch, dtype) if dtype is not None and floating else stored.dtype
        if len(found) > 1 and floating:
            state[name] = _mean(found, stored).to(kind)
        else:  # counters are those of the first rank
            state[name] = whole.setdefault(folder, {})[stored_name] = torch.empty(stored.shape, dtype=kind)
    for folder, tensors in whole.items():
        load_tensors(tensors, folder)
    return state


def _own_layers(folder: Path, group: int) -> Sources:
    own = folder / group_folder(group)
    return {
        name.removeprefix(LOCAL_PREFIX): [(own, name)] for name in stored_tensors(own) if name.startswith(LOCAL_PREFIX)
    }


def _mean(sources: list[tuple[Path, str]], stored: StoredTensor) -> torch.Tensor:
    total = torch.zeros(stored.shape, dtype=accumulation_dtype(stored.dtype))
    for folder, name in sources:
        part_of_sum = torch.empty_like(total)
        load_tensors({name: part_of_sum}, folder)
        total += part_of_sum
    return total / len(sources)

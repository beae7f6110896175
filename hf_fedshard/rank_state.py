"""What belongs to one process alone: its random states and its position in the data, as JSON."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch

from .manifest import FEDERATION_FOLDER, read_json, write_json
from .state_values import decode, encode


def save_rank_state(folder: Path, rank: int, more: dict[str, Any]) -> str:
    """
    Writes the state of this process.

    Args:
        folder (`Path`):
            The checkpoint.
        rank (`int`):
            Its rank.
        more (`dict[str, Any]`):
            What else to keep; see [`encode`].

    Returns:
        `str`: The file, by its path in the checkpoint.
    """
    kind, keys, *rest = numpy.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, numpy.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        **more,
    }
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state()
    name = _file(rank)
    write_json(folder / name, encode(state, f"the state of rank {rank}"))
    return name


def load_rank_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """
    Restores the random states of this process.

    Args:
        folder (`Path`):
            The checkpoint.
        rank (`int`):
            Its rank.

    Returns:
        `dict[str, Any]` or `None`: The rest; `None` if the checkpoint was saved by fewer ranks.
    """
    if not (folder / _file(rank)).exists():
        return None
    state: dict[str, Any] = decode(read_json(folder / _file(rank)))
    random.setstate(state.pop("python"))
    kind, keys, *rest = state.pop("numpy")
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state.pop("torch"))
    device = state.pop("device", None)
    if device is not None and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(device)
    return state


def _file(rank: int) -> str:
    return f"{FEDERATION_FOLDER}/ranks/{rank:05d}.json"

"""One group's part of a checkpoint, saved and read inside a round: nothing here waits for another group."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .checkpoint import save_federation
from .checkpoint_folder import SAVING, put_in_place, sync_tree
from .checkpoint_state import GroupState, OuterState, Place
from .manifest import FEDERATION_FOLDER, CheckpointError, read_json, write_json, write_manifest
from .parts import PART, all_there, complete, part_name
from .selection import plain_name
from .shards import persistent_buffers
from .shared_errors import together
from .state_values import decode, encode
from .tensor_store import load_tensors, save_tensors


logger = logging.getLogger(__name__)

BUFFERS_FOLDER = f"{FEDERATION_FOLDER}/buffers"
_PROGRESS_FOLDER = f"{FEDERATION_FOLDER}/progress"
_WRITING = ".writing-"
_CLAIM = "claimed"


def save_part(
    final: Path,
    model: nn.Module,
    state: GroupState,
    place: Place,
    description: Mapping[str, Any],
    progress: Mapping[str, Any],
    write_more: Callable[[Path], None],
    outer: OuterState | None = None,
) -> None:
    """
    Saves this rank's group by itself: weights, buffers of each rank, optimizers, schedules, scaler, the outer loop as it
    was at the last border, and where each rank stands. Collective over the group.

    The parts meet in a folder aside, each named when it is complete. Whichever group finds all of them there gives the
    folder its name; before that nobody takes it for a checkpoint.

    Order on every rank of the group: an agreement about the folder, the model, the optimizers and an agreement
    ([`save_federation`]), the buffers, an agreement, the checksums, an agreement. A rank that fails reaches the next one.

    Args:
        final (`Path`):
            The checkpoint, the same in all groups.
        model (`nn.Module`):
            The prepared model.
        state ([`GroupState`]):
            This group's.
        place ([`Place`]):
            This rank's.
        description (`Mapping[str, Any]`):
            About the run: `round`, `global_step`, `sync_every`.
        progress (`Mapping[str, Any]`):
            Where this rank stands, see [`encode`].
        write_more (`Callable`):
            Called with the folder of the part on every rank, writes files besides.
        outer ([`OuterState`], *optional*):
            The outer loop's, the same in all groups; by default there is none.

    Raises:
        CheckpointError: On every rank of the group, if any cannot write.
    """
    group, leads = place.group, place.group.rank() == 0
    parent = final.parent / f"{SAVING}{final.name}"
    part = parent / final.name / part_name(place.group_index)
    aside = part.with_name(_WRITING + part.name)
    error: Exception | None = None
    if leads:
        try:
            for path in (aside, part):  # of a run that was killed while it saved
                shutil.rmtree(path, ignore_errors=True)
            aside.mkdir(parents=True)
        except OSError as problem:
            error = problem
    together("Saving a checkpoint", error, group)
    written = save_federation(aside, model, state, place, {**description, "kind": PART}, scope=group, outer=outer)
    try:
        # Inside a round each rank has buffers of its own, BatchNorm statistics for example.
        checksums = save_tensors(_buffers(model, group.rank()), aside / BUFFERS_FOLDER, group)
        written |= {f"{BUFFERS_FOLDER}/{name}": crc32 for name, crc32 in checksums.items()}
        write_json(aside / _progress_file(dist.get_rank()), encode(dict(progress), "the state of a rank"))
        write_more(aside)
    except Exception as problem:
        error = problem
    together("Saving a checkpoint", error, group)
    everyone: list[dict[str, int]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, written, group=group)
    if leads:
        try:
            write_manifest(aside, {name: crc32 for ranks in everyone for name, crc32 in ranks.items()})
            sync_tree(aside)
            os.rename(aside, part)
            _finish(parent, final)
        except Exception as problem:
            error = problem
    together("Saving a checkpoint", error, group)


def load_buffers(part: Path, model: nn.Module, rank: int) -> None:
    """
    Reads the buffers of one rank. Without communication.

    Args:
        part (`Path`):
            This group's part of the checkpoint.
        model (`nn.Module`):
            The prepared model.
        rank (`int`):
            The rank inside the group.

    Raises:
        CheckpointError: If they are not there.
    """
    load_tensors(_buffers(model, rank), part / BUFFERS_FOLDER)


def load_progress(part: Path) -> dict[str, Any]:
    """
    Where this rank stood.

    Args:
        part (`Path`):
            This group's part of the checkpoint.

    Raises:
        CheckpointError: If it is not there.
    """
    progress: dict[str, Any] = decode(read_json(part / _progress_file(dist.get_rank())))
    return progress


def _finish(parent: Path, final: Path) -> None:
    """Makes the parts the checkpoint, in the group that finds all of them first."""
    folder = parent / final.name
    try:
        if not all_there(folder):
            logger.info("Saved a part of %s; the other groups have not yet.", final)
            return
        (parent / _CLAIM).mkdir()  # two groups may see the last part at once; one of them makes the folder
    except FileExistsError:
        return
    except (OSError, CheckpointError):
        # This group's part is in the folder: if that is gone between two looks, another group has found all parts there
        # and has given it its name.
        if folder.exists():
            raise
        return
    # The claim of the group that has finished may be deleted, and made again here, before the folder around it is.
    if complete(folder):
        put_in_place(folder, final)
    shutil.rmtree(parent, ignore_errors=True)


def _buffers(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    return {f"{rank:05d}/{plain_name(name)}": buffer for name, buffer in persistent_buffers(model).items()}


def _progress_file(rank: int) -> str:
    return f"{_PROGRESS_FOLDER}/{rank:05d}.json"

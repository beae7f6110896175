"""Which checkpoints there are, and whether one is whole and can be resumed from."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist

from .checkpoint_layout import DESCRIPTION_NAME
from .manifest import MANIFEST_NAME, CheckpointError, find_damage, has_manifest
from .parts import PART, kind_of


_NAME = re.compile(r"^checkpoint[-_](\d+)$")  # Trainer's, and Accelerate's automatic ones


def list_checkpoints(run_dir: Path) -> list[Path]:
    """
    The folders `checkpoint-<step>` (under Accelerate `checkpoint_<number>`), highest first.

    Args:
        run_dir (`Path`):
            Where to look.
    """
    if not run_dir.is_dir():
        return []
    found = [path for path in run_dir.iterdir() if _NAME.match(path.name) and path.is_dir()]
    return sorted(found, key=number_of, reverse=True)


def number_of(path: Path) -> int:
    """
    The number in the name of a checkpoint.

    Args:
        path (`Path`):
            From [`list_checkpoints`].
    """
    match = _NAME.match(path.name)
    assert match is not None
    return int(match.group(1))


def check_whole(folder: Path, how: str = "resume_from_checkpoint={!r}") -> None:
    """
    Makes sure that a checkpoint is complete and can be resumed from. Collective over the world; the ranks share the
    reading of its files.

    Args:
        folder (`Path`):
            The checkpoint, the same on all ranks.
        how (`str`, *optional*):
            How to write that another one is to be used, for the message.

    Raises:
        CheckpointError: On every rank, if not: it names the files, and a checkpoint that can be used instead.
    """
    problem = _problem(folder)
    if problem is None:
        return
    # All ranks have the same list from rank 0, and the same answer for each folder in it, so they stay together.
    others: list[list[Path]] = [[path for path in list_checkpoints(folder.parent) if path.name != folder.name]]
    dist.broadcast_object_list(others, src=0)
    whole = next((path for path in others[0] if _problem(path) is None), None)
    advice = (
        f"Whole, and the newest to be used instead: {how.format(str(whole))}."
        if whole is not None
        else f"{folder.parent} holds no other checkpoint that can be resumed from."
    )
    raise CheckpointError(f"Cannot resume from {folder}: {problem} {advice}")


def _problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, the same text on all ranks. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    kinds: list[str | None] = [_unfit(folder)]
    dist.broadcast_object_list(kinds, src=0)
    if kinds[0] is not None:
        return kinds[0]
    found: list[list[str]] = [[] for _ in range(world)]
    dist.all_gather_object(found, find_damage(folder, rank, world))
    damage = sorted({line for lines in found for line in lines})
    if not damage:
        return None
    return f"it is damaged: {'; '.join(damage[:5])}{f' and {len(damage) - 5} more' if len(damage) > 5 else ''}."


def _unfit(folder: Path) -> str | None:
    if not folder.is_dir():
        return "there is no such folder."
    if kind_of(folder) == PART:
        return f"it is the part of one group. Give the checkpoint itself, {folder.parent}."
    if not has_manifest(folder):
        return (
            "it was not saved by hf_fedshard. A stock checkpoint of a federated run holds one optimizer state, mixed or "
            "of group 0, for all groups, so its optimizer is refused. Its weights can be used: load them with "
            "from_pretrained, after `accelerate merge-weights` where they are sharded."
        )
    if (
        (folder / MANIFEST_NAME).exists()
        and not (folder / DESCRIPTION_NAME).exists()
        and not find_damage(folder, 0, 0)
    ):
        return "it was saved with save_only_model=True and holds no optimizer state. Load its weights with from_pretrained."
    return None

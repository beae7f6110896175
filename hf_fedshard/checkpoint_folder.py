"""How checkpoints are written: aside, renamed when complete, and old ones deleted only then."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from .checkpoint_choice import list_checkpoints, number_of
from .manifest import MANIFEST_NAME, CheckpointError, find_damage, has_manifest, write_manifest
from .parts import complete, is_undamaged
from .shared_errors import together


logger = logging.getLogger(__name__)

SAVING = ".saving-"
"""What stands before the name of a checkpoint while it is written."""
_REMOVING = ".removing-"


class Staging:
    """
    The folder aside in which a checkpoint is written, on a file system that all ranks share.

    A kill at any moment leaves either the old checkpoints and rubbish under another name, or the new one as well:
    the manifest is written last, then the folder gets its name in one step.

    Args:
        final (`Path`):
            The folder that the checkpoint becomes, `.../checkpoint-8`.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self.parent = final.parent / f"{SAVING}{final.name}"
        self.folder = self.parent / final.name

    def begin(self) -> None:
        """
        Makes the folder, on rank 0, and checks that all ranks see it. Collective over the world.

        Raises:
            CheckpointError: On every rank, if it cannot be made or some rank does not see it.
        """
        error: Exception | None = None
        token: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(self.parent, ignore_errors=True)
                self.folder.mkdir(parents=True)
                token = [uuid.uuid4().hex]
                (self.parent / f"token-{token[0]}").touch()
            except OSError as problem:
                error = problem
        together("Saving a checkpoint", error)
        dist.broadcast_object_list(token, src=0)
        if not (self.parent / f"token-{token[0]}").exists():
            error = CheckpointError(
                f"{self.parent}, made by rank 0, is not there. All ranks write one checkpoint together: put output_dir "
                "on a file system that all nodes share."
            )
        together("Saving a checkpoint", error)

    def commit(self, written: Mapping[str, int], nested: Sequence[str] = ()) -> None:
        """
        Completes the checkpoint: manifest, then its name. Collective over the world.

        Args:
            written (`Mapping[str, int]`):
                crc32 of the files that this rank has written, by path in the checkpoint.
            nested (`Sequence[str]`, *optional*):
                Folders in it that get a manifest of their own first, so that each is a checkpoint too.

        Raises:
            CheckpointError: On every rank, if rank 0 cannot.
        """
        everyone: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, dict(written))
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                known = {name: crc32 for part in everyone for name, crc32 in part.items()}
                for inner in nested:
                    start = f"{inner}/"
                    own = {name.removeprefix(start): crc32 for name, crc32 in known.items() if name.startswith(start)}
                    write_manifest(self.folder / inner, own)
                write_manifest(self.folder, known)
                put_in_place(self.folder, self.final)
                shutil.rmtree(self.parent, ignore_errors=True)
            except (OSError, CheckpointError) as problem:
                error = problem
        together("Saving a checkpoint", error)


def put_in_place(folder: Path, final: Path) -> None:
    """
    Gives a complete checkpoint its name; one of this name from an earlier run is removed after that.

    Args:
        folder (`Path`):
            The checkpoint, aside.
        final (`Path`):
            Its name.
    """
    sync_tree(folder)
    old = final.parent / f"{_REMOVING}{final.name}"
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(folder, final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """
    Puts the names of all files of a folder on the disk.

    Args:
        folder (`Path`):
            The folder.
    """
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _sync_folder(path)


def remove(folder: Path) -> None:
    """
    Deletes a checkpoint so that a kill in between leaves no half of one under its name.

    Args:
        folder (`Path`):
            The checkpoint.
    """
    aside = folder.parent / f"{_REMOVING}{folder.name}"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def clean_up(run_dir: Path) -> None:
    """
    Ends what a killed run had begun: a checkpoint that was complete gets its name, unfinished ones are removed.

    Args:
        run_dir (`Path`):
            The folder of the checkpoints. Called on one rank, before training.
    """
    for parent in sorted(run_dir.glob(f"{SAVING}*")):
        name = parent.name.removeprefix(SAVING)
        if is_undamaged(parent / name):
            complete(parent / name)
        if (parent / name / MANIFEST_NAME).exists() and not find_damage(parent / name):
            logger.warning("The last run was ended while it saved %s; it was complete and is kept.", run_dir / name)
            put_in_place(parent / name, run_dir / name)
        else:
            logger.warning("The last run was ended while it saved %s; what it had written is removed.", run_dir / name)
        shutil.rmtree(parent, ignore_errors=True)
    for parent in run_dir.glob(f"{_REMOVING}*"):
        shutil.rmtree(parent, ignore_errors=True)


def check_writable(run_dir: Path) -> None:
    """
    Finds out now, and not at the first checkpoint hours later, whether a checkpoint could be written.

    Args:
        run_dir (`Path`):
            The folder of the checkpoints. Called on one rank, before training.

    Raises:
        OSError: If nothing can be made in it; the message has the way out.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=run_dir):
            pass
    except OSError as problem:
        raise OSError(
            f"Nothing can be written to output_dir={str(run_dir)!r} ({problem}). Choose another output_dir, or save "
            "nothing (save_strategy='no')."
        ) from problem


def rotate(run_dir: Path, limit: int | None, keep: list[Path]) -> None:
    """
    Deletes the oldest checkpoints. Only whole ones count and are deleted: a damaged one neither makes a whole one go
    nor is taken for it.

    Args:
        run_dir (`Path`):
            The folder of the checkpoints. Called on one rank.
        limit (`int`, *optional*):
            How many to leave; `None` or 0 for all. The newest is always left.
        keep (`list[Path]`):
            Those to be left in any case: the one just saved, the best.
    """
    if not limit or limit <= 0:
        return
    spared = {path.resolve() for path in keep}
    whole = [path for path in list_checkpoints(run_dir) if not has_manifest(path) or not find_damage(path, 0, 0)]
    # By the time of completion: an earlier run may have left higher numbers.
    whole.sort(key=lambda path: (_completed_at(path), number_of(path)))
    # As Trainer does: the best one counts, and with a limit of 1 it is left beside the newest.
    removable = [path for path in whole if path.resolve() not in spared]
    num_kept = max(limit, len(whole) - len(removable))
    for path in removable[: max(0, len(whole) - num_kept)]:
        logger.info("Deleting older checkpoint [%s] due to save_total_limit=%d", path, limit)
        remove(path)


def _completed_at(path: Path) -> float:
    manifest = path / MANIFEST_NAME
    return (manifest if manifest.exists() else path).stat().st_mtime


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

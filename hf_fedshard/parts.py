"""A checkpoint in parts, one for each group, saved inside a round with no agreement between them: when it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoint_layout import DESCRIPTION_NAME, read_description
from .config import FederationConfig, FederationLayout
from .manifest import MANIFEST_NAME, CheckpointError, find_damage, read_json, write_json, write_manifest


IN_PARTS = "in parts"
PART = "part"


def part_name(index: int) -> str:
    """
    Name of a group's part in a checkpoint.

    Args:
        index (`int`):
            The group.
    """
    return f"group_{index:05d}"


def kind_of(folder: Path) -> str | None:
    """
    What kind of checkpoint a folder holds.

    Args:
        folder (`Path`):
            The folder.

    Returns:
        `str` or `None`: `"in parts"`, `"part"` for one of them, `None` for one of a border or none at all.
    """
    if not (folder / DESCRIPTION_NAME).exists():
        return None
    kind = read_json(folder / DESCRIPTION_NAME).get("kind")
    return None if kind is None else str(kind)


def complete(folder: Path) -> bool:
    """
    Makes parts a checkpoint if all of them are there: description and manifest of the whole. Done by one process.

    Args:
        folder (`Path`):
            What is to become the checkpoint. A part in it is whole: it got its name last.

    Returns:
        `bool`: Whether all parts are there.
    """
    if not all_there(folder):
        return False
    parts = _parts(folder)
    descriptions = [read_description(part) for part in parts]
    known: dict[str, int] = {}
    for part in parts:
        files = read_json(part / MANIFEST_NAME)["files"]
        known |= {f"{part.name}/{name}": crc32 for name, (_, crc32) in files.items()}
    steps = [description["global_step"] for description in descriptions]
    write_json(folder / DESCRIPTION_NAME, {**descriptions[0], "kind": IN_PARTS, "global_step": steps})
    write_manifest(folder, known)
    return True


def all_there(folder: Path) -> bool:
    """
    Whether a folder holds the parts of all groups.

    Args:
        folder (`Path`):
            The folder.
    """
    parts = _parts(folder)
    return bool(parts) and len(parts) == read_description(parts[0])["num_groups"]


def is_undamaged(folder: Path) -> bool:
    """
    Whether all parts of an interrupted save are there and as they were written.

    Args:
        folder (`Path`):
            The folder.
    """
    try:
        return all_there(folder) and not any(find_damage(part) for part in _parts(folder))
    except CheckpointError:
        return False


def describe_course(config: FederationConfig, max_steps: int) -> dict[str, Any]:
    """
    What decides where rounds end and which steps are synchronous: a part is resumed with the same only.

    Args:
        config ([`FederationConfig`]):
            The settings.
        max_steps (`int`):
            Steps of the whole run.
    """
    bounds = ("max_sync_share", "min_sync_every", "max_sync_every") if config.sync_every == "auto" else ()
    return {
        **{name: getattr(config, name) for name in bounds},
        "sync_every": config.sync_every,
        "sync_steps_at_start": config.sync_steps_at_start,
        "sync_steps_at_end": config.sync_steps_at_end,
        "max_steps": max_steps,
    }


def check_same_run(
    folder: Path, layout: FederationLayout, config: FederationConfig, max_steps: int | None = None
) -> None:
    """
    Refuses to resume from parts in another shape: the groups stand at different steps, and hold different models.

    Args:
        folder (`Path`):
            The checkpoint, or one of its parts.
        layout ([`FederationLayout`]):
            The federation that is to resume.
        config ([`FederationConfig`]):
            Its settings.
        max_steps (`int`, *optional*):
            Steps of the whole run, if they are known yet. They matter where synchronous steps are counted from the end.

    Raises:
        CheckpointError: If anything differs; the message says what to do.
    """
    saved = read_description(folder)
    then = FederationLayout(saved["num_groups"], saved["replicate_size"], saved["inner"])
    differs = []
    if then != layout:
        differs.append(f"it was saved by {then}, this is {layout}")
    course = describe_course(config, saved["max_steps"] if max_steps is None else max_steps)
    if not config.sync_steps_at_end:
        course["max_steps"] = saved["max_steps"]
    differs += [
        f"it was saved with {name}={saved[name]}, this is {value}"
        for name, value in course.items()
        if saved.get(name, value) != value
    ]
    if differs:
        # A part holds the step of its group alone.
        step = saved["global_step"]
        steps = f" (steps {', '.join(map(str, step))})" if isinstance(step, list) else ""
        raise CheckpointError(
            f"{folder} was saved inside a round, when the run was ended before its time: every group stands at a step of "
            f"its own{steps} and holds a model of its own, so only the same federation can resume from it; "
            f"{'; '.join(differs)}. Resume as it was saved and change the settings from the "
            "next checkpoint on; or resume from an older checkpoint; or start from the average of the groups, which "
            f"`python -m hf_fedshard.export {folder} OUTPUT` writes."
        )


def refuse(folder: Path, what: str) -> None:
    """
    Refuses a checkpoint in parts, or one of its parts, where only one of a border fits.

    Args:
        folder (`Path`):
            The checkpoint.
        what (`str`):
            What was asked for, for the message.

    Raises:
        CheckpointError: If it is one.
    """
    kind = kind_of(folder)
    if kind == PART:
        raise CheckpointError(f"{folder} is the part of one group. Give the checkpoint itself: {folder.parent}.")
    if kind == IN_PARTS:
        raise CheckpointError(
            f"{folder} was saved by each group alone, inside a round, and cannot be used for {what}."
        )


def _parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("group_*") if path.is_dir())

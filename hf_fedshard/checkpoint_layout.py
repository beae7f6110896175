"""Where what lies in a federated checkpoint: names of its folders and tensors, and the description at its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .manifest import FEDERATION_FOLDER, CheckpointError, read_json


FORMAT = 1
DESCRIPTION_NAME = f"{FEDERATION_FOLDER}/federation.json"
MODEL_FOLDER = f"{FEDERATION_FOLDER}/model"
OUTER_FOLDER = f"{FEDERATION_FOLDER}/outer"
LOCAL_PREFIX = "local/"
RESIDUAL_PREFIX = "residual/"


def group_folder(index: int) -> str:
    """
    Where a group's state lies in a checkpoint.

    Args:
        index (`int`):
            The group.
    """
    return f"{FEDERATION_FOLDER}/group_{index:05d}"


def read_description(folder: Path) -> dict[str, Any]:
    """
    What a checkpoint says about the federation that wrote it.

    Args:
        folder (`Path`):
            The checkpoint.

    Raises:
        CheckpointError: If it holds none, or one of a later version of this package.
    """
    description: dict[str, Any] = read_json(folder / DESCRIPTION_NAME)
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has the format {description.get('format')}, and this version of hf_fedshard reads {FORMAT}. "
            "Install the version that wrote it."
        )
    return description

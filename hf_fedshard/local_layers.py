"""The layers that each group has for itself (`local_parameters`), read when a run resumes."""

from __future__ import annotations

import logging
from pathlib import Path

from .averaging import ModelAverager
from .checkpoint_layout import LOCAL_PREFIX, group_folder, read_description
from .checkpoint_state import Place
from .parts import PART
from .reshape import nearest_group
from .selection import plain_name
from .tensor_store import load_tensors


logger = logging.getLogger(__name__)


def load_local_layers(folder: Path, averager: ModelAverager, place: Place) -> None:
    """
    Reads the group's own layers once more: at the start of training all groups were given those of group 0. Not of a part,
    saved inside a round: there nothing was broadcast, and each rank has read buffers of its own. Without communication.

    Args:
        folder (`Path`):
            The checkpoint.
        averager ([`ModelAverager`]):
            What averages the model.
        place ([`Place`]):
            This rank's.

    Raises:
        CheckpointError: If they cannot be read.
    """
    saved = read_description(folder)
    if saved.get("kind") == PART:
        return
    held = {
        plain_name(name): tensor
        for name, tensor in [*averager.model.named_parameters(), *averager.model.named_buffers()]
    }
    stored, now = (
        set(saved.get("local", ())) & set(held),
        {plain_name(name) for name in averager.trained.local_names()},
    )
    local, shared = sorted(stored & now), sorted(stored - now)
    if shared and averager.mesh.layout.num_groups > 1 and averager.mesh.is_main:
        logger.warning(
            "%d tensors that each group had for itself in the checkpoint are averaged from now on, first %s: all groups begin "
            "with those of group 0.",
            len(shared),
            shared[0],
        )
    source = nearest_group(place.group_index, place.layout.num_groups, int(saved["num_groups"]))
    load_tensors({LOCAL_PREFIX + name: held[name].detach() for name in local}, folder / group_folder(source))

"""Which group goes on from which, when a run resumes with another number of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .layout import FederationLayout


def describe_reshape(saved: Mapping[str, Any], now: FederationLayout, rule: str) -> str | None:
    """
    Says in a sentence how a checkpoint of another shape is taken over, for the log.

    Args:
        saved (`Mapping[str, Any]`):
            What the checkpoint says of the federation that wrote it, from [`read_description`].
        now ([`FederationLayout`]):
            The federation that resumes.
        rule (`str`):
            `"nearest"` or `"average"`.

    Returns:
        `str` or `None`: The sentence; `None` if the shape is the same.
    """
    then = FederationLayout(saved["num_groups"], saved["replicate_size"], saved["inner"])
    if then == now:
        return None
    text = f"The checkpoint was saved by another shape ({then}; now {now}). The weights are taken over exactly. "
    if then.num_groups == now.num_groups:
        text += "Each group's optimizer state is too. "
    elif rule == "average":
        text += "optimizer_on_reshape=average: every group starts with the mean of all groups' optimizer moments. "
    else:
        pairs = (
            f"{g} from {nearest_group(g, now.num_groups, then.num_groups)}" for g in range(min(now.num_groups, 8))
        )
        text += f"optimizer_on_reshape=nearest: optimizer state of group {', '.join(pairs)}. "
    if then.world_size != now.world_size:
        text += (
            f"{then.world_size} ranks drew the data, now {now.world_size} do: the same number of steps is skipped, and "
            "random states are those of the ranks with the same number, fresh ones beyond."
        )
    return text


def nearest_group(index: int, num_groups: int, stored_groups: int) -> int:
    """
    The stored group at the same place in the row of groups.

    Args:
        index (`int`):
            A group of this run.
        num_groups (`int`):
            The groups of this run.
        stored_groups (`int`):
            Those of the checkpoint.
    """
    return min(stored_groups - 1, (2 * index + 1) * stored_groups // (2 * num_groups))

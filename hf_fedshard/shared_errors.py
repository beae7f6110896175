"""An error of one rank becomes an error of all, so that none goes on or waits for one that has gone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .manifest import CheckpointError


def together(what: str, error: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """
    Makes an error of one rank an error of all. Collective over the group; every rank calls it, whether it failed or not,
    so none is left waiting for one that has gone.

    Args:
        what (`str`):
            What was being done, for the message.
        error (`BaseException`, *optional*):
            What went wrong on this rank.
        group (`ProcessGroup`, *optional*):
            The ranks; `None` for the world.

    Raises:
        CheckpointError: On every rank, if anything went wrong on any.
    """
    ranks_of_group = dist.get_process_group_ranks(group)
    everyone: list[Any] = [None] * len(ranks_of_group)
    dist.all_gather_object(everyone, None if error is None else f"{type(error).__name__}: {error}", group=group)
    failed: dict[str, list[int]] = {}
    for rank, message in zip(ranks_of_group, everyone, strict=True):
        if message is not None:
            # What was found together before says so already.
            message = message.removeprefix("CheckpointError: ").removeprefix(f"{what} failed. ")
            failed.setdefault(message, []).append(rank)
    if failed:
        reasons = [
            message if len(ranks) == len(everyone) else f"On rank {', '.join(map(str, ranks))}: {message}"
            for message, ranks in failed.items()
        ]
        raise CheckpointError(f"{what} failed. " + "\n".join(reasons)) from error

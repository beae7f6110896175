"""Ending a distributed run in order."""

from __future__ import annotations

import sys

import torch.distributed as dist

from . import guard
from .slow_tier import finish_workers


def shutdown() -> None:
    """
    The last line of a script: waits for all ranks, then takes the process groups down.

    Processes that leave with gloo groups open end in SIGABRT now and then, stock DDP too, and the launcher then ends
    ranks that may still be writing. Without a process group it does nothing but forget the federations of this process.

    While an exception is on its way, in a `finally` say, it waits for nobody: the others may never come, and the launcher ends
    them when this process has.
    """
    guard.reset()
    if sys.exception() is not None:
        return
    # What is in flight ends on all ranks alike, and must not find its process groups gone.
    finish_workers()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()

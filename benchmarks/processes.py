"""Starting trees of processes and ending them with all their descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def start_tree(
    command: Sequence[str], log: int | None, env: Mapping[str, str], cwd: Path | str | None = None
) -> subprocess.Popen[bytes]:
    """
    Starts a command as the leader of a new session.

    Args:
        command (`Sequence[str]`):
            Command line.
        log (`int`, *optional*):
            File descriptor that takes stdout and stderr; `None` for those of this process.
        env (`Mapping[str, str]`):
            The environment.
        cwd (`Path` or `str`, *optional*):
            Working directory.

    Returns:
        `subprocess.Popen`: The process.
    """
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        env=dict(env),
        cwd=cwd,
        start_new_session=True,
    )


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """
    Kills a process of [`start_tree`] and all its descendants. Ranks started by torchrun lead sessions of their own, so
    the process group of the launcher is not enough.

    Args:
        process (`subprocess.Popen`):
            The process.
    """
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()

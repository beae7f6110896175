"""Runs a script under `accelerate launch`, as a user does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes
from benchmarks.processes import kill_tree

from .environment import SERVER_ENV


__all__ = [
    "LaunchResult",
    "accelerate_launch",
    "child_env",
    "free_port",
    "kill_tree",
    "launch_command",
    "run_tree",
    "start_tree",
]


@dataclass(frozen=True)
class LaunchResult:
    """
    Outcome of a launch.

    Args:
        code (`int`):
            Exit code of the launcher; -9 after the limit.
        output (`str`):
            stdout and stderr of all processes.
        seconds (`float`):
            Wall-clock time.
        timed_out (`bool`):
            Whether the limit ended it.
    """

    code: int
    output: str
    seconds: float
    timed_out: bool = False

    def check(self) -> LaunchResult:
        """
        Returns:
            `LaunchResult`: Itself, if the launch succeeded. Raises with the output otherwise.
        """
        if self.code != 0 or self.timed_out:
            why = f"no end after {self.seconds:.0f} s" if self.timed_out else f"exit code {self.code}"
            raise AssertionError(f"accelerate launch: {why}\n{self.output[-12000:]}")
        return self


def free_port() -> int:
    """
    Returns:
        `int`: A TCP port that was free on the loopback interface a moment ago.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_command(config_file: Path | str, script: Path | str, *args: str, options: Sequence[str] = ()) -> list[str]:
    """
    The command line.

    Args:
        config_file (`Path` or `str`):
            YAML file of Accelerate.
        script (`Path` or `str`):
            The script.
        args (`str`):
            Arguments of the script.
        options (`Sequence[str]`, *optional*):
            Arguments of `accelerate launch`; they go before the script and win over the file.

    Returns:
        `list[str]`: Command line.
    """
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    return [*launcher, "--config_file", str(config_file), *options, str(script), *args]


def accelerate_launch(
    config_file: Path | str,
    script: Path | str,
    *args: str,
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    cwd: Path | str | None = None,
    limit_seconds: float = 120.0,
) -> LaunchResult:
    """
    Runs `accelerate launch --config_file config_file script args` on a free port.

    Args:
        config_file (`Path` or `str`):
            YAML file of Accelerate.
        script (`Path` or `str`):
            The script.
        args (`str`):
            Arguments of the script.
        options (`Sequence[str]`, *optional*):
            More arguments of `accelerate launch`.
        env (`dict[str, str]`, *optional*):
            Variables to add to the environment.
        cwd (`Path` or `str`, *optional*):
            Working directory.
        limit_seconds (`float`, *optional*, defaults to 120.0):
            Time after which all its processes are killed.

    Returns:
        `LaunchResult`: Exit code and output.
    """
    command = launch_command(config_file, script, *args, options=["--main_process_port", str(free_port()), *options])
    return run_tree(command, env=env, cwd=cwd, limit_seconds=limit_seconds)


def child_env(env: dict[str, str] | None = None) -> dict[str, str]:
    """
    The environment of a launch: this process's, offline, one thread a rank, without the variables of a launch around it.

    Args:
        env (`dict[str, str]`, *optional*):
            Variables to add.

    Returns:
        `dict[str, str]`: Environment.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_"))
    }
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH", "")]))
    return inherited | SERVER_ENV | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | (env or {})


def start_tree(
    command: Sequence[str], log: int, env: dict[str, str] | None = None, cwd: Path | str | None = None
) -> subprocess.Popen[bytes]:
    """
    Starts a command as the leader of a new session.

    Args:
        command (`Sequence[str]`):
            Command line.
        log (`int`):
            File descriptor that takes stdout and stderr.
        env (`dict[str, str]`, *optional*):
            Variables to add to the environment of [`child_env`].
        cwd (`Path` or `str`, *optional*):
            Working directory.

    Returns:
        `subprocess.Popen`: The process.
    """
    return processes.start_tree(command, log, child_env(env), cwd)


def run_tree(
    command: Sequence[str],
    env: dict[str, str] | None = None,
    cwd: Path | str | None = None,
    limit_seconds: float = 120.0,
) -> LaunchResult:
    """
    Runs a command to its end or to the limit, and leaves no process behind.

    Args:
        command (`Sequence[str]`):
            Command line.
        env (`dict[str, str]`, *optional*):
            Variables to add to the environment.
        cwd (`Path` or `str`, *optional*):
            Working directory.
        limit_seconds (`float`, *optional*, defaults to 120.0):
            Limit.

    Returns:
        `LaunchResult`: Exit code and output.
    """
    started = time.monotonic()
    timed_out = False
    # A file, not a pipe: a grandchild that survives would keep a pipe open and the reader waiting.
    with tempfile.TemporaryFile() as log:
        process = start_tree(command, log.fileno(), env, cwd)
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            kill_tree(process)
        log.seek(0)
        output = log.read().decode(errors="replace")
    return LaunchResult(process.returncode, output, time.monotonic() - started, timed_out)

"""Starts a world of ranks: one torchrun in each namespace, or on this machine as it is in plain mode."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .environment import RANK_ENV
from .network import NUM_NODES, TwoTierNetwork
from .processes import kill_tree, start_tree
from .workload import ROOT


class LaunchError(RuntimeError):
    """A world of ranks did not come to its end."""


def make_env(extra: dict[str, str] | None = None) -> dict[str, str]:
    """
    The environment of a rank: this process's, without a launch around it, offline, one thread, with the repository and the
    recipes on the path.

    Args:
        extra (`dict[str, str]`, *optional*):
            Variables to add.

    Returns:
        `dict[str, str]`: Environment.
    """
    foreign = ("ACCELERATE_", "FSDP_", "FEDSHARD_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "TORCHFT_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "recipes"), inherited.get("PYTHONPATH", "")]))
    return inherited | RANK_ENV | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | (extra or {})


def run_world(network: TwoTierNetwork | None, num_processes: int, arguments: Sequence[str], log: Path) -> None:
    """
    Runs `python -m arguments` on every rank, and waits for the end. Rank 0's progress goes to the console, and what else is
    said to the log.

    Args:
        network ([`TwoTierNetwork`], *optional*):
            The network; `None` for this machine as it is.
        num_processes (`int`):
            Ranks of both nodes together.
        arguments (`Sequence[str]`):
            Module and its arguments.
        log (`Path`):
            File that takes stderr and stdout of all nodes; followed for lines of progress.

    Raises:
        LaunchError: If a rank fails; with the end of the log.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max_restarts", "0", "--monitor_interval", "2"]
    commands: list[tuple[list[str], dict[str, str]]] = []
    if network is None:
        full = [*torchrun, "--standalone", "--nproc_per_node", str(num_processes), "-m", *arguments]
        commands.append((full, {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}))
    for node in range(0 if network is None else NUM_NODES):
        assert network is not None
        options = ["--nnodes", str(NUM_NODES), "--node_rank", str(node), "--nproc_per_node"]
        options += [str(num_processes // NUM_NODES), "--master_addr", network.addresses[0], "--master_port", "29400"]
        commands.append((network.command(node, [*torchrun, *options, "-m", *arguments]), network.node_env(node)))
    run_side_by_side(commands, log)


def run_side_by_side(commands: Sequence[tuple[Sequence[str], dict[str, str]]], log: Path) -> None:
    """
    Runs commands until all have ended or one has failed. None of their processes survives.

    Args:
        commands (`Sequence[tuple[Sequence[str], dict[str, str]]]`):
            Command lines, and what each adds to the environment.
        log (`Path`):
            File that takes all their output. Lines of it that begin with `[` are progress, and shown.

    Raises:
        LaunchError: If one fails.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        output = stack.enter_context(log.open("ab"))
        shown = stack.enter_context(log.open("r", errors="replace"))
        shown.seek(0, os.SEEK_END)
        for command, extra in commands:
            process = start_tree(command, output.fileno(), make_env(extra), ROOT)
            stack.callback(kill_tree, process)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            _show_progress(shown.readlines())
            failed = [process.returncode for process in processes if process.returncode not in (None, 0)]
            if failed:
                break
            time.sleep(0.5)
        _show_progress(shown.readlines())
    if any(process.returncode != 0 for process in processes):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise LaunchError(f"The world ended with {[process.returncode for process in processes]}. Of {log}:\n{tail}")


def _show_progress(lines: Sequence[str]) -> None:
    for line in lines:
        if line.startswith("["):
            print(line.rstrip(), flush=True)

"""Runs commands and launches, as a user does, on the two "nodes" of [`benchmarks.network`]."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.network import NUM_NODES, unavailable_reason
from benchmarks.network import TwoTierNetwork as Network

from .launch import LaunchResult, kill_tree, launch_command, start_tree


__all__ = ["TwoTierNetwork", "unavailable_reason"]


class TwoTierNetwork(Network):
    """
    The network, with launches on it.

    ```python
    with TwoTierNetwork(rate="200mbit") as network:
        before = network.link_bytes()
        network.launch(config_file, "train.py", num_processes=4)
        crossed_bytes = network.link_bytes() - before
    ```
    """

    def run(
        self,
        commands: Sequence[tuple[int, Sequence[str], dict[str, str]]],
        limit_seconds: float = 180.0,
        cwd: Path | str | None = None,
    ) -> list[LaunchResult]:
        """
        Runs commands side by side, each in the namespace of its node, until all have ended, one has failed or the limit
        has come. None of their processes survives.

        Args:
            commands (`Sequence[tuple[int, Sequence[str], dict[str, str]]]`):
                Node, command line and additional environment of each command: one per rank, or one launcher per node.
            limit_seconds (`float`, *optional*, defaults to 180.0):
                Limit.
            cwd (`Path` or `str`, *optional*):
                Working directory.

        Returns:
            `list[LaunchResult]`: Result of each command.
        """
        started = time.monotonic()
        with ExitStack() as stack:
            logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
            processes: list[subprocess.Popen[bytes]] = []
            ends = [0.0] * len(commands)
            running: list[int] = []
            try:
                for (node, command, env), log in zip(commands, logs, strict=True):
                    processes.append(
                        start_tree(self.command(node, command), log.fileno(), self.node_env(node) | env, cwd)
                    )
                running = list(range(len(processes)))
                failed = False
                while running and not failed and time.monotonic() - started < limit_seconds:
                    time.sleep(0.05)
                    for index in [index for index in running if processes[index].poll() is not None]:
                        running.remove(index)
                        ends[index] = time.monotonic() - started
                        failed |= processes[index].returncode != 0
            finally:
                for process in processes:
                    kill_tree(process)
            results = []
            for index, (process, log) in enumerate(zip(processes, logs, strict=True)):
                log.seek(0)
                late = index in running and not failed
                seconds = ends[index] or time.monotonic() - started
                results.append(LaunchResult(process.returncode, log.read().decode(errors="replace"), seconds, late))
        return results

    def launch(
        self,
        config_file: Path | str,
        script: Path | str,
        *args: str,
        num_processes: int = 4,
        port: int = 29400,
        env: dict[str, str] | None = None,
        limit_seconds: float = 180.0,
        cwd: Path | str | None = None,
    ) -> list[LaunchResult]:
        """
        One `accelerate launch` per node, each with half of the processes.

        Args:
            config_file (`Path` or `str`):
                YAML file of Accelerate; the numbers of machines and processes in it are replaced.
            script (`Path` or `str`):
                The script.
            args (`str`):
                Arguments of the script.
            num_processes (`int`, *optional*, defaults to 4):
                Processes of both nodes together.
            port (`int`, *optional*, defaults to 29400):
                Port of the rendezvous. Nobody else lives in the namespaces.
            env (`dict[str, str]`, *optional*):
                Variables to add to the environment.
            limit_seconds (`float`, *optional*, defaults to 180.0):
                Limit.
            cwd (`Path` or `str`, *optional*):
                Working directory.

        Returns:
            `list[LaunchResult]`: Result of each node.
        """
        commands = []
        for node in range(NUM_NODES):
            options = ["--num_machines", str(NUM_NODES), "--machine_rank", str(node), "--same_network"]
            options += ["--num_processes", str(num_processes)]
            options += ["--main_process_ip", self.addresses[0], "--main_process_port", str(port)]
            commands.append((node, launch_command(config_file, script, *args, options=options), env or {}))
        return self.run(commands, limit_seconds, cwd)

"""
Two "nodes" with a slow link: network namespaces joined by a rate-limited veth pair. Inside a namespace traffic runs over
its loopback interface; whatever goes through the pair is counted. Needs root and `iproute2` (`ip`, `tc`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from .launch import LaunchResult, kill_tree, launch_command, start_tree


NUM_NODES = 2
_serial = itertools.count()


def unavailable_reason() -> str | None:
    """
    Returns:
        `str` or `None`: Why this machine cannot make namespaces, or `None` if it can.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    probe = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"`ip netns add` failed: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


class TwoTierNetwork:
    """
    Context manager that makes the two namespaces and removes them.

    ```python
    with TwoTierNetwork(rate="200mbit") as network:
        before = network.link_bytes()
        network.launch(config_file, "train.py", num_processes=4)
        crossed_bytes = network.link_bytes() - before
    ```

    Args:
        rate (`str`, *optional*, defaults to `"200mbit"`):
            Rate of the link in each direction, in the notation of `tc`. An empty string leaves it unlimited.
    """

    def __init__(self, rate: str = "200mbit") -> None:
        self.rate = rate
        # Interface names may have 15 characters.
        mark = f"{os.getpid() % 100000}x{next(_serial)}"
        self.names = [f"ns{mark}n{node}" for node in range(NUM_NODES)]
        self.interfaces = [f"ve{mark}n{node}" for node in range(NUM_NODES)]
        self.addresses = [f"10.77.0.{node + 1}" for node in range(NUM_NODES)]

    def __enter__(self) -> TwoTierNetwork:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.interfaces
            _ip("link", "add", first, "type", "veth", "peer", "name", second)
            for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
                _ip("link", "set", interface, "netns", name)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", interface, "up")
                if self.rate:
                    limit = ["rate", self.rate, "burst", "128kb", "latency", "100ms"]
                    _check(["tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *limit])
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        # The veth pair goes with the first namespace.
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def sent_bytes(self, node: int) -> int:
        """
        Args:
            node (`int`):
                0 or 1.

        Returns:
            `int`: Bytes the node has sent over the link, with all headers.
        """
        # /sys in the namespace would need a mount of its own; /proc/net follows the reading process.
        table = _check(["ip", "netns", "exec", self.names[node], "cat", "/proc/net/dev"])
        for line in table.splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == self.interfaces[node]:
                return int(fields.split()[8])
        raise RuntimeError(f"{self.interfaces[node]} is not in\n{table}")

    def link_bytes(self) -> int:
        """
        Returns:
            `int`: Bytes sent over the link so far, both directions together.
        """
        return sum(self.sent_bytes(node) for node in range(NUM_NODES))

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
                    full = ["ip", "netns", "exec", self.names[node], *command]
                    processes.append(start_tree(full, log.fileno(), self.node_env(node) | env, cwd))
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

    def node_env(self, node: int) -> dict[str, str]:
        """
        Args:
            node (`int`):
                0 or 1.

        Returns:
            `dict[str, str]`: Variables that make gloo and NCCL use the link.
        """
        return {"GLOO_SOCKET_IFNAME": self.interfaces[node], "NCCL_SOCKET_IFNAME": self.interfaces[node]}


def _ip(*args: str) -> None:
    _check(["ip", *args])


def _check(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout

"""
Two "nodes" with a slow link: network namespaces joined by a rate-limited veth pair. Inside a namespace traffic runs over
its loopback interface; whatever goes through the pair is counted. Needs root and `iproute2` (`ip`, `tc`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar


NUM_NODES = 2
UNLIMITED = "20gbit"
_serial = itertools.count()
_Network = TypeVar("_Network", bound="TwoTierNetwork")


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
    run_checked(["ip", "netns", "del", probe])
    return None


@dataclass(frozen=True)
class Link:
    """
    The two ends of the slow link, by name, so that a process inside a namespace can reach them too.

    Args:
        names (`tuple[str, ...]`):
            Namespace of each node.
        interfaces (`tuple[str, ...]`):
            Interface of each node.
    """

    names: tuple[str, ...]
    interfaces: tuple[str, ...]

    def shape(self, rate: str, action: str = "change") -> None:
        """
        Limits both directions.

        Args:
            rate (`str`):
                In the notation of `tc`.
            action (`str`, *optional*, defaults to `"change"`):
                `"add"` the first time, `"change"` later; connections live on.
        """
        limit = ["rate", rate, "burst", "128kb", "latency", "100ms"]
        for name, interface in zip(self.names, self.interfaces, strict=True):
            run_checked(["tc", "-n", name, "qdisc", action, "dev", interface, "root", "tbf", *limit])


class TwoTierNetwork:
    """
    Context manager that makes the two namespaces and removes them.

    ```python
    with TwoTierNetwork(rate="200mbit") as network:
        before = network.link_bytes()
        subprocess.run(network.command(0, ["python", "train.py"]))
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

    @property
    def link(self) -> Link:
        """The ends of the link."""
        return Link(tuple(self.names), tuple(self.interfaces))

    def __enter__(self: _Network) -> _Network:
        try:
            for name in self.names:
                run_checked(["ip", "netns", "add", name])
            first, second = self.interfaces
            run_checked(["ip", "link", "add", first, "type", "veth", "peer", "name", second])
            for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
                run_checked(["ip", "link", "set", interface, "netns", name])
                run_checked(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface])
                run_checked(["ip", "-n", name, "link", "set", "lo", "up"])
                run_checked(["ip", "-n", name, "link", "set", interface, "up"])
            if self.rate:
                self.link.shape(self.rate, action="add")
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
        return parse_counters(run_checked(self.command(node, ["cat", "/proc/net/dev"])), self.interfaces[node])[1]

    def link_bytes(self) -> int:
        """
        Returns:
            `int`: Bytes sent over the link so far, both directions together.
        """
        return sum(self.sent_bytes(node) for node in range(NUM_NODES))

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """
        Args:
            node (`int`):
                0 or 1.
            command (`Sequence[str]`):
                A command line.

        Returns:
            `list[str]`: The command line that runs it in the namespace of the node.
        """
        return ["ip", "netns", "exec", self.names[node], *command]

    def node_env(self, node: int) -> dict[str, str]:
        """
        Args:
            node (`int`):
                0 or 1.

        Returns:
            `dict[str, str]`: Variables that make gloo and NCCL use the link.
        """
        return {"GLOO_SOCKET_IFNAME": self.interfaces[node], "NCCL_SOCKET_IFNAME": self.interfaces[node]}


def parse_counters(table: str, interface: str) -> tuple[int, int]:
    """
    Args:
        table (`str`):
            Content of `/proc/net/dev`.
        interface (`str`):
            Name.

    Returns:
        `tuple[int, int]`: Bytes that the interface has received and sent, with all headers.
    """
    for line in table.splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[0]), int(fields.split()[8])
    raise RuntimeError(f"{interface} is not in\n{table}")


def run_checked(command: Sequence[str]) -> str:
    """
    Args:
        command (`Sequence[str]`):
            Command line.

    Returns:
        `str`: What it printed. Raises `RuntimeError` with its message if it fails.
    """
    done = subprocess.run(list(command), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout

"""What a rank of a measurement knows: its place, its peers, its data, and the link."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import FederationMesh, build_federation_mesh

from .network import NUM_NODES, UNLIMITED, Link, parse_counters
from .variants import SHARD_SIZE
from .workload import Blocks, Workload


QUIET_SECONDS = 0.3
QUIET_BYTES = 8192
"""What passes for silence: keep-alive messages and acknowledgements."""
MAX_SETTLE_SECONDS = 120.0


@dataclass
class World:
    """
    A rank's view of the world of a measurement. Its default process group exists.

    Args:
        workload ([`Workload`]):
            What is trained.
        blocks ([`Blocks`]):
            The corpus.
        link ([`Link`], *optional*):
            The slow link; `None` in plain mode.
        addresses (`tuple[str, ...]`):
            Address of each node.
    """

    workload: Workload
    blocks: Blocks
    link: Link | None
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.node_size = self.size // NUM_NODES
        self.node = self.rank // self.node_size
        self.local_rank = self.rank % self.node_size
        layout = FederationLayout(NUM_NODES, self.node_size // SHARD_SIZE, {"dp_shard": SHARD_SIZE})
        self.layout = layout
        # For the overlapped variants.
        self.federation: FederationMesh = build_federation_mesh("cpu", layout, with_slow_tier=True)
        self.num_meetings = 0
        self._replicated: DeviceMesh | None = None
        self._flat: DeviceMesh | None = None

    def with_seed(self, seed: int) -> World:
        """
        The same ranks and links for a run with other first weights and another order of the training data.

        Args:
            seed (`int`):
                Of both.
        """
        if seed == self.workload.seed:
            return self
        world, train = copy.copy(self), self.blocks.train
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        world.workload = replace(self.workload, seed=seed)
        world.blocks = replace(self.blocks, train=train[order])
        return world

    @property
    def flat(self) -> DeviceMesh:
        """All ranks on one axis. Collective over the world at the first call."""
        if self._flat is None:
            self._flat = init_device_mesh("cpu", (self.size,))
        return self._flat

    @property
    def replicated(self) -> DeviceMesh:
        """All replicas x the shards of one, for HSDP. Collective over the world at the first call."""
        if self._replicated is None:
            shape = (self.size // SHARD_SIZE, SHARD_SIZE)
            self._replicated = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        return self._replicated

    def set_rate(self, rate: int | None) -> None:
        """
        Changes the rate of the link; connections live on. Collective over the world.

        Args:
            rate (`int`, *optional*):
                Mbit/s in each direction; `None` for no limit.
        """
        dist.barrier()
        if self.rank == 0 and self.link is not None:
            self.link.shape(UNLIMITED if rate is None else f"{rate}mbit")
        dist.barrier()

    def counters(self) -> tuple[int, int]:
        """Bytes that node 0 has received and sent over the link; zeros in plain mode and on node 1."""
        if self.link is None or self.node != 0:
            return 0, 0
        return parse_counters(Path("/proc/net/dev").read_text(), self.link.interfaces[0])

    def settle(self) -> None:
        """
        Waits until nothing is on its way over the link, so that no variant pays for another. Collective over the world;
        whoever waits here sleeps.
        """
        if self.rank == 0:
            deadline = time.perf_counter() + MAX_SETTLE_SECONDS
            before = sum(self.counters())
            while True:
                time.sleep(QUIET_SECONDS)
                now = sum(self.counters())
                if now - before <= QUIET_BYTES:
                    break
                if time.perf_counter() > deadline:
                    raise RuntimeError(f"The link is still busy after {MAX_SETTLE_SECONDS:.0f} s.")
                before = now
        dist.barrier()

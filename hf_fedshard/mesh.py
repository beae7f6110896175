"""The fed x replicate x shard mesh: which ranks form a federation group, and who averages which slice with whom."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import FederationLayout


FED_AXIS = "fed"
REPLICATE_AXIS = "group_replicate"


@dataclass(frozen=True)
class FederationMesh:
    """
    The device mesh of a federation, seen from this rank.

    Axes, outermost first: `fed` (G), `group_replicate` (R), then those inside a replica, so that
    `rank = (g * R + r) * S + s` and every group is a run of consecutive ranks.

    Args:
        layout ([`FederationLayout`]):
            Sizes of the axes.
        root (`DeviceMesh`):
            The mesh over all axes. `root["fed"]` links the ranks that hold the same shard in all groups: the slow
            tier. `root["group_replicate"]` links the replicas of one shard inside the group.
        group (`ProcessGroup`):
            All ranks of this rank's federation group: the fast tier.
    """

    layout: FederationLayout
    root: DeviceMesh
    group: dist.ProcessGroup

    @property
    def fed(self) -> dist.ProcessGroup:
        """The ranks that hold this rank's shard in every group, in the order of the groups."""
        return self.root.get_group(FED_AXIS)

    @property
    def replicate(self) -> dist.ProcessGroup:
        """The ranks of this group that hold the same shard, in the order of the replicas."""
        return self.root.get_group(REPLICATE_AXIS)

    @property
    def group_index(self) -> int:
        """g, the federation group of this rank."""
        return self.root.get_local_rank(FED_AXIS)

    @property
    def replicate_index(self) -> int:
        """r, the replica of this rank inside its group."""
        return self.root.get_local_rank(REPLICATE_AXIS)

    @property
    def group_ranks(self) -> frozenset[int]:
        """The global ranks of this rank's federation group."""
        return frozenset(dist.get_process_group_ranks(self.group))

    @property
    def device(self) -> torch.device:
        """Where buffers of collectives live: the current device of the mesh's type."""
        if self.root.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.root.device_type, torch.accelerator.current_device_index())

    def set_timeout(self, seconds: float) -> None:
        """
        Bounds how long any collective of the federation or of the world waits for its peers.

        Trainer hands its `ddp_timeout` to NCCL only; on gloo a dead peer would be waited for during 30 minutes.

        Args:
            seconds (`float`):
                The bound.
        """
        groups = [dist.group.WORLD, self.group, *self.root.get_all_groups()]
        for group in groups:
            # There is no public setter; this is what torch's own DistributedDataParallel recovery tools use.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def build_federation_mesh(device_type: str, layout: FederationLayout) -> FederationMesh:
    """
    Builds the mesh of a federation. Collective over the world: every rank must call it with the same layout.

    Args:
        device_type (`str`):
            `"cuda"`, `"cpu"`, ...
        layout ([`FederationLayout`]):
            The sizes; their product is the world size.

    Returns:
        [`FederationMesh`]: The mesh seen from this rank.
    """
    root = init_device_mesh(
        device_type,
        (layout.num_groups, layout.replicate_size, *layout.inner.values()),
        mesh_dim_names=(FED_AXIS, REPLICATE_AXIS, *layout.inner),
    )
    group, _ = dist.new_subgroups(group_size=layout.group_size)
    return FederationMesh(layout, root, group)

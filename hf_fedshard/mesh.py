"""The fed x replicate x shard mesh: which ranks form a federation group, and who averages which slice with whom."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .layout import FederationLayout
from .slow_tier import SlowTier, tier_backend


FED_AXIS = "fed"
REPLICATE_AXIS = "group_replicate"

# The inner axes over which FSDP2 shards parameters, in order.
SHARD_AXES = ("dp_shard", "cp")


@dataclass(frozen=True)
class FederationMesh:
    """
    The device mesh of a federation, seen from this rank.

    Axes, outermost first: `fed` (G), `group_replicate` (R, absent with a single replica), then those inside a replica,
    so that `rank = (g * R + r) * S + s` and every group is a run of consecutive ranks.

    Args:
        layout ([`FederationLayout`]):
            Sizes of the axes.
        root (`DeviceMesh`):
            The mesh over all axes. `root["fed"]` links the ranks that hold the same shard in all groups: the slow
            tier. `root["group_replicate"]` links the replicas of one shard inside the group.
        fsdp (`DeviceMesh`):
            The slice for `fully_shard`: one axis for FSDP, two for HSDP, inside the group.
        group (`ProcessGroup`):
            All ranks of this rank's federation group: the fast tier.
        slow_tiers (`tuple[SlowTier, ...]`, *optional*):
            Communicators for averagings alone, one set for each backend, if they run beside the training steps or on a
            backend of their own.
    """

    layout: FederationLayout
    root: DeviceMesh
    fsdp: DeviceMesh
    group: dist.ProcessGroup
    slow_tiers: tuple[SlowTier, ...] = ()

    @property
    def fed(self) -> dist.ProcessGroup:
        """The ranks that hold this rank's shard in every group, in the order of the groups."""
        return self.root.get_group(FED_AXIS)

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The ranks of this group that hold the same shard, in the order of the replicas; `None` with one replica."""
        return self.root.get_group(REPLICATE_AXIS) if self.layout.replicate_size > 1 else None

    @property
    def group_index(self) -> int:
        """g, the federation group of this rank."""
        return self.root.get_local_rank(FED_AXIS)

    @property
    def replicate_index(self) -> int:
        """r, the replica of this rank inside its group."""
        return self.root.get_local_rank(REPLICATE_AXIS) if self.layout.replicate_size > 1 else 0

    @property
    def group_ranks(self) -> frozenset[int]:
        """The global ranks of this rank's federation group."""
        return frozenset(dist.get_process_group_ranks(self.group))

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0."""
        return dist.get_rank() == 0

    @property
    def in_process(self) -> bool:
        """Never: these groups are processes."""
        return False

    def wait(self) -> None:
        """Nothing to wait for: the thread that trains alone uses these communicators."""

    @property
    def device(self) -> torch.device:
        """Where buffers of collectives live: the current device of the mesh's type."""
        if self.root.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.root.device_type, torch.accelerator.current_device_index())

    def find_slow_tier(self, slow_backend: str | None) -> SlowTier | None:
        """
        The communicators that a federation averages on, if they have been made.

        Args:
            slow_backend (`str`, *optional*):
                Their backend.
        """
        wanted = tier_backend(self.root.device_type, slow_backend)
        return next((tier for tier in self.slow_tiers if tier.backend == wanted), None)

    def set_timeout(self, seconds: float) -> None:
        """
        Bounds how long any collective of the federation, of FSDP2 inside it, or of the world waits for its peers.

        Trainer hands its `ddp_timeout` to the world's NCCL group only: on gloo, and in groups made later, a dead peer
        would be waited for much longer.

        Args:
            seconds (`float`):
                The bound.
        """
        slow = [group for tier in self.slow_tiers for group in tier.process_groups()]
        for group in {dist.group.WORLD, self.group, *self.root.get_all_groups(), *self.fsdp.get_all_groups(), *slow}:
            # There is no public setter.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def build_federation_mesh(
    device_type: str, layout: FederationLayout, with_slow_tier: bool = False, slow_backend: str | None = None
) -> FederationMesh:
    """
    Builds the mesh of a federation. Collective over the world: every rank must call it with the same layout.

    Each process group costs a meeting of the whole world, so none is made twice: with one replica in a group and no
    axis inside it but the shards, FSDP2's group is the federation group.

    Args:
        device_type (`str`):
            `"cuda"`, `"cpu"`, ...
        layout ([`FederationLayout`]):
            The sizes; their product is the world size.
        with_slow_tier (`bool`, defaults to `False`):
            Whether averagings are to have communicators of their own. With one group there is nothing to average.
        slow_backend (`str`, *optional*):
            Their backend. Given, they are made in any case.

    Returns:
        [`FederationMesh`]: The mesh seen from this rank.
    """
    replicate = {REPLICATE_AXIS: layout.replicate_size} if layout.replicate_size > 1 else {}
    group_axes = {**replicate, **layout.inner}
    root = init_device_mesh(
        device_type,
        (layout.num_groups, *group_axes.values()),
        mesh_dim_names=(FED_AXIS, *group_axes),
    )
    shard_axes = [axis for axis in SHARD_AXES if axis in layout.inner]
    shard_axis = shard_axes[0] if len(shard_axes) == 1 else "dp_shard_cp"
    if len(shard_axes) > 1:
        root[tuple(shard_axes)]._flatten(shard_axis)
    with warnings.catch_warnings():
        # Slicing by a flattened name warns of a coming deprecation; Accelerate itself slices in this way.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        fsdp = root[(*replicate, shard_axis)]
    if len(group_axes) == 1:
        group = root.get_group(shard_axis)
    else:
        group = root[tuple(group_axes)]._flatten("federation_group").get_group()
    mesh = FederationMesh(layout, root, fsdp, group)
    return add_slow_tier(mesh, slow_backend) if with_slow_tier or slow_backend else mesh


def add_slow_tier(mesh: FederationMesh, slow_backend: str | None = None) -> FederationMesh:
    """
    Gives averagings communicators of their own, if the mesh has none with this backend. Those that it has stay, since
    another federation may average on them. Collective over the world.

    Args:
        mesh ([`FederationMesh`]):
            The mesh. With one group there is nothing to average, and it stays as it is.
        slow_backend (`str`, *optional*):
            Their backend.

    Returns:
        [`FederationMesh`]: The mesh with them.
    """
    if mesh.layout.num_groups == 1 or mesh.find_slow_tier(slow_backend) is not None:
        return mesh
    tier = SlowTier(mesh.layout, mesh.root.device_type, slow_backend)
    return dataclasses.replace(mesh, slow_tiers=(*mesh.slow_tiers, tier))

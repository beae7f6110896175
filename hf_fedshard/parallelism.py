"""The seam to Accelerate's device mesh: its axis names over the whole world, FSDP's collectives inside the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh

from . import guard
from .config import FederationConfig
from .handshake import agree
from .layout import FederationLayout
from .mesh import REPLICATE_AXIS, FederationMesh, build_federation_mesh


if TYPE_CHECKING:
    from .plugin import FederatedFSDPPlugin


@dataclass(frozen=True)
class ReplicatedAxis:
    """
    Accelerate's `dp_replicate` axis over the whole world. Only its size and coordinate are asked for, so it has no process
    group: a collective over it would cross the federation groups.

    Args:
        num_replicas (`int`):
            Replicas of all groups together.
        local_rank (`int`):
            Which of them this rank is in.
    """

    num_replicas: int
    local_rank: int

    def size(self) -> int:
        """Replicas of all groups together."""
        return self.num_replicas

    def get_local_rank(self) -> int:
        """Which of them this rank is in."""
        return self.local_rank


class AccelerateMeshView:
    """
    A federation's mesh under Accelerate's names.

    Accelerate shards data over the axes *named* `dp_replicate` and `dp_shard`, so under these names the view shows the
    whole world; the slice that FSDP2 asks for lies inside one group. Everything else is the root mesh's.

    Args:
        mesh ([`FederationMesh`]):
            The federation.
        fsdp_dim_names (`Sequence[str]`):
            The names by which Accelerate asks for FSDP2's slice.
    """

    def __init__(self, mesh: FederationMesh, fsdp_dim_names: Sequence[str]) -> None:
        num_replicas = mesh.layout.num_groups * mesh.layout.replicate_size
        self.federation = mesh
        self.mesh_dim_names = (*(["dp_replicate"] if num_replicas > 1 else []), *mesh.layout.inner)
        self._fsdp_dim_names = tuple(fsdp_dim_names)
        self._replicated = ReplicatedAxis(
            num_replicas, mesh.group_index * mesh.layout.replicate_size + mesh.replicate_index
        )

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh | ReplicatedAxis:
        key = (names,) if isinstance(names, str) else tuple(names)
        if key == self._fsdp_dim_names:
            return self.federation.fsdp
        if key == ("dp_replicate",):
            return self._replicated
        return self.federation.root[key]

    def __getattr__(self, name: str) -> Any:
        if name == "federation":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.federation.root, name)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's coordinate on an axis."""
        if mesh_dim == "dp_replicate":
            return self._replicated.local_rank
        return self.federation.root.get_local_rank(mesh_dim)

    def __repr__(self) -> str:
        return f"AccelerateMeshView({self.federation.layout})"


class FederatedParallelismConfig(ParallelismConfig):
    """
    A `ParallelismConfig` whose FSDP mesh lies inside one federation group.

    Its sizes state the whole world, as for HSDP: `dp_replicate_size` counts the replicas of all groups together.

    Args:
        config ([`FederationConfig`]):
            The federation's settings.
        layout ([`FederationLayout`]):
            Its sizes.
        plugin ([`FederatedFSDPPlugin`], *optional*):
            The plugin to put in force where Accelerate drops it, on CPU.
        base (`ParallelismConfig`, *optional*):
            Where the handlers of the inner axes come from.
    """

    def __init__(
        self,
        config: FederationConfig,
        layout: FederationLayout,
        plugin: FederatedFSDPPlugin | None = None,
        base: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(
            dp_replicate_size=layout.num_groups * layout.replicate_size,
            dp_shard_size=layout.inner.get("dp_shard", 1),
            tp_size=layout.inner.get("tp", 1),
            cp_size=layout.inner.get("cp", 1),
            sp_size=1,
            cp_backend="torch",
            tp_handler=base.tp_handler if base is not None else None,
            cp_handler=base.cp_handler if base is not None else None,
        )
        self.federation_config = config
        self.federation_layout = layout
        self.federation: FederationMesh | None = None
        self.plugin = plugin
        # What a callback took out of Accelerate's state to put this in.
        self.stock: dict[str, Any] = {}

    @property
    def mesh(self) -> FederationMesh:
        """The federation's mesh, which Accelerate has built by the time it has a device."""
        if self.federation is None:
            raise RuntimeError("The federation's mesh is not built yet. Make the Accelerator first.")
        return self.federation

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes over which FSDP2 works: inside one group."""
        return ["dp_shard_cp"] if self.federation_layout.replicate_size == 1 else [REPLICATE_AXIS, "dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> AccelerateMeshView:
        """
        Builds the federation's mesh. Collective over the world.

        Args:
            device_type (`str`):
                The device type of the mesh.
        """
        if self.plugin is not None:
            # Meshes of different shapes would wait for each other for ever. A callback has compared before.
            layout = {"layout": str(self.federation_layout)}
            agree("the federation", {**self.federation_config.comparable(), **layout})
        config = self.federation_config
        mesh = self.federation = build_federation_mesh(
            device_type, self.federation_layout, config.overlap_steps > 0, config.slow_backend
        )
        if self.federation_config.timeout_seconds is not None:
            mesh.set_timeout(self.federation_config.timeout_seconds)
        guard.watch(mesh)
        return AccelerateMeshView(mesh, self.fsdp_dim_names)

    def to_json(self) -> dict[str, Any]:
        """The sizes, for logs; the base class returns nothing here."""
        return {"num_groups": self.federation_layout.num_groups, **{f"{k}_size": v for k, v in self._sizes.items()}}

    def __getstate__(self) -> dict[str, Any]:
        # Trainer pickles its arguments beside the model; process groups cannot be, and mean nothing elsewhere.
        return {**vars(self), "federation": None, "device_mesh": None, "plugin": None, "stock": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> FederatedParallelismConfig:
        return self  # holds process groups, and stands for the one federation of this process

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        # Accelerate calls this once its state stands: the official place to put FSDP in force on CPU.
        if self.plugin is not None:
            from .cpu import enable_fsdp_on_cpu

            enable_fsdp_on_cpu(accelerator.state, self.plugin)
        super()._validate_accelerator(accelerator)

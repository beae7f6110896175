"""The seam to Accelerate's device mesh: its axis names over the whole world, FSDP's collectives inside the group."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh

from . import guard
from .config import FederationConfig, FederationLayout
from .mesh import FED_AXIS, REPLICATE_AXIS, FederationMesh, build_federation_mesh


if TYPE_CHECKING:
    from .plugin import FederatedFSDPPlugin


class AccelerateMeshView:
    """
    A federation's mesh under Accelerate's names.

    Accelerate shards data over the axes *named* `dp_replicate` and `dp_shard`, so under these names the view shows the
    whole world; the slice that FSDP2 asks for lies inside one group. Everything else is the root mesh's.

    Args:
        mesh ([`FederationMesh`]):
            The federation.
    """

    def __init__(self, mesh: FederationMesh) -> None:
        layout, root = mesh.layout, mesh.root
        inner = list(layout.inner)
        outer = [FED_AXIS, REPLICATE_AXIS]
        shard_axes = [axis for axis in inner if axis in ("dp_shard", "cp")]
        self.federation = mesh
        replicated = layout.num_groups * layout.replicate_size > 1
        self.mesh_dim_names = tuple(["dp_replicate"] * replicated + inner)
        # The joint meshes that `ParallelismConfig.build_device_mesh` makes, in its order; each is collective.
        self._joint: dict[tuple[str, ...], DeviceMesh] = {
            ("dp_replicate",): root[tuple(outer)]._flatten("dp_replicate")
        }
        data_axes = [*outer, *(axis for axis in inner if axis == "dp_shard")]
        self._joint["dp",] = root[tuple(data_axes)]._flatten("dp")
        self._joint["dp_shard_cp",] = root[tuple(shard_axes)]._flatten("dp_shard_cp")
        self._joint["dp_cp",] = root[tuple(outer + shard_axes)]._flatten("dp_cp")
        with warnings.catch_warnings():
            # Slicing by a flattened name warns of a coming deprecation; Accelerate itself slices in this way.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
            self._joint[REPLICATE_AXIS, "dp_shard_cp"] = root[REPLICATE_AXIS, "dp_shard_cp"]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        key = (names,) if isinstance(names, str) else tuple(names)
        return self._joint[key] if key in self._joint else self.federation.root[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.federation.root, name)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's coordinate on an axis, also on a joint one."""
        if isinstance(mesh_dim, str) and (mesh_dim,) in self._joint:
            return self._joint[mesh_dim,].get_local_rank()
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
        self.federation = build_federation_mesh(device_type, self.federation_layout)
        if self.federation_config.timeout_seconds is not None:
            self.federation.set_timeout(self.federation_config.timeout_seconds)
        guard.watch(self.federation)
        return AccelerateMeshView(self.federation)

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

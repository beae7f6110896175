"""The sizes of a federation: how a world of ranks is split into groups, replicas and shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import environment


@dataclass(frozen=True)
class FederationLayout:
    """
    The sizes of a federation's axes, outermost first: fed (G) x replicate (R) x what lies inside one replica.

    Args:
        num_groups (`int`):
            G, the number of federation groups.
        replicate_size (`int`):
            R, the replicas inside each group: 1 for FL+FSDP, more for FL+HSDP.
        inner (`dict[str, int]`):
            Names and sizes of the axes inside a replica, outermost first: `dp_shard`, then `cp` and `tp` if used.
    """

    num_groups: int
    replicate_size: int
    inner: dict[str, int] = field(default_factory=dict)

    @property
    def group_size(self) -> int:
        """Ranks in one federation group."""
        return self.replicate_size * math.prod(self.inner.values())

    @property
    def world_size(self) -> int:
        """Ranks in all groups together."""
        return self.num_groups * self.group_size

    @property
    def algorithm(self) -> str:
        """`"FL+FSDP"` with one replica in each group, else `"FL+HSDP"`."""
        return "FL+FSDP" if self.replicate_size == 1 else "FL+HSDP"

    def __str__(self) -> str:
        inner = " x ".join(f"{size} {axis}" for axis, size in self.inner.items())
        return f"{self.algorithm}: {self.num_groups} groups x {self.replicate_size} replicas x {inner}"


def split_world(
    num_groups: int | None, world_size: int, sizes: Mapping[str, int] | None, local_world_size: int | None = None
) -> FederationLayout:
    """
    Splits a world into federation groups.

    Args:
        num_groups (`int`, *optional*):
            G. Defaults to the replicas that `sizes` states, without `sizes` to one group per node.
        world_size (`int`):
            W, the number of ranks.
        sizes (`Mapping[str, int]`, *optional*):
            The whole world as the launch config states it: `dp_replicate`, `dp_shard` and the axes inside
            (`cp`, `tp`). `None` for a plain FSDP config: then every group shards over all of its ranks.
        local_world_size (`int`, *optional*):
            Ranks per node, for the default of one group per node.

    Raises:
        ValueError: If the numbers do not divide, with all of them and the way out in the message.
    """
    if world_size < 2:
        raise ValueError(
            f"A federation needs several processes, but the world size is {world_size}. Start the script with "
            "`accelerate launch --config_file <one of accelerate_configs/>` or `torchrun --nproc_per_node`."
        )
    if sizes is None:
        return _split_plain_fsdp(num_groups, world_size, local_world_size)
    return _split_parallelism_config(num_groups, world_size, sizes)


def _split_plain_fsdp(num_groups: int | None, world_size: int, local_world_size: int | None) -> FederationLayout:
    if num_groups is None:
        local = local_world_size or world_size
        num_groups = world_size // local if world_size % local == 0 else 1
        if num_groups == 1:
            raise ValueError(
                f"No number of federation groups is set, and the default of one group per node gives a single "
                f"group ({world_size} processes, {local} on this node). Set num_groups (or "
                f"{environment.PREFIX}NUM_GROUPS) to a divisor of {world_size}, or dp_replicate_size in the launch "
                "config's parallelism_config."
            )
    if world_size % num_groups != 0:
        raise ValueError(
            f"num_groups={num_groups} does not divide the world of {world_size} processes. Choose one of "
            f"{_divisors(world_size)}."
        )
    shard = world_size // num_groups
    if shard == 1 and num_groups > 1:
        raise ValueError(
            f"num_groups={num_groups} leaves one rank in each group, and FSDP2 needs at least 2 to shard over. "
            f"Choose one of {[d for d in _divisors(world_size) if d <= world_size // 2]}."
        )
    return FederationLayout(num_groups, 1, {"dp_shard": shard})


def _split_parallelism_config(num_groups: int | None, world_size: int, sizes: Mapping[str, int]) -> FederationLayout:
    replicate = sizes.get("dp_replicate", 1)
    inner = {axis: size for axis, size in sizes.items() if axis != "dp_replicate" and size > 1}
    stated = replicate * math.prod(inner.values())
    if stated != world_size:
        product = " x ".join(f"{axis}_size={size}" for axis, size in sizes.items())
        raise ValueError(
            f"The parallelism_config states {product} = {stated} ranks, but the world has {world_size}. Make the "
            "product equal the number of processes."
        )
    if sizes.get("sp", 1) > 1:
        raise ValueError(
            f"sp_size={sizes['sp']} is not supported: it belongs to DeepSpeed, which builds its own process "
            "groups. Use cp_size for long sequences."
        )
    if sizes.get("dp_shard", 1) == 1 and sizes.get("cp", 1) == 1:
        raise ValueError(
            "dp_shard_size=1 leaves FSDP2 nothing to shard over inside a group. Set dp_shard_size to at least 2."
        )
    given, num_groups = num_groups is not None, replicate if num_groups is None else num_groups
    if num_groups == 1 and not given:
        raise ValueError(
            f"The launch config has dp_replicate_size=1, which makes the whole world of {world_size} ranks one "
            "federation group. Set dp_replicate_size to the number of groups and divide dp_shard_size by it, or "
            "remove parallelism_config and set num_groups."
        )
    if replicate % num_groups != 0:
        raise ValueError(
            f"num_groups={num_groups} does not divide dp_replicate_size={replicate}: each group holds "
            f"dp_replicate_size / num_groups whole replicas. Choose one of {_divisors(replicate)}, or change "
            "dp_replicate_size (in a launch config: parallelism_config_dp_replicate_size)."
        )
    return FederationLayout(num_groups, replicate // num_groups, inner)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]

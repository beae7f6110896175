"""What a federation is: its settings, where each comes from, and every range check."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import environment


RESHAPE_RULES = ("nearest", "average")


@dataclass(frozen=True)
class FederationConfig:
    """
    The settings of a federation. They hold for all ranks and are compared over the world when training starts.

    Args:
        num_groups (`int`, *optional*):
            G, the number of federation groups. Defaults to the replicas of the launch config's `parallelism_config`
            (`dp_replicate_size`), without a `parallelism_config` to one group per node.
        sync_every (`int`, defaults to `8`):
            H, the number of optimizer steps in a round, after which the groups average their parameters. 8 is the
            period of the FL+FSDP paper (arXiv 2609.20359).
        bucket_size_bytes (`int`, defaults to `33554432`):
            Size of one flat exchange buffer. Parameters are packed into such buckets; two are alive during a sync.
        log_every_rounds (`int`, defaults to `1`):
            Metrics of a round are logged every so many rounds; `0` logs none.
        timeout_seconds (`float`, *optional*):
            How long a collective may wait for its peers before the run fails. Defaults to the process group's own
            timeout; under Trainer to `TrainingArguments.ddp_timeout`.
        optimizer_on_reshape (`str`, defaults to `"nearest"`):
            Where the groups' optimizer moments come from when a run resumes from a checkpoint with another number of
            groups: `"nearest"`, the group at the same place in the row of groups, or `"average"`, the mean of all.
        preemption_grace_seconds (`float`, defaults to `20`):
            With `TrainingArguments(enable_jit_checkpoint=True)`: time between SIGTERM and the kill, in which the run has to
            save and leave. Half of it, or more where checkpoints take longer, is kept for saving.

    Raises:
        ValueError: If a value is out of its range; the message names the field, the value and what is allowed.
    """

    num_groups: int | None = None
    sync_every: int = 8
    bucket_size_bytes: int = 32 * 2**20
    log_every_rounds: int = 1
    timeout_seconds: float | None = None
    optimizer_on_reshape: str = "nearest"
    preemption_grace_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.num_groups is not None:
            _check_int("num_groups", self.num_groups, minimum=1)
        _check_int("sync_every", self.sync_every, minimum=1)
        _check_int("bucket_size_bytes", self.bucket_size_bytes, minimum=1024)
        _check_int("log_every_rounds", self.log_every_rounds, minimum=0)
        if self.timeout_seconds is not None:
            _check_seconds("timeout_seconds", self.timeout_seconds)
        _check_seconds("preemption_grace_seconds", self.preemption_grace_seconds)
        if self.optimizer_on_reshape not in RESHAPE_RULES:
            raise ValueError(
                f"optimizer_on_reshape must be one of {', '.join(RESHAPE_RULES)}, but got "
                f"{self.optimizer_on_reshape!r}."
            )

    @classmethod
    def from_arguments(cls, **explicit: Any) -> FederationConfig:
        """
        Merges explicit arguments with the environment: explicit beats `FEDSHARD_<NAME>` beats the default.

        Args:
            explicit (`Any`):
                Fields of this class; one that is `None` counts as not given.

        Raises:
            ValueError: If a variable does not parse or a value is out of range.
        """
        fields = {item.name: item for item in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, text in environment.read_settings(fields).items():
            if name == "optimizer_on_reshape":
                values[name] = text
                continue
            kind = float if name.endswith("_seconds") else int
            try:
                values[name] = kind(text)
            except ValueError:
                raise ValueError(
                    f"The environment variable {environment.PREFIX}{name.upper()} must be "
                    f"{'a number' if kind is float else 'an integer'}, but is {text!r}."
                ) from None
        values.update({name: value for name, value in explicit.items() if value is not None})
        return cls(**values)

    def layout(
        self, world_size: int, sizes: Mapping[str, int] | None, local_world_size: int | None = None
    ) -> FederationLayout:
        """
        Splits a world into federation groups.

        Args:
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
            return self._layout_of_plain_fsdp(world_size, local_world_size)
        return self._layout_of_parallelism_config(world_size, sizes)

    def _layout_of_plain_fsdp(self, world_size: int, local_world_size: int | None) -> FederationLayout:
        num_groups = self.num_groups
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

    def _layout_of_parallelism_config(self, world_size: int, sizes: Mapping[str, int]) -> FederationLayout:
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
        num_groups = replicate if self.num_groups is None else self.num_groups
        if num_groups == 1 and self.num_groups is None:
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


def _check_int(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, but got {value!r}.")


def _check_seconds(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise ValueError(f"{name} must be a positive number, but got {value!r}.")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]

"""What is compared: a table of variants, ours by the settings that make them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


SHAPES = {"2x2": 2, "2x4": 4}
"""Ranks in a node; a federation group is a node, with two shards in each of its replicas."""
SHARD_SIZE = 2
RATES = (50, 200, 1000)
"""Mbit/s of the link in each direction."""
CEILING = "ceiling"
ALL = {"2x2": RATES, "2x4": (50,)}
AT_50 = {"2x2": (50,)}
AT_50_AND_200 = {"2x2": (50, 200)}


@dataclass(frozen=True)
class Variant:
    """
    One line of the comparison.

    Args:
        name (`str`):
            Its name on the command line.
        label (`str`):
            Its name in tables.
        kind (`str`):
            Who trains: `"ceiling"`, `"ddp"`, `"fsdp"`, `"hsdp"`, `"accelerate"`, `"torchft"`, `"torchft_diloco"` or
            `"ours"`.
        where (`Mapping[str, Sequence[int]]`):
            The rates at which it is measured unless others are asked for, by shape of the world.
        settings (`Mapping[str, Any]`, *optional*):
            Of ours: fields of `FederationConfig`.
        overlapped (`bool`, defaults to `False`):
            Whether an averaging is still on its way when the next round begins.
    """

    name: str
    label: str
    kind: str
    where: Mapping[str, Sequence[int]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    overlapped: bool = False

    @property
    def is_synchronous(self) -> bool:
        """Whether every step is synchronised over the world, so that there are no rounds."""
        return self.kind in ("ddp", "fsdp", "hsdp")


def _ours(name: str, label: str, where: Mapping[str, Sequence[int]], **settings: Any) -> Variant:
    overlapped = "overlap_steps" in settings
    return Variant(name, label, "ours", where, settings, overlapped)


# As few steps as hide the wire at 50 Mbit/s: 3.4 s of it in fp32, a quarter in int8, an eighth in int4, at 0.36 s a step.
_FP32, _INT8, _INT4 = {"overlap_steps": 8}, {"overlap_steps": 4}, {"overlap_steps": 2}
_FRAGMENTS = {"num_fragments": 4}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(CEILING, "the groups, never averaging", "ceiling", ALL),
        Variant("ddp", "DDP", "ddp", {"2x2": RATES}),
        Variant("fsdp", "FSDP2 over all ranks", "fsdp", {"2x2": RATES}),
        Variant("hsdp", "HSDP", "hsdp", ALL),
        Variant("local_sgd", "accelerate LocalSGD (DDP)", "accelerate", AT_50_AND_200),
        Variant("torchft_local_sgd", "torchft LocalSGD", "torchft", AT_50),
        Variant("torchft_diloco", "torchft DiLoCo", "torchft_diloco", AT_50),
        # The wire format that exists before there is a choice: it needs no setting.
        _ours("fp32", "ours, fp32, blocking", ALL),
        _ours("bf16", "ours, bf16, blocking", AT_50, wire_format="bf16"),
        _ours("int8", "ours, int8, blocking", AT_50_AND_200, wire_format="int8"),
        _ours("int4", "ours, int4, blocking", AT_50, wire_format="int4"),
        _ours("fp32_overlap", "ours, fp32, overlapped", {"2x2": RATES}, **_FP32),
        _ours("fp32_stream", "ours, fp32, in fragments", AT_50, **_FP32, **_FRAGMENTS),
        _ours("int8_overlap", "ours, int8, overlapped", {"2x2": (50, 200), "2x4": (50,)}, wire_format="int8", **_INT8),
        _ours("int8_stream", "ours, int8, in fragments", AT_50, wire_format="int8", **_INT8, **_FRAGMENTS),
        _ours("int4_overlap", "ours, int4, overlapped", AT_50, wire_format="int4", **_INT4),
    )
}

LEARNING = {"fsdp": 1, "fp32": 2, "int8": 2, "int4": 2, "fp32_overlap": 2, "int8_overlap": 2, "int4_overlap": 2}
"""Variants of the learning part, and how often they make `--learning_steps`: a group's step has half of the tokens."""


def unavailable(variant: Variant, sync_every: int = 8) -> str | None:
    """
    Args:
        variant ([`Variant`]):
            A variant.
        sync_every (`int`, *optional*, defaults to 8):
            H, which some settings do not go with.

    Returns:
        `str` or `None`: Why it cannot be measured with what is installed, in rounds of this length.
    """
    if variant.kind.startswith("torchft") and importlib.util.find_spec("torchft") is None:
        return "torchft is not installed (pip install torchft)"
    if variant.kind != "ours":
        return None
    from hf_fedshard import FederationConfig

    unknown = sorted(set(variant.settings) - set(FederationConfig.names()))
    if unknown:
        return f"this version of hf_fedshard has no setting {', '.join(unknown)}"
    try:
        FederationConfig(**{"num_groups": 2, "sync_every": sync_every, **variant.settings})
    except ValueError as error:
        return f"this version of hf_fedshard refuses it: {error}"
    return None


def choose(names: Sequence[str] | None, shape: str, rate: int) -> list[Variant]:
    """
    The variants of one block of the measurement, the ceiling first.

    Args:
        names (`Sequence[str]`, *optional*):
            Those that were asked for. Defaults to those that the table lists for the shape and rate.
        shape (`str`):
            Shape of the world.
        rate (`int`):
            Mbit/s.

    Returns:
        `list[Variant]`: In the order of the table.

    Raises:
        ValueError: If there is no such variant.
    """
    if names is None:
        names = [name for name, variant in VARIANTS.items() if rate in variant.where.get(shape, ())]
    unknown = sorted(set(names) - set(VARIANTS))
    if unknown:
        raise ValueError(f"There is no variant {', '.join(unknown)}. Choose among {', '.join(VARIANTS)}.")
    return [variant for name, variant in VARIANTS.items() if name in {CEILING, *names}]

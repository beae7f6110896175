"""How a world of ranks is split into groups, replicas and shards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_fedshard import FederationConfig, FederationLayout


@pytest.mark.parametrize(
    ("num_groups", "world_size", "sizes", "local", "expected"),
    [
        # A plain FSDP config: groups of W/G shards.
        (2, 4, None, 4, FederationLayout(2, 1, {"dp_shard": 2})),
        (None, 8, None, 4, FederationLayout(2, 1, {"dp_shard": 4})),
        (1, 4, None, 4, FederationLayout(1, 1, {"dp_shard": 4})),
        # HSDP: as many groups as replicas, or fewer.
        (None, 8, {"dp_replicate": 4, "dp_shard": 2}, 8, FederationLayout(4, 1, {"dp_shard": 2})),
        (2, 8, {"dp_replicate": 4, "dp_shard": 2}, 8, FederationLayout(2, 2, {"dp_shard": 2})),
        (1, 8, {"dp_replicate": 4, "dp_shard": 2}, 8, FederationLayout(1, 4, {"dp_shard": 2})),
        (16, 512, {"dp_replicate": 128, "dp_shard": 4}, 4, FederationLayout(16, 8, {"dp_shard": 4})),
        # Axes inside a replica stay inside, outermost first; those of size 1 are left out.
        (
            None,
            16,
            {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "sp": 1, "tp": 2},
            8,
            FederationLayout(2, 1, {"dp_shard": 2, "cp": 2, "tp": 2}),
        ),
        (2, 8, {"dp_replicate": 4, "cp": 2}, 8, FederationLayout(2, 2, {"cp": 2})),
    ],
)
def test_layout(
    num_groups: int | None, world_size: int, sizes: dict[str, int] | None, local: int, expected: FederationLayout
) -> None:
    layout = FederationConfig(num_groups=num_groups).layout(world_size, sizes, local)
    assert layout == expected
    assert list(layout.inner) == list(expected.inner)
    assert layout.world_size == world_size
    assert layout.algorithm == ("FL+FSDP" if expected.replicate_size == 1 else "FL+HSDP")


def test_layout_as_text() -> None:
    assert (
        str(FederationLayout(2, 2, {"dp_shard": 4, "tp": 2})) == "FL+HSDP: 2 groups x 2 replicas x 4 dp_shard x 2 tp"
    )


HSDP = {"dp_replicate": 4, "dp_shard": 2}


@pytest.mark.parametrize(
    ("num_groups", "world_size", "sizes", "local", "parts"),
    [
        pytest.param(2, 1, None, 1, ["world size is 1", "accelerate launch"], id="one process"),
        pytest.param(3, 8, None, 8, ["num_groups=3", "8 processes", "[1, 2, 4, 8]"], id="world not divisible"),
        pytest.param(4, 4, None, 4, ["num_groups=4", "one rank in each group", "[1, 2]"], id="one rank in each group"),
        pytest.param(None, 8, None, 8, ["single group", "8 processes", "FEDSHARD_NUM_GROUPS"], id="one node"),
        pytest.param(None, 8, None, None, ["single group", "FEDSHARD_NUM_GROUPS"], id="node size unknown"),
        pytest.param(None, 6, None, 4, ["single group", "6 processes, 4 on this node"], id="uneven nodes"),
        pytest.param(
            3, 8, HSDP, 8, ["num_groups=3", "dp_replicate_size=4", "[1, 2, 4]"], id="groups that do not divide"
        ),
        pytest.param(8, 8, HSDP, 8, ["num_groups=8", "dp_replicate_size=4"], id="more groups than replicas"),
        pytest.param(
            None, 8, {"dp_replicate": 1, "dp_shard": 8}, 8, ["dp_replicate_size=1", "8 ranks", "num_groups"], id="G=1"
        ),
        pytest.param(
            2, 4, {"dp_replicate": 4, "dp_shard": 1}, 4, ["dp_shard_size=1", "at least 2"], id="nothing to shard"
        ),
        pytest.param(
            2, 12, HSDP, 12, ["dp_replicate_size=4 x dp_shard_size=2 = 8 ranks", "world has 12"], id="wrong product"
        ),
        pytest.param(2, 16, {**HSDP, "sp": 2}, 16, ["sp_size=2", "cp_size"], id="sequence parallelism"),
    ],
)
def test_layout_errors(
    num_groups: int | None, world_size: int, sizes: dict[str, int] | None, local: int | None, parts: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        FederationConfig(num_groups=num_groups).layout(world_size, sizes, local)
    for part in parts:
        assert part in str(caught.value)


small = st.integers(1, 6)


@given(st.integers(1, 32), small, st.integers(2, 8), small, small)
def test_layout_fills_the_world(groups: int, replicas: int, shard: int, cp: int, tp: int) -> None:
    sizes = {"dp_replicate": groups * replicas, "dp_shard": shard, "cp": cp, "sp": 1, "tp": tp}
    world_size = math.prod(sizes.values())
    layout = FederationConfig(num_groups=groups).layout(world_size, sizes)
    assert (layout.num_groups, layout.replicate_size) == (groups, replicas)
    assert layout.num_groups * layout.replicate_size * math.prod(layout.inner.values()) == world_size
    assert layout.world_size == world_size
    assert layout.group_size * groups == world_size
    assert all(size > 1 for size in layout.inner.values())


@given(st.integers(2, 512), st.integers(1, 512))
def test_plain_layout_fills_the_world_or_is_refused(world_size: int, groups: int) -> None:
    allowed = world_size % groups == 0 and world_size // groups >= 2
    try:
        layout = FederationConfig(num_groups=groups).layout(world_size, None)
    except ValueError as error:
        assert not allowed
        assert str(groups) in str(error)
    else:
        assert allowed
        assert (layout.num_groups, layout.group_size, layout.world_size) == (groups, world_size // groups, world_size)

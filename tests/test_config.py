"""Settings of a federation: where each comes from, range checks, the layout of a world. And the environment's reader."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_fedshard import FederationConfig, FederationLayout, environment
from tests.harness.environment import patched_environment


# One value of each field that is not its default, and its text in a variable.
OTHERS = {
    "num_groups": (6, "6"),
    "sync_every": (3, "3"),
    "bucket_size_bytes": (4096, "4096"),
    "log_every_rounds": (0, "0"),
    "timeout_seconds": (1.5, "1.5"),
    "optimizer_on_reshape": ("average", "average"),
    "preemption_grace_seconds": (2.5, "2.5"),
}
LAUNCH_PREFIXES = (environment.PREFIX, "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    with patched_environment({}, drop_prefixes=LAUNCH_PREFIXES):
        yield


def test_defaults() -> None:
    assert dataclasses.asdict(FederationConfig.from_arguments()) == {
        "num_groups": None,
        "sync_every": 8,
        "bucket_size_bytes": 32 * 2**20,
        "log_every_rounds": 1,
        "timeout_seconds": None,
        "optimizer_on_reshape": "nearest",
        "preemption_grace_seconds": 20.0,
    }
    assert {item.name for item in dataclasses.fields(FederationConfig)} == set(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_explicit_beats_environment_beats_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, text = OTHERS[name]
    default = getattr(FederationConfig(), name)
    assert value != default
    monkeypatch.setenv(f"FEDSHARD_{name.upper()}", text)
    read = getattr(FederationConfig.from_arguments(), name)
    assert (read, type(read)) == (value, type(value))
    assert getattr(FederationConfig.from_arguments(**{name: None}), name) == value
    explicit = 2048 if isinstance(value, (int, float)) else default
    assert getattr(FederationConfig.from_arguments(**{name: explicit}), name) == explicit
    monkeypatch.setenv(f"FEDSHARD_{name.upper()}", "")
    assert getattr(FederationConfig.from_arguments(), name) == default


def test_the_class_itself_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHARD_SYNC_EVERY", "3")
    assert FederationConfig().sync_every == 8


def test_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHARD_SYNC_EVREY", "3")
    with pytest.raises(ValueError, match="Unknown environment variable FEDSHARD_SYNC_EVREY") as caught:
        FederationConfig.from_arguments(sync_every=4)
    for name in OTHERS:
        assert f"FEDSHARD_{name.upper()}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("num_groups", "two", "an integer"),
        ("sync_every", "8.0", "an integer"),
        ("bucket_size_bytes", "32MiB", "an integer"),
        ("log_every_rounds", "never", "an integer"),
        ("timeout_seconds", "30s", "a number"),
    ],
)
def test_variable_that_does_not_parse(name: str, text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FEDSHARD_{name.upper()}", text)
    with pytest.raises(ValueError) as caught:
        FederationConfig.from_arguments()
    assert str(caught.value) == f"The environment variable FEDSHARD_{name.upper()} must be {kind}, but is '{text}'."


def test_variable_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHARD_SYNC_EVERY", "0")
    with pytest.raises(ValueError, match="sync_every must be an integer of at least 1, but got 0"):
        FederationConfig.from_arguments()


@pytest.mark.parametrize(
    ("name", "minimum"), [("num_groups", 1), ("sync_every", 1), ("bucket_size_bytes", 1024), ("log_every_rounds", 0)]
)
def test_range_of_integers(name: str, minimum: int) -> None:
    assert getattr(FederationConfig(**{name: minimum}), name) == minimum
    for wrong in (minimum - 1, -8, minimum + 0.5, float(minimum), str(minimum), True):
        with pytest.raises(ValueError) as caught:
            FederationConfig(**{name: wrong})  # type: ignore[arg-type]
        assert str(caught.value) == f"{name} must be an integer of at least {minimum}, but got {wrong!r}."


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, "30", True])
def test_range_of_timeout(wrong: Any) -> None:
    with pytest.raises(ValueError) as caught:
        FederationConfig(timeout_seconds=wrong)
    assert str(caught.value) == f"timeout_seconds must be a positive number, but got {wrong!r}."


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


def test_environment_without_a_launcher() -> None:
    assert (environment.launched_world_size(), environment.launched_local_world_size()) == (1, 1)
    assert environment.launched_parallelism() is None
    assert environment.launched_fsdp_version() is None
    assert environment.launched_auto_wrap_policy() is None
    assert not environment.launch_asks_for_fsdp()
    assert not environment.launch_forces_cpu()


def test_environment_of_a_launch(root: Any) -> None:
    from tests.harness.launch_env import launch_env

    variables = launch_env(root / "accelerate_configs" / "cpu_fl_hsdp_8proc.yaml")
    with patched_environment({**variables, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}):
        assert (environment.launched_world_size(), environment.launched_local_world_size()) == (8, 4)
        sizes = {"dp_replicate": 4, "dp_shard": 2, "cp": 1, "sp": 1, "tp": 1}
        assert environment.launched_parallelism() == sizes
        assert environment.launched_fsdp_version() == 2
        assert environment.launched_auto_wrap_policy() == "TRANSFORMER_BASED_WRAP"
        assert environment.launch_asks_for_fsdp()
        assert FederationConfig.from_arguments(num_groups=2).layout(8, sizes).replicate_size == 2

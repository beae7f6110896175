"""Settings of a federation: where each comes from, range checks. And the environment's reader."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_fedshard import FedAvgCallback, FederatedFSDPPlugin, FederationConfig, environment
from tests.harness.environment import patched_environment


# One value of each field that is not its default, and its text in a variable.
OTHERS = {
    "num_groups": (6, "6"),
    "sync_every": (3, "3"),
    "min_sync_every": (2, "2"),
    "max_sync_every": (64, "64"),
    "max_sync_share": (0.1, "0.1"),
    "sync_steps_at_start": (5, "5"),
    "sync_steps_at_end": (6, "6"),
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
        "min_sync_every": 1,
        "max_sync_every": 128,
        "max_sync_share": 0.05,
        "max_drift": None,
        "sync_steps_at_start": 0,
        "sync_steps_at_end": 0,
        "bucket_size_bytes": 32 * 2**20,
        "log_every_rounds": 1,
        "timeout_seconds": None,
        "optimizer_on_reshape": "nearest",
        "preemption_grace_seconds": 20.0,
    }
    # Of use with one value of another field only.
    assert {item.name for item in dataclasses.fields(FederationConfig)} == {*OTHERS, "max_drift"}


@pytest.mark.parametrize("name", OTHERS)
def test_explicit_beats_environment_beats_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, text = OTHERS[name]
    default = getattr(FederationConfig(), name)
    assert value != default
    monkeypatch.setenv(f"FEDSHARD_{name.upper()}", text)
    read = getattr(FederationConfig.from_arguments(), name)
    assert (read, type(read)) == (value, type(value))
    assert getattr(FederationConfig.from_arguments(**{name: None}), name) == value
    explicit = 0.5 if isinstance(default, float) else 2048 if isinstance(value, (int, float)) else default
    if name == "min_sync_every":
        explicit = 7
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
        ("max_sync_every", "8.0", "an integer"),
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
    with pytest.raises(ValueError, match="sync_every must be an integer of at least 1, .*, but got 0"):
        FederationConfig.from_arguments()


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("num_groups", 1),
        ("min_sync_every", 1),
        ("max_sync_every", 1),
        ("sync_steps_at_start", 0),
        ("sync_steps_at_end", 0),
        ("bucket_size_bytes", 1024),
        ("log_every_rounds", 0),
    ],
)
def test_range_of_integers(name: str, minimum: int) -> None:
    assert getattr(FederationConfig(**{name: minimum}), name) == minimum
    for wrong in (minimum - 1, -8, minimum + 0.5, float(minimum), str(minimum), True):
        with pytest.raises(ValueError) as caught:
            FederationConfig(**{name: wrong})  # type: ignore[arg-type]
        assert str(caught.value) == f"{name} must be an integer of at least {minimum}, but got {wrong!r}."


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (0, ""),
        (-1, ""),
        (8.0, ""),
        (True, ""),
        ("", "no list"),
        ("8x", "no list"),
        ("0", ""),
        ("8,16", "only the last"),
        ("*2", "no list"),
        ("8x2,*0", "no list"),
        ("8,*2", "only the last"),
        ("weekly", "no list"),
        ("4x2,8x0", "no list"),
    ],
)
def test_range_of_the_period(wrong: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^sync_every must be an integer of at least 1, a list .*, but got .*{why}"):
        FederationConfig(sync_every=wrong)


@pytest.mark.parametrize("every", [1, "auto", "8x100,16", "4x50,*2", "8x100", "8"])
def test_periods_that_are_allowed(every: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHARD_SYNC_EVERY", str(every))
    config = FederationConfig.from_arguments()
    assert config.sync_every == FederationConfig(sync_every=every).sync_every == (8 if every == "8" else every)
    assert FedAvgCallback().config == FederatedFSDPPlugin().federation_config == config


def test_periods_by_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match='sync_every="drift" needs max_drift'):
        FederationConfig(sync_every="drift")
    with pytest.raises(ValueError, match='max_drift=0.1 is for sync_every="drift", but sync_every is 8'):
        FederationConfig(max_drift=0.1)
    for wrong in (0, -0.1, math.inf, "0.1", True):
        with pytest.raises(ValueError, match="max_drift must be a positive number, but got"):
            FederationConfig(sync_every="drift", max_drift=wrong)  # type: ignore[arg-type]
    monkeypatch.setenv("FEDSHARD_SYNC_EVERY", "drift")
    monkeypatch.setenv("FEDSHARD_MAX_DRIFT", "0.01")
    assert FedAvgCallback().config == FederationConfig(sync_every="drift", max_drift=0.01)


def test_bounds_of_the_period() -> None:
    with pytest.raises(ValueError, match="max_sync_every must be an integer of at least 9, but got 8"):
        FederationConfig(min_sync_every=9, max_sync_every=8)
    for wrong in (0, 1, 1.5, -0.1, math.nan, "0.1", True):
        with pytest.raises(ValueError, match="max_sync_share must be a number between 0 and 1, but got"):
            FederationConfig(max_sync_share=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, "30", True])
def test_range_of_timeout(wrong: Any) -> None:
    with pytest.raises(ValueError) as caught:
        FederationConfig(timeout_seconds=wrong)
    assert str(caught.value) == f"timeout_seconds must be a positive number, but got {wrong!r}."


@pytest.mark.parametrize("make", [FederationConfig.from_arguments, FedAvgCallback, FederatedFSDPPlugin])
def test_unknown_setting(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="syncevery is no setting of a federation. Did you mean sync_every?") as caught:
        make(syncevery=3)
    for name in OTHERS:
        assert name in str(caught.value)


def test_callback_and_plugin_take_every_setting() -> None:
    values = {name: value for name, (value, _) in OTHERS.items()}
    assert FedAvgCallback(**values).config == FederationConfig(**values)
    plugin = FederatedFSDPPlugin(**values, cpu_offload=True)
    assert plugin.federation_config == FederationConfig(**values)
    assert plugin.cpu_offload


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

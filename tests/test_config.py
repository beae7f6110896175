"""Settings of a federation: where each comes from, range checks. And the environment's reader."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Unpack, get_type_hints

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin

from hf_fedshard import FedAvgCallback, FederatedFSDPPlugin, FederationConfig, environment
from hf_fedshard.settings import FederationSettings, PluginSettings
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
    "outer_optimizer": ("nesterov", "nesterov"),
    "outer_learning_rate": (0.7, "0.7"),
    "outer_options": ("momentum=0.8", "momentum=0.8"),
    "outer_schedule": ("cosine", "cosine"),
    "outer_warmup_rounds": (2, "2"),
    "outer_schedule_rounds": (9, "9"),
    "outer_max_norm": (1.5, "1.5"),
    "group_weights": ("tokens", "tokens"),
    "inner_moments": ("average", "average"),
    "include_parameters": ("*.weight", "*.weight"),
    "exclude_parameters": ("*norm*, re:bias$", "*norm*, re:bias$"),
    "local_parameters": ("lm_head.*", "lm_head.*"),
    "lora_average": ("freeze_a", "freeze_a"),
    "proximal_mu": (0.01, "0.01"),
    "wire_format": ("int4", "int4"),
    "offload_outer_state": (True, "true"),
    "overlap_steps": (2, "2"),
    "overlap_alpha": (0.25, "0.25"),
    "num_fragments": (3, "3"),
    "slow_backend": ("gloo", "gloo"),
}
# What makes a setting valid that depends on another one.
COMPANIONS: dict[str, dict[str, Any]] = {
    "outer_options": {"outer_optimizer": "fedavgm"},
    "outer_schedule": {"outer_schedule_rounds": 5},
    "outer_schedule_rounds": {"outer_schedule": "linear"},
    "overlap_steps": {"sync_every": 4096},
    "overlap_alpha": {"overlap_steps": 1},
    "num_fragments": {"overlap_steps": 1, "sync_every": 4096},
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
        "outer_optimizer": "fedavg",
        "outer_learning_rate": None,
        "outer_options": "",
        "outer_schedule": "constant",
        "outer_warmup_rounds": 0,
        "outer_schedule_rounds": None,
        "outer_max_norm": None,
        "group_weights": "uniform",
        "inner_moments": "keep",
        "include_parameters": "*",
        "exclude_parameters": "",
        "local_parameters": "",
        "lora_average": "factors",
        "proximal_mu": 0.0,
        "wire_format": "fp32",
        "offload_outer_state": False,
        "overlap_steps": 0,
        "overlap_alpha": 0.0,
        "num_fragments": 1,
        "slow_backend": None,
    }
    # Of use with one value of another field only.
    assert {item.name for item in dataclasses.fields(FederationConfig)} == {*OTHERS, "max_drift"}


@pytest.mark.parametrize("name", OTHERS)
def test_explicit_beats_environment_beats_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, text = OTHERS[name]
    default = getattr(FederationConfig(), name)
    assert value != default
    others = COMPANIONS.get(name, {})
    monkeypatch.setenv(f"FEDSHARD_{name.upper()}", text)
    read = getattr(FederationConfig.from_arguments(**others), name)
    assert (read, type(read)) == (value, type(value))
    assert getattr(FederationConfig.from_arguments(**{name: None}, **others), name) == value
    explicit = 0.5 if isinstance(default, float) else 2048 if isinstance(value, (int, float)) else default
    if name == "min_sync_every":
        explicit = 7
    if isinstance(default, bool):
        explicit = default
    if name in ("slow_backend", "outer_schedule"):
        explicit = {"slow_backend": "nccl", "outer_schedule": "linear"}[name]
    assert getattr(FederationConfig.from_arguments(**{name: explicit}, **others), name) == explicit
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
    with pytest.raises(ValueError, match="min_sync_every=9 must not be above max_sync_every=8"):
        FederationConfig(min_sync_every=9, max_sync_every=8)
    for wrong in (0, 1, 1.5, -0.1, math.nan, "0.1", True):
        with pytest.raises(ValueError, match="max_sync_share must be a number between 0 and 1, but got"):
            FederationConfig(max_sync_share=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1.0, 1e-4, 1e10, math.inf, math.nan, "30", True])
def test_range_of_timeout(wrong: Any) -> None:
    with pytest.raises(ValueError) as caught:
        FederationConfig(timeout_seconds=wrong)
    assert str(caught.value) == f"timeout_seconds must be a positive number, 0.001 to 1e9, but got {wrong!r}."


@pytest.mark.parametrize("make", [FederationConfig.from_arguments, FedAvgCallback, FederatedFSDPPlugin])
def test_unknown_setting(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="syncevery is no setting of a federation. Did you mean sync_every?") as caught:
        make(syncevery=3)
    for name in OTHERS:
        assert name in str(caught.value)


def test_callback_and_plugin_take_every_setting() -> None:
    values = {name: value for name, (value, _) in OTHERS.items()}
    values |= {"inner_moments": "reset", "num_fragments": 1}  # the others do not go with `overlap_steps`
    assert FedAvgCallback(**values).config == FederationConfig(**values)
    plugin = FederatedFSDPPlugin(**values, cpu_offload=True)
    assert plugin.federation_config == FederationConfig(**values)
    assert plugin.cpu_offload


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"outer_optimizer": "Adafactor"}, "outer_optimizer=Adafactor cannot step shards: it keeps row and column means"),
    ({"outer_optimizer": "Muon"}, "outer_optimizer=Muon cannot step shards: it orthogonalises whole matrices"),
    ({"outer_optimizer": "LBFGS"}, "outer_optimizer=LBFGS cannot step shards"),
    (
        {"outer_optimizer": "fedprox"},
        "outer_optimizer must be one of fedavg, fedavgm, nesterov, .*, but got 'fedprox'",
    ),
    ({"outer_learning_rate": 0}, "outer_learning_rate must be a number above 0, but got 0"),
    ({"outer_learning_rate": math.nan}, "outer_learning_rate must be a number above 0, but got nan"),
    ({"outer_options": "momentum=0.9"}, "outer_options has momentum, which outer_optimizer=fedavg does not take"),
    ({"outer_optimizer": "SGD", "outer_options": {"lr": 1}}, "The learning rate is outer_learning_rate"),
    ({"outer_optimizer": "SGD", "outer_options": {"maximize": True}}, "outer_options has maximize"),
    ({"outer_optimizer": "AdamW", "outer_options": "betas=(1.5, 0.9)"}, "does not take .*: Invalid beta"),
    ({"outer_optimizer": "fedadam", "outer_options": "beta1=1.0"}, "Invalid beta1 value: 1.0"),
    ({"outer_optimizer": "fedyogi", "outer_options": "tau=0"}, "Invalid tau value: 0"),
    ({"outer_options": "momentum"}, "outer_options must be written as the arguments of a call"),
    ({"outer_options": "**{}"}, "outer_options must be written as the arguments of a call"),
    ({"outer_options": "a=open('x')"}, "outer_options must be written as the arguments of a call"),
    ({"outer_schedule": "cosine"}, "outer_schedule='cosine' needs outer_schedule_rounds"),
    ({"outer_schedule": "step"}, "outer_schedule must be one of constant, linear, cosine, but got 'step'"),
    ({"outer_warmup_rounds": -1}, "outer_warmup_rounds must be an integer of at least 0"),
    (
        {"outer_schedule": "linear", "outer_warmup_rounds": 4, "outer_schedule_rounds": 4},
        "outer_warmup_rounds=4 leaves nothing",
    ),
    (
        {"outer_schedule_rounds": 9},
        "outer_schedule_rounds=9 is where a schedule ends, but outer_schedule is 'constant'",
    ),
    ({"outer_schedule_rounds": 9, "outer_warmup_rounds": 2}, "Set outer_schedule to 'linear' or 'cosine', or leave"),
    (
        {"outer_optimizer": "Rprop", "outer_warmup_rounds": 2},
        "outer_optimizer=Rprop takes no learning rate but the first",
    ),
    (
        {"outer_optimizer": "ASGD", "outer_schedule": "cosine", "outer_schedule_rounds": 9},
        "ASGD takes a changed learning rat",
    ),
    ({"outer_max_norm": -1.0}, "outer_max_norm must be a number above 0"),
    ({"group_weights": "loss"}, "group_weights must be one of uniform, samples, tokens, steps, a function"),
    ({"group_weights": 3}, "group_weights must be one of"),
    ({"group_weights": "nowhere:f"}, "group_weights='nowhere:f' cannot be imported"),
    ({"inner_moments": "mean"}, "inner_moments must be one of keep, reset, average, but got 'mean'"),
    ({"local_parameters": "re:("}, "local_parameters: the regular expression 're:\\(' is not valid"),
    ({"include_parameters": [3]}, "include_parameters: patterns must be texts"),
    ({"lora_average": "svd"}, "lora_average must be one of factors, product, freeze_a, but got 'svd'"),
    ({"lora_average": "product", "outer_optimizer": "nesterov"}, "lora_average='product' cannot be stepped by"),
    ({"proximal_mu": -0.1}, "proximal_mu must be a number of at least 0, but got -0.1"),
    ({"proximal_mu": math.inf}, "proximal_mu must be a number of at least 0"),
    ({"wire_format": "fp8"}, "wire_format must be one of fp32, bf16, int8, int4, but got 'fp8'"),
    (
        {"wire_format": "int4", "lora_average": "product"},
        "and wire_format='int4' carries differences of averages only",
    ),
    ({"offload_outer_state": "cpu"}, "offload_outer_state must be True or False, but got 'cpu'"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(settings) for settings, _ in WRONG])
def test_outer_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederationConfig(**settings)


ANYTHING: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        2.5,
        math.nan,
        math.inf,
        10**30,
        1j,
        "",
        "x",
        b"int8",
        (),
        [],
        ["x"],
        {},
        {"a": 1},
        {1: 2},
    ),
    *({"x"}, object(), int, torch.tensor([1.0, 2.0])),
)


@pytest.mark.parametrize("name", FederationConfig.names())
@pytest.mark.parametrize("others", [{}, {"overlap_steps": 2, "outer_warmup_rounds": 1}], ids=["alone", "with others"])
def test_a_value_of_any_type_is_taken_or_refused_by_name(name: str, others: dict[str, Any]) -> None:
    for value in ANYTHING:
        try:
            FederationConfig(**{**others, name: value}).comparable()
        except ValueError as error:
            assert name in str(error), f"{value!r}: {error}"


def by_loss(counts: Any) -> list[float]:
    return [1 / count.loss for count in counts]


def test_comparable_settings() -> None:
    """Ranks compare what was meant, however it was written, and a function by its name."""
    text = FederationConfig(
        outer_optimizer="Adam", outer_options="eps=1e-6, betas=(0.9, 0.95)", local_parameters="a, b"
    )
    given = FederationConfig(
        outer_optimizer="Adam", outer_options={"betas": (0.9, 0.95), "eps": 1e-6}, local_parameters=["a", "b"]
    )
    assert text.comparable() == given.comparable()
    assert FederationConfig(group_weights=by_loss).comparable()["group_weights"] == f"{__name__}:by_loss"
    assert FederationConfig(group_weights=f"{__name__}:by_loss").group_weights == f"{__name__}:by_loss"


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


def test_settings_as_keyword_arguments() -> None:
    """What type checkers are told of the callback and the plugin is what the configuration and Accelerate take."""
    fields = get_type_hints(FederationConfig)
    settings = get_type_hints(FederationSettings)
    assert settings == {name: fields[name] | None for name in fields if name not in ("num_groups", "sync_every")}
    upstream = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert set(get_type_hints(PluginSettings)) - set(settings) == upstream
    for owner, told in ((FedAvgCallback, FederationSettings), (FederatedFSDPPlugin, PluginSettings)):
        assert get_type_hints(owner.__init__)["settings"] == Unpack[told]

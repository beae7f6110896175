"""What a study trains: its settings, read from a YAML file."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from hf_fedshard import FederationConfig


MODES = ("synchronous", "federated", "alone")
FEDERATION_FIELDS = {item.name for item in fields(FederationConfig)} - {"num_groups"}


@dataclass(frozen=True)
class Setting:
    """
    One run. At equal `batch_size` and `max_steps` all runs but those of one group alone see the same tokens.

    Args:
        mode (`str`, defaults to `"federated"`):
            `"synchronous"`: one batch of all groups for each update, as HSDP has it; `"federated"`; or `"alone"`: what one
            of the groups becomes without the others.
        num_groups (`int`, defaults to 4):
            G. In synchronous runs it says among how many groups the bytes are counted.
        batch_size (`int`, defaults to 16):
            Sequences that all groups draw for one step together; a group draws 1/G of them.
        max_steps (`int`, defaults to 400):
            Optimizer steps.
        learning_rate (`float`, defaults to 3e-3):
            Peak of the schedule.
        warmup_steps (`int`, defaults to 40):
            Steps of linear warm-up.
        lr_scheduler_type (`str`, defaults to `"cosine"`):
            Schedule, as of [`~transformers.get_scheduler`].
        adam_beta1 (`float`, defaults to 0.9):
            Of AdamW.
        adam_beta2 (`float`, defaults to 0.95):
            Of AdamW.
        weight_decay (`float`, defaults to 0.1):
            Of AdamW.
        max_grad_norm (`float`, defaults to 1.0):
            Clips the gradient of a group, in synchronous steps that of all.
        seed (`int`, defaults to 42):
            Of the weights and of the order of the data.
        model (`dict[str, Any]`, *optional*):
            What differs from the preset in the model's configuration.
        federation (`dict[str, Any]`, *optional*):
            Arguments of [`FederationConfig`].

    Raises:
        ValueError: If the values do not go together.
    """

    mode: str = "federated"
    num_groups: int = 4
    batch_size: int = 16
    max_steps: int = 400
    learning_rate: float = 3e-3
    warmup_steps: int = 40
    lr_scheduler_type: str = "cosine"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 42
    model: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}, got {self.mode!r}.")
        if self.batch_size % self.num_groups:
            raise ValueError(f"batch_size={self.batch_size} is not divisible by num_groups={self.num_groups}.")
        if self.mode != "federated" and self.federation:
            raise ValueError(f"mode={self.mode!r} has no federation, got {self.federation}.")
        if self.mode == "federated":
            self.config()

    @property
    def key(self) -> str:
        """The setting as one line of JSON, by which a result is found again."""
        return json.dumps(asdict(self), sort_keys=True)

    def config(self) -> FederationConfig:
        """The settings of the federation."""
        return FederationConfig(num_groups=self.num_groups, **self.federation)


@dataclass(frozen=True)
class Stage:
    """
    Settings that belong together.

    Args:
        name (`str`):
            Name of the stage.
        settings (`list[Setting]`):
            Its runs, in order.
    """

    name: str
    settings: list[Setting]


def read_study(path: Path) -> list[Stage]:
    """
    Reads a study: `defaults`, which hold for all runs, and `stages`, each with a `name` and a list of `runs`. A run maps
    names of [`Setting`] and of [`FederationConfig`] to values; lists of values are tried in all combinations.

    Args:
        path (`Path`):
            YAML file.

    Raises:
        ValueError: If it has other keys, or a setting is wrong; the message names the stage.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = set(content) - {"defaults", "stages"}
    if unknown or "stages" not in content:
        raise ValueError(f"{path} should hold defaults and stages, got {', '.join(sorted(content))}.")
    defaults = content.get("defaults") or {}
    stages = []
    for stage in content["stages"]:
        try:
            settings = [make_setting(values) for run in stage["runs"] for values in _combinations({**defaults, **run})]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, stage {stage['name']}: {error}") from error
        stages.append(Stage(stage["name"], settings))
    return stages


def make_setting(values: Mapping[str, Any]) -> Setting:
    """
    Makes a setting of values by flat names.

    Args:
        values (`Mapping[str, Any]`):
            Of [`Setting`] and of [`FederationConfig`]. The latter are left out in runs that have no federation.

    Raises:
        ValueError: If a name is unknown or a value is wrong.
    """
    own = {item.name for item in fields(Setting)} - {"federation"}
    unknown = sorted(set(values) - own - FEDERATION_FIELDS)
    if unknown:
        raise ValueError(f"unknown settings: {', '.join(unknown)}.")
    # YAML takes 3e-3 for a text.
    numbers = {item.name for item in fields(Setting) if item.type is float}
    plain: dict[str, Any] = {
        name: float(value) if name in numbers else value for name, value in values.items() if name in own
    }
    federation = {name: value for name, value in values.items() if name in FEDERATION_FIELDS}
    return Setting(**plain, federation=federation if plain.get("mode", "federated") == "federated" else {})


def describe(setting: Setting, leave_out: Sequence[str] = ()) -> str:
    """
    A setting in a few words: what differs from the defaults.

    Args:
        setting ([`Setting`]):
            The run.
        leave_out (`Sequence[str]`, *optional*):
            Names to be left out.
    """
    default = Setting()
    words = [] if setting.mode == "federated" else [setting.mode]
    named = {
        name: value
        for name, value in vars(setting).items()
        if name not in ("mode", "model", "federation") and value != getattr(default, name)
    }
    # The period first; the rest in the order of names, whatever order it was written in.
    named |= setting.model | dict(sorted(setting.federation.items(), key=lambda item: (item[0] != "sync_every", item)))
    words += [f"{name}={value}" for name, value in named.items() if name not in leave_out]
    return ", ".join(words) or "defaults"


def _combinations(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    choices = [value if isinstance(value, list) else [value] for value in values.values()]
    for chosen in itertools.product(*choices):
        yield dict(zip(values, chosen, strict=True))

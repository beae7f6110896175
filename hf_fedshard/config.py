"""The settings of a federation, where each comes from, and every range check."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from . import environment
from .layout import FederationLayout, split_world
from .lora import LORA_RULES
from .moments import MOMENT_RULES
from .outer_limits import check_outer
from .outer_optimizers import SCHEDULES, format_options
from .overlap_limits import check_overlap
from .periods import ALLOWED, parse_stages
from .ranges import check_int, check_seconds, is_number
from .selection import parse_patterns
from .weights import describe_function
from .wire import WIRE_FORMATS


RESHAPE_RULES = ("nearest", "average")

_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class FederationConfig:
    """
    The settings of a federation. They hold for all ranks and are compared over the world when training starts.

    Args:
        num_groups (`int`, *optional*):
            G, the number of federation groups. Defaults to the replicas of the launch config's `parallelism_config`
            (`dp_replicate_size`), without a `parallelism_config` to one group per node.
        sync_every (`int` or `str`, defaults to `8`):
            H, the number of optimizer steps in a round, after which the groups average their parameters. 8 is the
            period of the FL+FSDP paper (arXiv 2609.20359). Or a list of periods, `"8x100,16"` (100 rounds of 8 steps,
            then rounds of 16) or `"4x50,*2"` (50 rounds of 4, 50 of 8, 50 of 16, ... up to `max_sync_every`); or
            `"drift"`, which follows `max_drift`; or `"auto"`, which follows `max_sync_share`.
        min_sync_every (`int`, defaults to `1`):
            Shortest period of `"drift"` and `"auto"`.
        max_sync_every (`int`, defaults to `128`):
            Longest period of `"drift"`, `"auto"` and a growing list.
        max_sync_share (`float`, defaults to `0.05`):
            With `sync_every="auto"`: the share of the time that averaging may take. Step and averaging are measured in
            the first rounds, of 8 steps, and the shortest period that keeps the share is used from then on.
        max_drift (`float`, *optional*):
            With `sync_every="drift"`: the drift (`fedshard/drift`) that the groups may have when they are averaged. Each
            border sets the next period from the drift it has found.
        sync_steps_at_start (`int`, defaults to `0`):
            Optimizer steps of synchronous training over all groups before they are federated (post-local SGD,
            arXiv 1808.07217): gradients are averaged over the world in every step.
        sync_steps_at_end (`int`, defaults to `0`):
            The same for the last steps of a run. The groups' optimizer moments are averaged when they begin.
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
        outer_optimizer (`str`, defaults to `"fedavg"`):
            What makes the next model of the average: `"fedavg"` takes it; `"fedavgm"`, `"nesterov"` (DiLoCo),
            `"fedadagrad"`, `"fedadam"`, `"fedyogi"` or an elementwise class of `torch.optim` by its name, `"AdamW"` say,
            steps on the anchor minus the average. See `docs/outer.md`.
        outer_learning_rate (`float`, *optional*):
            Its learning rate. Defaults to 1 (FedAvg, FedAvgM), DiLoCo's 0.7, 0.1 (FedAdagrad), 0.01 (FedAdam, FedYogi), of a
            torch class to torch's.
        outer_options (`str` or `Mapping[str, Any]`, defaults to `""`):
            Its other arguments: `{"momentum": 0.8}`, or as a text `"momentum=0.8"`.
        outer_schedule (`str`, defaults to `"constant"`):
            How its learning rate changes from round to round: `"constant"`, `"linear"` or `"cosine"`.
        outer_warmup_rounds (`int`, defaults to `0`):
            Rounds in which its learning rate rises linearly.
        outer_schedule_rounds (`int`, *optional*):
            Rounds at which `"linear"` and `"cosine"` end: those of the run, steps divided by `sync_every`. Refused with
            `"constant"`.
        outer_max_norm (`float`, *optional*):
            Largest norm of the anchor minus the average over the whole model; a longer one is scaled down to it.
        group_weights (`str` or `Callable`, defaults to `"uniform"`):
            How much a group counts in the average: `"uniform"`, or by the `"samples"`, `"tokens"` or `"steps"` of the
            round, or a function of a list of [`GroupCounts`] that gives one number for each group, also as
            `"module:function"`.
        inner_moments (`str`, defaults to `"keep"`):
            What becomes of the inner optimizers' state at a border: `"keep"`, `"reset"`, or `"average"`, which sends the
            moments beside the parameters.
        include_parameters (`str` or `Sequence[str]`, defaults to `"*"`):
            Which of the parameters that train are averaged: shell patterns of their names, or regular expressions after
            `re:`; in a text with commas between them.
        exclude_parameters (`str` or `Sequence[str]`, defaults to `""`):
            Which of them are not. They must be frozen, or local.
        local_parameters (`str` or `Sequence[str]`, defaults to `""`):
            Parameters and buffers of which each group keeps its own (personalised layers).
        lora_average (`str`, defaults to `"factors"`):
            How LoRA adapters are averaged: `"factors"`, A and B each by itself, which is biased; `"product"`, the mean of
            their products, factored again; `"freeze_a"`, B alone trains.
        proximal_mu (`float`, defaults to `0.0`):
            Strength of FedProx's pull towards the model at the last border.
        wire_format (`str`, defaults to `"fp32"`):
            How parameters cross the slow tier when they are averaged: `"fp32"`, or in fewer bytes, as differences to the
            model at the last border, in `"bf16"`, `"int8"` or `"int4"`. See `docs/wire.md`.
        offload_outer_state (`bool`, defaults to `False`):
            Whether what the outer loop holds between borders, anchors, the outer optimizer's state and the residuals of
            `wire_format`, lives in host memory. Plain averaging in fp32 without `proximal_mu` holds nothing, and a line in the
            log says so.
        overlap_steps (`int`, defaults to `0`):
            Optimizer steps that are made while an averaging is in flight: it starts at the end of a round, with a snapshot,
            and its outcome is taken in so many steps later, with what each group has trained meanwhile; at most one period.
            With `0` the steps wait for it. See `docs/overlap.md`.
        overlap_alpha (`float`, defaults to `0.0`):
            With `overlap_steps`: the share of its own model that a group keeps when it takes an outcome in (the alpha of
            Streaming DiLoCo, arXiv 2501.18512). `0` takes the whole of it.
        num_fragments (`int`, defaults to `1`):
            With `overlap_steps`: fragments of the model that are averaged one after another in a round (Streaming DiLoCo),
            which divides the bandwidth that is needed at a time by their number.
        slow_backend (`str`, *optional*):
            Backend of the averaging: `"gloo"` on GPUs sends through host memory, for nodes linked by TCP alone. Defaults to
            that of the device.

    Raises:
        ValueError: If a value is out of its range; the message names the field, the value and what is allowed.
    """

    num_groups: int | None = None
    sync_every: int | str = 8
    min_sync_every: int = 1
    max_sync_every: int = 128
    max_sync_share: float = 0.05
    max_drift: float | None = None
    sync_steps_at_start: int = 0
    sync_steps_at_end: int = 0
    bucket_size_bytes: int = 32 * 2**20
    log_every_rounds: int = 1
    timeout_seconds: float | None = None
    optimizer_on_reshape: str = "nearest"
    preemption_grace_seconds: float = 20.0
    outer_optimizer: str = "fedavg"
    outer_learning_rate: float | None = None
    outer_options: str | Mapping[str, Any] = ""
    outer_schedule: str = "constant"
    outer_warmup_rounds: int = 0
    outer_schedule_rounds: int | None = None
    outer_max_norm: float | None = None
    group_weights: str | Callable[..., Any] = "uniform"
    inner_moments: str = "keep"
    include_parameters: str | Sequence[str] = "*"
    exclude_parameters: str | Sequence[str] = ""
    local_parameters: str | Sequence[str] = ""
    lora_average: str = "factors"
    proximal_mu: float = 0.0
    wire_format: str = "fp32"
    offload_outer_state: bool = False
    overlap_steps: int = 0
    overlap_alpha: float = 0.0
    num_fragments: int = 1
    slow_backend: str | None = None

    def __post_init__(self) -> None:
        if self.num_groups is not None:
            check_int("num_groups", self.num_groups, minimum=1)
        self._check_periods()
        check_int("sync_steps_at_start", self.sync_steps_at_start, minimum=0)
        check_int("sync_steps_at_end", self.sync_steps_at_end, minimum=0)
        check_int("bucket_size_bytes", self.bucket_size_bytes, minimum=1024)
        check_int("log_every_rounds", self.log_every_rounds, minimum=0)
        if self.timeout_seconds is not None:
            check_seconds("timeout_seconds", self.timeout_seconds)
        check_seconds("preemption_grace_seconds", self.preemption_grace_seconds)
        for name, allowed in (
            ("optimizer_on_reshape", RESHAPE_RULES),
            ("outer_schedule", SCHEDULES),
            ("inner_moments", MOMENT_RULES),
            ("lora_average", LORA_RULES),
            ("wire_format", WIRE_FORMATS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, but got {getattr(self, name)!r}.")
        if not isinstance(self.offload_outer_state, bool):
            raise ValueError(f"offload_outer_state must be True or False, but got {self.offload_outer_state!r}.")
        check_outer(self)
        check_overlap(self)

    def comparable(self) -> dict[str, Any]:
        """
        The settings in a form that ranks can exchange and compare: a function by its name.

        Returns:
            `dict[str, Any]`: By name.
        """
        values = dict(vars(self))
        if callable(self.group_weights):
            values["group_weights"] = describe_function(self.group_weights)
        values["outer_options"] = format_options(self.outer_options)
        for name in ("include_parameters", "exclude_parameters", "local_parameters"):
            values[name] = parse_patterns(values[name])
        return values

    def _check_periods(self) -> None:
        every = self.sync_every
        if isinstance(every, str) and every.strip().isdecimal():
            every = int(every)
            # The same period must not look like another one where settings are compared.
            object.__setattr__(self, "sync_every", every)
        check_int("min_sync_every", self.min_sync_every, minimum=1)
        check_int("max_sync_every", self.max_sync_every, minimum=1)
        if self.min_sync_every > self.max_sync_every:
            raise ValueError(
                f"min_sync_every={self.min_sync_every} must not be above max_sync_every={self.max_sync_every}. Make it "
                "smaller, or max_sync_every larger."
            )
        share, drift = self.max_sync_share, self.max_drift
        if not (is_number(share) and 0 < share < 1):
            raise ValueError(f"max_sync_share must be a number between 0 and 1, but got {share!r}.")
        if drift is not None and not (is_number(drift) and 0 < drift < math.inf):
            raise ValueError(f"max_drift must be a positive number, but got {drift!r}.")
        if isinstance(every, str):
            if every == "drift" and drift is None:
                raise ValueError(
                    'sync_every="drift" needs max_drift. Log `fedshard/drift` in a short run with a fixed period, and take '
                    "a value near it."
                )
            if every not in ("auto", "drift"):
                try:
                    parse_stages(every)
                except ValueError as error:
                    raise ValueError(f"sync_every must be {ALLOWED}, but got {every!r}: {error}.") from None
        elif isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"sync_every must be {ALLOWED}, but got {every!r}.")
        if drift is not None and every != "drift":
            raise ValueError(f'max_drift={drift} is for sync_every="drift", but sync_every is {every!r}.')

    @classmethod
    def from_arguments(cls, **explicit: Any) -> FederationConfig:
        """
        Merges explicit arguments with the environment: explicit beats `FEDSHARD_<NAME>` beats the default.

        Args:
            explicit (`Any`):
                Fields of this class; one that is `None` counts as not given.

        Raises:
            TypeError: If an argument is no field of this class.
            ValueError: If a variable does not parse or a value is out of range.
        """
        known = cls.names()
        unknown = [name for name in explicit if name not in known]
        if unknown:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(
                f"{', '.join(unknown)} is no setting of a federation.{hint} There are: {', '.join(known)}."
            )
        kinds = get_type_hints(cls)
        values = {name: _parse(name, text, kinds[name]) for name, text in environment.read_settings(known).items()}
        values.update({name: value for name, value in explicit.items() if value is not None})
        return cls(**values)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings: arguments of the callback and the plugin, and, as `FEDSHARD_<NAME>`, variables."""
        return tuple(item.name for item in dataclasses.fields(cls))

    def layout(
        self, world_size: int, sizes: Mapping[str, int] | None, local_world_size: int | None = None
    ) -> FederationLayout:
        """See [`split_world`]."""
        return split_world(self.num_groups, world_size, sizes, local_world_size)


def _parse(name: str, text: str, kind: Any) -> Any:
    """Reads a variable as the type of its field."""
    kinds = [member for member in get_args(kind) or (kind,) if member is not type(None)]
    for member in kinds:
        try:
            return _BOOLEANS[text.strip().lower()] if member is bool else member(text)
        except (ValueError, KeyError):
            continue
    wanted = " or ".join(_WORDS[member] for member in kinds)
    raise ValueError(f"The environment variable {environment.PREFIX}{name.upper()} must be {wanted}, but is {text!r}.")

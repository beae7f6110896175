"""The settings of a federation as keyword arguments, for type checkers and completion; [`FederationConfig`] defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict


class FederationSettings(TypedDict, total=False):
    """
    Every setting of [`FederationConfig`] but `num_groups` and `sync_every`, which come first wherever settings are given. `None`
    is as good as nothing: the environment's value holds, or the default.
    """

    min_sync_every: int | None
    max_sync_every: int | None
    max_sync_share: float | None
    max_drift: float | None
    sync_steps_at_start: int | None
    sync_steps_at_end: int | None
    bucket_size_bytes: int | None
    log_every_rounds: int | None
    timeout_seconds: float | None
    optimizer_on_reshape: str | None
    preemption_grace_seconds: float | None
    outer_optimizer: str | None
    outer_learning_rate: float | None
    outer_options: str | Mapping[str, Any] | None
    outer_schedule: str | None
    outer_warmup_rounds: int | None
    outer_schedule_rounds: int | None
    outer_max_norm: float | None
    group_weights: str | Callable[..., Any] | None
    inner_moments: str | None
    include_parameters: str | Sequence[str] | None
    exclude_parameters: str | Sequence[str] | None
    local_parameters: str | Sequence[str] | None
    lora_average: str | None
    proximal_mu: float | None
    wire_format: str | None
    offload_outer_state: bool | None
    overlap_steps: int | None
    overlap_alpha: float | None
    num_fragments: int | None
    slow_backend: str | None


class PluginSettings(FederationSettings, total=False):
    """What [`FederatedFSDPPlugin`] takes: the settings, and every argument of Accelerate's `FullyShardedDataParallelPlugin`."""

    fsdp_version: int | None
    sharding_strategy: Any
    reshard_after_forward: Any
    backward_prefetch: Any
    mixed_precision_policy: Any
    auto_wrap_policy: Any
    cpu_offload: Any
    ignored_modules: Any
    state_dict_type: Any
    state_dict_config: Any
    optim_state_dict_config: Any
    limit_all_gathers: bool | None
    use_orig_params: bool | None
    param_init_fn: Any
    sync_module_states: bool | None
    forward_prefetch: bool | None
    activation_checkpointing: bool | None
    activation_checkpointing_offload: bool | None
    cpu_ram_efficient_loading: bool | None
    transformer_cls_names_to_wrap: list[str] | None
    min_num_params: int | None

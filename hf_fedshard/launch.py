"""What Accelerate was launched as: the checks that must hold before a federation can be built on it."""

from __future__ import annotations

from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from . import environment
from .config import FederationConfig
from .layout import FederationLayout


FSDP1_ERROR = (
    "hf_fedshard federates FSDP version 2 only, but this run uses FSDP version {version}. Set `fsdp_version: 2` in the "
    "launch config's fsdp_config, or `fsdp_config={{'version': 2}}` in TrainingArguments."
)


def check_not_alone(state: AcceleratorState) -> None:
    """
    Refuses several processes of which each believes it is alone.

    Args:
        state (`AcceleratorState`):
            Accelerate's state.

    Raises:
        ValueError: If the launcher started more processes than Accelerate sees; the message has the way out.
    """
    launched = environment.launched_world_size()
    if launched > 1 and state.num_processes == 1:
        raise ValueError(
            f"{launched} processes were launched, but this one runs alone: each would train by itself and all would "
            "write the same folder. On CPU set use_cpu=True in TrainingArguments, or Accelerator(cpu=True); the "
            "launcher does not hand `use_cpu` on to several processes."
        )


def check_launch(state: AcceleratorState) -> None:
    """
    Refuses launches that cannot be federated.

    Args:
        state (`AcceleratorState`):
            Accelerate's state.

    Raises:
        ValueError: For DeepSpeed, FSDP version 1, no FSDP, a single process, and several processes of which each
        believes
            it is alone; the message has the way out.
    """
    check_not_alone(state)
    if state.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "hf_fedshard shards with FSDP version 2 and cannot federate DeepSpeed. Launch with one of the FSDP configs "
            "in accelerate_configs/."
        )
    plugin = getattr(state, "fsdp_plugin", None)
    version = environment.launched_fsdp_version() if plugin is None else plugin.fsdp_version
    if version == 1:
        raise ValueError(FSDP1_ERROR.format(version=1))
    if state.num_processes == 1:
        raise ValueError(
            "A federation needs several processes, but this run has a single process. Start it with `accelerate launch "
            "--config_file <one of accelerate_configs/> script.py`."
        )
    if plugin is None or state.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"FSDP is not in force (distributed type {state.distributed_type.value}). Launch with `accelerate launch "
            "--config_file` and one of accelerate_configs/, which set `distributed_type: FSDP` and `fsdp_version: 2`; on "
            "CPU import hf_fedshard before Trainer or Accelerator is made."
        )
    if state.mixed_precision == "fp16" and state.device.type == "cpu":
        raise ValueError(
            "mixed_precision=fp16 on CPU gets neither autocast nor a gradient scaler from Accelerate. Use bf16, or no "
            "mixed precision."
        )


def check_synchronous_steps(config: FederationConfig, layout: FederationLayout, mixed_precision: str) -> None:
    """
    Refuses synchronous steps at the end where each group scales its gradients by a factor of its own.

    Args:
        config ([`FederationConfig`]):
            The settings.
        layout ([`FederationLayout`]):
            The federation.
        mixed_precision (`str`):
            Accelerate's.

    Raises:
        ValueError: If they were asked for.
    """
    if config.sync_steps_at_end and mixed_precision == "fp16" and layout.num_groups > 1:
        raise ValueError(
            f"sync_steps_at_end={config.sync_steps_at_end} with mixed_precision=fp16: the gradient scaler of each group has "
            "found a scale of its own by then, and gradients of different scales cannot be averaged. Set sync_steps_at_end "
            "to 0, or mixed_precision to bf16 or no; sync_steps_at_start works with fp16."
        )


def check_wrapping(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    """
    Refuses layers to shard that hold the input embedding: Accelerate 1.15 shards it on its own, then a second time. And
    layers that share a parameter: FSDP2 finds it sharded when it comes to the second one.

    Args:
        model (`nn.Module`):
            The model, not yet prepared.
        plugin (`FullyShardedDataParallelPlugin`):
            The plugin in force.

    Raises:
        ValueError: With the launch option that leaves them out.
    """
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    if policy is not transformer_auto_wrap_policy:
        return
    names = set(plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or ())
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    layers = {name: module for name, module in model.named_modules() if type(module).__name__ in names}
    holders = {
        type(module).__name__ for module in layers.values() if any(inner is embedding for inner in module.modules())
    }
    if holders:
        raise ValueError(
            f"{', '.join(sorted(holders))} holds the input embedding, which Accelerate shards on its own, and so cannot be "
            f"a layer to shard. Launch with --fsdp_transformer_layer_cls_to_wrap {','.join(sorted(names - holders))}."
        )
    holding: dict[int, dict[str, nn.Module]] = {}
    for at, layer in layers.items():
        for param in layer.parameters():
            holding.setdefault(id(param), {})[at] = layer
    for name, param in model.named_parameters():
        sharing = _innermost(holding.get(id(param), {}))
        if len(sharing) > 1:
            kinds = ",".join(sorted({type(layers[at]).__name__ for at in sharing}))
            raise ValueError(
                f"The layers {' and '.join(sharing[:2])} share the parameter {name}, and FSDP2 shards each layer by itself. "
                f"Give each its own; or launch with --fsdp_transformer_layer_cls_to_wrap and layers other than {kinds}, or "
                "with --fsdp_auto_wrap_policy NO_WRAP, which shards the model as one."
            )


def _innermost(layers: dict[str, nn.Module]) -> list[str]:
    """Those of several layers that hold none of the others."""
    return [
        at
        for at, layer in layers.items()
        if not any(inner is not layer and inner in layers.values() for inner in layer.modules())
    ]


def stated_sizes(parallelism_config: ParallelismConfig | None) -> dict[str, int] | None:
    """
    The sizes a `ParallelismConfig` states for the world.

    Args:
        parallelism_config (`ParallelismConfig`, *optional*):
            Accelerate's, from the launch config or `TrainingArguments`.

    Returns:
        `dict[str, int]` or `None`: By axis, outermost first; `None` without one.
    """
    if parallelism_config is None:
        return None
    sizes: dict[str, Any] = parallelism_config._sizes
    return {axis: int(sizes[axis]) for axis in ("dp_replicate", "dp_shard", "cp", "sp", "tp")}


def layout_for(config: FederationConfig, world_size: int, sizes: dict[str, int] | None) -> FederationLayout:
    """
    The federation's layout for a launch, see [`FederationConfig.layout`].

    Args:
        config ([`FederationConfig`]):
            The settings.
        world_size (`int`):
            Number of processes.
        sizes (`dict[str, int]`, *optional*):
            From [`stated_sizes`] or the environment.
    """
    return config.layout(world_size, sizes, environment.launched_local_world_size())

"""The environment of a process under `accelerate launch`, taken from Accelerate itself."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from .environment import patched_environment


def fsdp_config(
    dp_replicate: int | None = 1,
    dp_shard: int = 4,
    state_dict_type: str = "FULL_STATE_DICT",
    wrap_cls: str | None = "LlamaDecoderLayer",
    mixed_precision: str = "no",
    **fsdp: Any,
) -> dict[str, Any]:
    """
    An Accelerate configuration for FSDP2 on one machine.

    Args:
        dp_replicate (`int`, *optional*, defaults to 1):
            `parallelism_config_dp_replicate_size`. `None` leaves the section `parallelism_config` out.
        dp_shard (`int`, *optional*, defaults to 4):
            `parallelism_config_dp_shard_size`.
        state_dict_type (`str`, *optional*, defaults to `"FULL_STATE_DICT"`):
            `fsdp_state_dict_type`.
        wrap_cls (`str`, *optional*, defaults to `"LlamaDecoderLayer"`):
            Class of the layers to shard. `None` shards the root alone.
        mixed_precision (`str`, *optional*, defaults to `"no"`):
            `no`, `bf16` or `fp16`.
        fsdp (`Any`):
            More keys of `fsdp_config`, without their prefix `fsdp_`.

    Returns:
        `dict[str, Any]`: Content of the YAML file.
    """
    section = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": state_dict_type,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if wrap_cls else "NO_WRAP",
    }
    if wrap_cls:
        section["fsdp_transformer_layer_cls_to_wrap"] = wrap_cls
    section |= {f"fsdp_{key}": value for key, value in fsdp.items()}
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": (dp_replicate or 1) * dp_shard,
        "main_process_port": 0,
        "use_cpu": False,
        "fsdp_config": section,
    }
    if dp_replicate is not None:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": dp_replicate,
            "parallelism_config_dp_shard_size": dp_shard,
            "parallelism_config_tp_size": 1,
            "parallelism_config_cp_size": 1,
        }
    return config


def fsdp_launch_env(
    dp_replicate: int | None = 1,
    dp_shard: int = 4,
    state_dict_type: str = "FULL_STATE_DICT",
    wrap_cls: str | None = "LlamaDecoderLayer",
    mixed_precision: str = "no",
    **fsdp: Any,
) -> dict[str, str]:
    """
    The variables that `accelerate launch` sets for [`fsdp_config`] of the same arguments.

    Returns:
        `dict[str, str]`: Value for the argument `env` of [`WorkerPool.run`].
    """
    config = fsdp_config(dp_replicate, dp_shard, state_dict_type, wrap_cls, mixed_precision, **fsdp)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return launch_env(path)


def launch_env(config_file: Path | str) -> dict[str, str]:
    """
    The variables that `accelerate launch --config_file config_file` adds for the processes it starts.

    Accelerate's own code computes them, so they stay right when Accelerate changes. Rank, world size and rendezvous are
    the launcher's business and not among them.

    Args:
        config_file (`Path` or `str`):
            YAML file.

    Returns:
        `dict[str, str]`: Environment variables.
    """
    return dict(_launch_env(Path(config_file).read_text()))


@functools.lru_cache(maxsize=64)
def _launch_env(content: str) -> tuple[tuple[str, str], ...]:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    # Validation and preparation read variables of an enclosing launch and write some of their own.
    with (
        patched_environment({"OMP_NUM_THREADS": "1"}, drop_prefixes=("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")),
        tempfile.TemporaryDirectory() as folder,
    ):
        outside = dict(os.environ)
        path = Path(folder) / "config.yaml"
        path.write_text(content)
        # The port is checked on this machine, whose file may name a port of another one.
        command = ["--config_file", str(path), "--main_process_port", "0", "script.py"]
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
        env = prepare_multi_gpu_env(args)
    return tuple(sorted((name, value) for name, value in env.items() if outside.get(name) != value))

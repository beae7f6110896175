"""The only module that touches the process environment: our own `FEDSHARD_*` variables and what the launcher left."""

from __future__ import annotations

import os
from collections.abc import Iterable


PREFIX = "FEDSHARD_"


def read_settings(names: Iterable[str]) -> dict[str, str]:
    """
    Reads the `FEDSHARD_<NAME>` variables.

    Args:
        names (`Iterable[str]`):
            The settings that exist, in lower case; `sync_every` is read from `FEDSHARD_SYNC_EVERY`.

    Returns:
        `dict[str, str]`: The raw text of each variable that is set and not empty.

    Raises:
        ValueError: If a `FEDSHARD_*` variable is set that names no setting, so that a typing error cannot pass for a
            default.
    """
    known = {PREFIX + name.upper(): name for name in names}
    unknown = sorted(key for key in os.environ if key.startswith(PREFIX) and key not in known)
    if unknown:
        raise ValueError(
            f"Unknown environment variable {', '.join(unknown)}. hf_fedshard reads {', '.join(sorted(known))}; "
            "unset it or correct its name."
        )
    return {name: os.environ[key] for key, name in known.items() if os.environ.get(key, "") != ""}


def launched_world_size() -> int:
    """The number of processes that the launcher started (`WORLD_SIZE`), 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """The number of this process among those that the launcher started (`RANK`), 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def launched_local_world_size() -> int:
    """The number of processes that the launcher started on this node (`LOCAL_WORLD_SIZE`), 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def launched_parallelism() -> dict[str, int] | None:
    """
    The sizes that the launch config's `parallelism_config` states.

    Returns:
        `dict[str, int]` or `None`: `dp_replicate`, `dp_shard`, `cp`, `sp` and `tp`, each 1 when unset; `None` when the
        launch config has no `parallelism_config`.
    """
    if not _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    return {
        axis: int(os.environ.get(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", "1"))
        for axis in ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    }


def launched_fsdp_version() -> int | None:
    """The FSDP version that the launch config names, `None` when it names none."""
    version = os.environ.get("FSDP_VERSION", "")
    return int(version) if version else None


def launch_asks_for_fsdp() -> bool:
    """Whether several processes were started by a launch config with FSDP."""
    return _flag("ACCELERATE_USE_FSDP") and launched_world_size() > 1


def launch_forces_cpu() -> bool:
    """Whether the launcher tells its processes to leave the accelerators alone (`ACCELERATE_USE_CPU`)."""
    return _flag("ACCELERATE_USE_CPU")


def force_cpu() -> None:
    """Tells Accelerate and Trainer of this process to leave the accelerators alone (`ACCELERATE_USE_CPU`)."""
    os.environ["ACCELERATE_USE_CPU"] = "true"


def launched_auto_wrap_policy() -> str | None:
    """The FSDP wrapping policy that the launch config names, `None` when it names none."""
    return os.environ.get("FSDP_AUTO_WRAP_POLICY") or None


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").strip().lower() in ("1", "true", "yes", "on", "y", "t")

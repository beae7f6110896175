"""The residuals of a lossy wire format in a checkpoint: each group its own, beside its optimizer's moments."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .averaging import ModelAverager
from .checkpoint_layout import RESIDUAL_PREFIX, group_folder
from .selection import plain_name
from .shards import as_sharded, local_part
from .tensor_store import load_tensors, stored_tensors
from .tensors import accumulation_dtype
from .wire import find_codec


logger = logging.getLogger(__name__)


def take_residuals(averager: ModelAverager) -> dict[str, torch.Tensor]:
    """
    What this rank's group owes the others, sharded as the parameters. Collective over the replicas of a shard, since each
    of them owes for a slice: all ranks of a group come here together.

    Args:
        averager ([`ModelAverager`]):
            What averages the model.

    Returns:
        `dict[str, torch.Tensor]`: By name, the same names on all ranks, copies; nothing before the first exchange.
    """
    if not averager.residuals:
        return {}
    averager.wait()
    owed = averager.residuals.by_name()
    found: dict[str, torch.Tensor] = {}
    for name in averager.outer.anchors:
        param = averager.model.get_parameter(name)
        # An empty shard is in no bucket.
        shard = owed[name] if name in owed else _zeros(averager, param)
        found[plain_name(name)] = as_sharded(shard.view(local_part(param).shape), param)
    return found


def describe_residuals(averager: ModelAverager) -> dict[str, Any]:
    """
    What a checkpoint says of them, for JSON; nothing where the wire is fp32.

    Args:
        averager ([`ModelAverager`]):
            What averages the model.
    """
    wire_format = averager.config.wire_format
    return {} if wire_format == "fp32" else {"wire_format": wire_format, "residuals": bool(averager.residuals)}


def load_residuals(folder: Path, saved: Mapping[str, Any], averager: ModelAverager) -> None:
    """
    Goes on with the residuals of a checkpoint. With as many groups, and whatever shards and replicas, nothing of what was
    owed is lost; with another number of groups they start at zero, and the log says so. Without communication.

    Args:
        folder (`Path`):
            The checkpoint, or this group's part of one.
        saved (`Mapping[str, Any]`):
            Its description.
        averager ([`ModelAverager`]):
            What averages the model.

    Raises:
        CheckpointError: If they cannot be read.
    """
    if _goes_on(saved, averager):
        own = folder / group_folder(averager.mesh.group_index)
        averager.residuals.load(_read(own, averager))


def _goes_on(saved: Mapping[str, Any], averager: ModelAverager) -> bool:
    """Whether what the checkpoint says of residuals holds in this run; warns where something is lost."""
    stored = saved.get("outer") or {}
    then, now = stored.get("wire_format", "fp32"), averager.config.wire_format
    codec, main = find_codec(now), averager.mesh.is_main
    if main and then != now and saved["num_groups"] > 1:
        logger.warning("wire_format was changed since the checkpoint: %s (was %s).", now, then)
    if not stored.get("residuals"):
        return False
    if codec is None or not codec.feeds_back:
        if main:
            logger.warning("wire_format=%s feeds no errors back: the residuals of the checkpoint are dropped.", now)
        return False
    if saved["num_groups"] != averager.mesh.layout.num_groups:
        if main:
            logger.warning(
                "The residuals of wire_format=%s start at zero: those of the checkpoint are what each of its %d groups owed "
                "the others.",
                now,
                saved["num_groups"],
            )
        return False
    return True


def _read(own: Path, averager: ModelAverager) -> dict[str, torch.Tensor]:
    """This rank's shards of what its group owed, by name, from the group's folder. Without communication."""
    names = {RESIDUAL_PREFIX + plain_name(name): name for name in averager.outer.anchors}
    there = [entry for entry in stored_tensors(own) if entry.startswith(RESIDUAL_PREFIX)]
    foreign = [entry for entry in there if entry not in names]
    if foreign and averager.mesh.is_main:
        logger.warning(
            "The residuals of %d parameters that this run does not average are dropped, first of %s.",
            len(foreign),
            foreign[0].removeprefix(RESIDUAL_PREFIX),
        )
    owed: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for entry in there:
        if entry in names:
            param = averager.model.get_parameter(names[entry])
            owed[names[entry]] = shard = _zeros(averager, param)
            wanted[entry] = as_sharded(shard, param)
    load_tensors(wanted, own)
    return owed


def _zeros(averager: ModelAverager, param: torch.Tensor) -> torch.Tensor:
    """A shard like a parameter's, where the outer state lives: a run that just fits on its device must fit when it resumes."""
    local = local_part(param)
    device = torch.device("cpu") if averager.outer.memory.offload else local.device
    return torch.zeros(local.shape, dtype=accumulation_dtype(local.dtype), device=device)

"""Group-local twins of Accelerate's collectives, for the time inside a round."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import recursively_apply


class GroupOps:
    """
    `gather`, `gather_for_metrics`, `reduce`, `pad_across_processes` and `wait_for_everyone` as on `Accelerator`, with
    the same arguments, among the ranks of one process group.

    Args:
        group (`ProcessGroup`):
            The ranks of this rank's federation group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def gather(self, tensor: Any) -> Any:
        """Concatenates each tensor of a nested structure over the group's ranks on the first dimension."""

        def gather_one(value: torch.Tensor) -> torch.Tensor:
            value = value.clone()[None] if value.ndim == 0 else value
            value = value.contiguous()
            # Booleans travel as bytes, which every backend carries.
            wire = value.view(torch.uint8) if value.dtype == torch.bool else value
            out = wire.new_empty((self.group.size() * wire.shape[0], *wire.shape[1:]))
            dist.all_gather_single(out, wire, group=self.group)
            return out.view(value.dtype) if value.dtype == torch.bool else out

        return recursively_apply(gather_one, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """
        Like [`~GroupOps.gather`], and gathers what are no tensors as objects.

        Nothing is cut off at the end of a data loader: the remainder that Accelerate knows is the world's.
        """
        if not use_gather_object and _all_tensors(input_data):
            return self.gather(input_data)
        parts: list[Any] = [None] * self.group.size()
        dist.all_gather_object(parts, input_data, group=self.group)
        return [item for part in parts for item in (part if isinstance(part, (list, tuple)) else [part])]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sums or averages each tensor of a nested structure over the group's ranks, as a copy."""

        def reduce_one(value: torch.Tensor) -> torch.Tensor:
            value = value.clone()
            if reduction == "none":
                return value
            op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            dist.all_reduce(value, op, group=self.group)
            return value / self.group.size() if reduction == "mean" else value

        return recursively_apply(reduce_one, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads each tensor of a nested structure on `dim` to the largest size in the group."""

        def pad_one(value: torch.Tensor) -> torch.Tensor:
            if dim >= value.ndim or dim < -value.ndim:
                return value
            size = torch.tensor(value.shape[dim], device=value.device)
            dist.all_reduce(size, dist.ReduceOp.MAX, group=self.group)
            missing = int(size) - value.shape[dim]
            if missing == 0:
                return value
            widths = [0, 0] * value.ndim
            # `pad` counts dimensions from the last.
            widths[2 * (value.ndim - 1 - dim % value.ndim) + (0 if pad_first else 1)] = missing
            return F.pad(value, widths, value=pad_index)

        return recursively_apply(pad_one, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Waits for the ranks of the group."""
        dist.barrier(group=self.group)


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda value: value, data, error_on_other_type=True)
    except TypeError:
        return False
    return True

"""Group-local twins of Accelerate's collectives, for the time inside a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import recursively_apply

from .seams import Patches, check_seams
from .tensors import to_wire


ACCELERATOR_SEAMS = {
    "gather": ("tensor",),
    "gather_for_metrics": ("input_data", "use_gather_object"),
    "reduce": ("tensor", "reduction", "scale"),
    "pad_across_processes": ("tensor", "dim", "pad_index", "pad_first"),
    "wait_for_everyone": (),
}


class GroupOps:
    """
    `gather`, `gather_for_metrics`, `reduce`, `pad_across_processes` and `wait_for_everyone` as on `Accelerator`, with the
    same arguments, among the ranks of one federation group.

    The results have the world's shape, as if every group held what this one holds: what is gathered is repeated for each
    group, and a sum is multiplied by their number. So code that knows `num_processes` and `process_index` stays right:
    means and shares are the group's, and each rank finds its own part where it looks for it.

    Args:
        group (`ProcessGroup`):
            The ranks of this rank's federation group.
        num_groups (`int`):
            How many groups there are, all of one size.
    """

    def __init__(self, group: dist.ProcessGroup, num_groups: int) -> None:
        self.group = group
        self.num_groups = num_groups

    def gather(self, tensor: Any) -> Any:
        """Concatenates each tensor of a nested structure over the ranks on the first dimension."""

        def gather_one(value: torch.Tensor) -> torch.Tensor:
            # Detached: a collective writes into views, which autograd refuses.
            value = value.detach()
            value = value.clone()[None] if value.ndim == 0 else value
            wire = to_wire(value, value.device)
            out = wire.new_empty((self.group.size() * wire.shape[0], *wire.shape[1:]))
            dist.all_gather_single(out, wire, group=self.group)
            # Groups are runs of consecutive ranks, so rank i of the world finds its part at i times its length.
            return out.view(value.dtype).repeat(self.num_groups, *[1] * (out.ndim - 1))

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
        return [
            item for part in parts for item in (part if isinstance(part, (list, tuple)) else [part])
        ] * self.num_groups

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sums or averages each tensor of a nested structure over the ranks, as a copy."""

        def reduce_one(value: torch.Tensor) -> torch.Tensor:
            value = value.detach().clone()
            if reduction == "none":
                return value
            op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            dist.all_reduce(value, op, group=self.group)
            if reduction == "mean":
                return value / self.group.size()
            return value if reduction == "max" else value * self.num_groups

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


def keep_in_group(
    accelerator: Accelerator, ops: GroupOps, inside: Callable[[], bool], waits_inside: Callable[[], bool] | None = None
) -> Patches:
    """
    Routes an accelerator's collectives to the group while a round is running.

    Args:
        accelerator (`Accelerator`):
            The instance whose methods are replaced.
        ops ([`GroupOps`]):
            What takes their place.
        inside (`Callable[[], bool]`):
            Tells, at each call, whether it has to stay in the group. The same on all ranks of a group.
        waits_inside (`Callable[[], bool]`, *optional*):
            The same for `wait_for_everyone`, where that is told otherwise.

    Returns:
        [`Patches`]: To be undone.

    Raises:
        UpstreamChangedError: If a method is not as expected.
    """

    def choose(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        group_local = getattr(ops, name)
        stays = waits_inside if name == "wait_for_everyone" and waits_inside is not None else inside

        def make(world: Callable[..., Any]) -> Callable[..., Any]:
            def collective(*args: Any, **kwargs: Any) -> Any:
                return (group_local if stays() else world)(*args, **kwargs)

            return collective

        return make

    check_seams(Accelerator, ACCELERATOR_SEAMS)
    patches = Patches()
    for name in ACCELERATOR_SEAMS:
        patches.replace(accelerator, name, choose(name))
    return patches


class BoundAccelerator:
    """
    Keeps the collectives of a Trainer's accelerator in the group, whichever it is: hyper-parameter search makes a new one for
    each trial.

    Args:
        ops ([`GroupOps`]):
            What takes the place of its methods.
        inside (`Callable[[], bool]`):
            See [`keep_in_group`].
    """

    def __init__(self, ops: GroupOps, inside: Callable[[], bool]) -> None:
        self.ops = ops
        self.inside = inside
        self._patches: Patches | None = None
        self._bound: Accelerator | None = None

    def follow(self, accelerator: Accelerator) -> None:
        """
        Binds an accelerator, and releases the one before.

        Args:
            accelerator (`Accelerator`):
                The Trainer's; nothing happens if it is bound.
        """
        if accelerator is not self._bound:
            self.release()
            self._patches = keep_in_group(accelerator, self.ops, self.inside)
            self._bound = accelerator

    def release(self) -> None:
        """Puts every method back."""
        if self._patches is not None:
            self._patches.undo()
        self._patches = self._bound = None


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda value: value, data, error_on_other_type=True)
    except TypeError:
        return False
    return True

"""One optimizer state for all groups, where synchronous steps follow on rounds: the groups' moments are brought together."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .collectives import all_reduce
from .counters import counters_of, exchange_counts, settle_counters
from .exchange import run_exchange
from .exchange_plan import plan_exchange
from .initial import hold_the_same_bits
from .metrics import exchange_rows
from .moments import reset_moments
from .peers import Peers
from .shards import local_part
from .tensors import all_finite


logger = logging.getLogger(__name__)


@torch.no_grad()
def unify_moments(
    optimizers: Sequence[torch.optim.Optimizer], mesh: Peers, bucket_size_bytes: int
) -> tuple[int, bool]:
    """
    Brings the groups' optimizer moments together, so that equal gradients give equal updates. Collective over the world, at
    a border.

    Order on every rank: the small exchange of what each holds, the comparison of bits, and if they differ the exchange of
    the step counters and that of the moments. What is done depends on exchanged values alone.

    Args:
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        mesh ([`Peers`]):
            The federation.
        bucket_size_bytes (`int`):
            Upper bound of an exchange buffer.

    Returns:
        `tuple[int, bool]`: Bytes that this rank has sent to other groups, and whether the moments had to be dropped, since
        some groups have none after a fault, or those of other parameters, or quantised ones, or no group's are finite. Groups
        whose moments are not finite take the average of the others'.
    """
    held = _held_by(optimizers)
    rows, _ = exchange_rows(held.row(), mesh)
    alike = all(len(set(rows[name])) == 1 for name in ("names", "elements"))
    equal = hold_the_same_bits([held.moments, held.numbers], mesh) if alike else False
    bad = [bool(count) for count in rows["not_finite"]]
    if equal and not any(bad):
        return 0, False
    why = ""
    if any(rows["quantised"]):
        why = "they are quantised"
    elif not all(rows["moments"]) and any(rows["moments"]):
        why = "a group has lost its own"
    elif not alike:
        why = "the groups' optimizers hold state of different parameters"
    elif all(bad):
        why = "no group's are finite"
    if why:
        _drop(optimizers, why, mesh)
        return 0, True
    return _average(optimizers, held, bad, mesh, bucket_size_bytes), False


@dataclass
class _Held:
    """
    The tensors in the state of this rank's optimizers, by `<optimizer>/<parameter>/<name>`.

    Args:
        moments (`dict[str, torch.Tensor]`):
            This rank's shards of them, aliasing the state.
        numbers (`dict[str, torch.Tensor]`):
            Single numbers: step counters and the like.
        quantised (`bool`):
            Whether there are moments that cannot be averaged.
    """

    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    quantised: bool = False

    def row(self) -> Mapping[str, float]:
        """What this rank tells the others."""
        return {
            # Whose they are: as many of the same size may be those of other parameters, of a head that one group trains alone.
            "names": float(zlib.crc32(repr([[*self.moments], [*self.numbers]]).encode())),
            "moments": float(len(self.moments)),
            "quantised": float(self.quantised),
            "elements": float(sum(local.numel() for local in self.moments.values())),
            "not_finite": float(not all_finite(self.moments.values())),
        }


def _held_by(optimizers: Sequence[torch.optim.Optimizer]) -> _Held:
    held = _Held()
    for index, optimizer in enumerate(optimizers):
        for place, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
            # By name: a resumed optimizer has them in another order than a fresh one.
            for name, value in sorted(optimizer.state.get(param, {}).items(), key=lambda item: str(item[0])):
                if not isinstance(value, torch.Tensor):
                    continue
                local = local_part(value)
                if value.ndim and not (local.is_floating_point() and type(local) is torch.Tensor):
                    held.quantised = True
                target = held.moments if value.ndim else held.numbers
                target[f"{index}/{place}/{name}"] = local
    return held


def _drop(optimizers: Sequence[torch.optim.Optimizer], why: str, mesh: Peers) -> None:
    for optimizer in optimizers:
        reset_moments(optimizer)
    if mesh.is_main:
        logger.warning(
            "The optimizer moments of the groups cannot be averaged before the synchronous steps at the end (%s): all "
            "groups begin them with fresh moments.",
            why,
        )


def _average(
    optimizers: Sequence[torch.optim.Optimizer], held: _Held, bad: Sequence[bool], mesh: Peers, bucket_size_bytes: int
) -> int:
    """
    The bytes that this rank has sent. Collective over the world: the counters, the moments, then one single number after the
    other, which are the same on all ranks, as the moments are.
    """
    steps = counters_of(optimizers)
    counts = exchange_counts(steps, mesh)
    plan = plan_exchange(held.moments, mesh, bucket_size_bytes)
    weights = [float(not group) for group in bad]
    if any(bad) and mesh.is_main:
        logger.warning(
            "The optimizer moments of federation group %s are not finite. It takes the average of the others' for the "
            "synchronous steps at the end.",
            ", ".join(str(group) for group, found in enumerate(bad) if found),
        )
    run_exchange(plan, held.moments, mesh.device, weights[mesh.group_index], sum(weights))
    # Counters that differ, after a fault say: the largest, as when groups are merged. Other single numbers likewise.
    settle_counters(steps, counts, weights)
    for number in held.numbers.values():
        largest = number.to(mesh.device, copy=True)
        for group in (mesh.fed, mesh.group):
            all_reduce(largest, group, "max")
        number.copy_(largest)
    return plan.slow_bytes()

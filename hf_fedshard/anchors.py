"""
One set of anchors in all groups, without a collective of its own to prove it.

Every rank steps its anchors for itself, with pseudo-gradients whose bits are the same in all groups. On like hardware so are
the anchors. Kernels of unlike hardware round differently (one fuses a multiplication with an addition, say), and averages do
not bring anchors together again: an outer step takes back a part of what a group is off, and an adaptive optimizer, whose
steps are as large for small pseudo-gradients, many times as much. So checksums ride on the rows that the ranks exchange at a
border anyway, and where they differ all groups take group 0's anchors.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from .exchange import run_exchange
from .exchange_plan import ExchangePlan
from .initial import checksum
from .metrics import Rows


if TYPE_CHECKING:
    from .averaging import ModelAverager

logger = logging.getLogger(__name__)

# The largest prime below 2^32: every bit of a word has its part in the remainder, and sums of it over a group are exact.
_MODULUS = 2**32 - 5
_CHECKSUM, _BYTES = "anchors", "anchor_bytes"


def anchors_differ(rows: Rows) -> bool:
    """
    Whether the anchors of some groups differ; the same on all ranks.

    Args:
        rows (`Mapping[str, list[float]]`):
            Of all groups.
    """
    return len(set(rows.get(_CHECKSUM, ()))) > 1


class SharedAnchors:
    """
    Compares the anchors of the groups, and makes them one where they are not.

    What an outer optimizer keeps besides may go on differing in its last bits. It sees the same pseudo-gradients everywhere,
    since both the anchors and the average are the same, so it stays at that.

    Args:
        averager ([`ModelAverager`]):
            Of the model.
    """

    def __init__(self, averager: ModelAverager) -> None:
        self.averager = averager
        self._has_warned = False

    def row(self) -> dict[str, torch.Tensor | float]:
        """
        What a rank says of its anchors. Without communication, and without waiting for a device: the checksum stays on it.
        Plain averaging with anchors in host memory (`offload_outer_state`) is waited for.

        Returns:
            `dict[str, torch.Tensor | float]`: A checksum, as a scalar in float64, and the bytes that this rank would send to
            other groups to make them one. Nothing where no anchors are kept, or one process holds all groups.
        """
        averager = self.averager
        if not averager.outer.keeps_anchors or averager.mesh.in_process:
            return {}
        # Anchors may lie in host memory: as for a step, one after the other is brought to where the parameters are. What an
        # outer step writes to them comes from there too, and so behind these copies; averages that are taken as they are may
        # have been formed in host memory, and be written at once.
        device, waits = next(averager.model.parameters()).device, averager.outer.optimizer is None
        placed = checksum(averager.outer.anchors, device, non_blocking=not waits)[1]
        return {_CHECKSUM: placed.remainder(_MODULUS).double(), _BYTES: float(self._plan().slow_bytes())}

    def unify(self, rows: Rows, round: int) -> int:
        """
        Takes group 0's anchors where those of any group differ, before differences to them are formed. Collective over the
        world if they do, which all ranks know from the rows: a sum in which the other groups have no weight.

        Args:
            rows (`Mapping[str, list[float]]`):
                Of all groups.
            round (`int`):
                Number of the round, counted from 1.

        Returns:
            `int`: Bytes that the ranks of this group have sent to other groups for it.
        """
        if not anchors_differ(rows):
            return 0
        mesh, sent = self.averager.mesh, int(rows[_BYTES][self.averager.mesh.group_index])
        if mesh.is_main and not self._has_warned:
            logger.warning(
                "The federation groups have stepped to models that differ in their bits by the end of round %d: their hardware "
                "rounds differently, or something wrote to the anchors of some. All have taken group 0's, which sends %.3g MB "
                "from each group, and will do so at every border where they differ, without another word. Plain averaging "
                "(outer_optimizer='fedavg' at its learning rate 1) has no such steps.",
                round,
                sent / 1e6,
            )
            self._has_warned = True
        weight = float(mesh.group_index == 0)
        with torch.no_grad():
            run_exchange(self._plan(), self.averager.outer.anchors, mesh.device, weight, total_weight=1.0)
        return sent

    def _plan(self) -> ExchangePlan:
        return self.averager.tensors.plan("anchors", self.averager.outer.anchors)

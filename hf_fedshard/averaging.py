"""What an averaging of a whole model consists of: its parameters, its buffers, and what they tell."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .config import FederationConfig
from .exchange import AveragingReport, ExchangePlan, average_replicated, plan_exchange, run_exchange
from .mesh import FederationMesh
from .metrics import exchange_rows
from .shards import all_finite, local_shards, persistent_buffers, reshard, unmanaged_parameters


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """
    What this rank brings to a border.

    Args:
        shards (`dict[str, torch.Tensor]`):
            Its local shards of the parameters to be averaged, aliasing them.
        buffers (`dict[str, torch.Tensor]`):
            Its persistent buffers.
        plan ([`ExchangePlan`]):
            How the shards are exchanged.
        finite (`bool`):
            Whether all of it is, buffers left aside that were not when training began.
        unmanaged (`list[str]`):
            Trainable parameters that FSDP2 does not manage: none, unless they were added after the start.
    """

    shards: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    plan: ExchangePlan
    finite: bool
    unmanaged: list[str]


class ModelAverager:
    """
    Averages one model over the groups.

    Args:
        model (`nn.Module`):
            The prepared model.
        mesh ([`FederationMesh`]):
            The federation.
        config ([`FederationConfig`]):
            Its settings.
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: FederationMesh,
        config: FederationConfig,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config
        self.optimizers = optimizers
        self._trained: set[str] = set()
        self._plan: ExchangePlan | None = None
        self._plan_names: tuple[str, ...] = ()
        # A constant such as a causal mask of -inf is no sign of trouble.
        self._checked_buffers = [name for name, buffer in persistent_buffers(model).items() if all_finite([buffer])]
        self.note_trainable()

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that train or have trained."""
        return sorted(self._trained)

    def note_trainable(self, before: Iterable[str] = ()) -> None:
        """
        Remembers what trains: a layer that is frozen again inside a round differs between the groups all the same.

        Args:
            before (`Iterable[str]`, *optional*):
                What has trained earlier in a round that is resumed.
        """
        self._trained |= {name for name, param in self.model.named_parameters() if param.requires_grad}
        self._trained |= set(before)

    def collect(self) -> Held:
        """
        Gathers what this rank brings to a border, without communication.

        Returns:
            [`Held`]: Everything that trains or has trained, the buffers, and the plan; the plan is kept from border to
            border, and made anew where parameters were unfrozen.
        """
        reshard(self.model)
        self.note_trainable()
        shards = {name: shard for name, shard in local_shards(self.model).items() if name in self._trained}
        if self._plan is None or tuple(shards) != self._plan_names:
            self._plan = plan_exchange(shards, self.mesh, self.config.bucket_size_bytes)
            self._plan_names = tuple(shards)
        buffers = persistent_buffers(self.model)
        finite = all_finite([*shards.values(), *(buffers[name] for name in self._checked_buffers)])
        return Held(shards, buffers, self._plan, finite, unmanaged_parameters(self.model))

    def average(self, held: Held, excluded: tuple[int, ...]) -> float:
        """
        Replaces parameters and buffers by their average over the groups. Collective over the world, in this order: the
        buckets of the plan, the buffers, the small exchange of the drift.

        Args:
            held ([`Held`]):
                From [`~ModelAverager.collect`], on all ranks for the same parameters.
            excluded (`tuple[int, ...]`):
                Groups to leave out, the same on all ranks, not all of them. They take the average, and fresh moments.

        Returns:
            `float`: The drift, see [`RoundMetrics`].
        """
        included = self.mesh.layout.num_groups - len(excluded)
        left_out = self.mesh.group_index in excluded
        with torch.no_grad():
            weight = 0.0 if left_out else 1.0
            report = run_exchange(held.plan, held.shards, self.mesh.device, weight, float(included))
            average_replicated(held.buffers, self.mesh, not left_out, included)
        if excluded and torch.distributed.get_rank() == 0:
            logger.warning(
                "The parameters of federation group %s were not finite. It was left out of the average, has taken the "
                "average of the others, and starts with fresh optimizer moments.",
                ", ".join(map(str, excluded)),
            )
        if left_out:
            for optimizer in self.optimizers:
                optimizer.state.clear()
        return self._exchange_drift(report, included)

    def take_as_it_is(self, held: Held) -> float:
        """
        Makes a border of a model that all groups hold already, after synchronous steps. Collective over the world: only the
        buffers are averaged, which every rank has of its own.

        Args:
            held ([`Held`]):
                From [`~ModelAverager.collect`].

        Returns:
            `float`: The drift: none.
        """
        with torch.no_grad():
            average_replicated(held.buffers, self.mesh, True, self.mesh.layout.num_groups)
        return 0.0

    def _exchange_drift(self, report: AveragingReport, included: int) -> float:
        # The replicas of a group each report the whole shard, so the ratio needs no correction.
        row = {"drift": report.squared_drift.item(), "norm": report.squared_norm.item()}
        rows, _ = exchange_rows(row, self.mesh)
        norm = rows["norm"][0]
        return (sum(rows["drift"]) / included / norm) ** 0.5 if norm > 0 else 0.0

"""The inner optimizers' moments at a border, as the setting `inner_moments` has it: kept, reset, or averaged over the groups."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from .config import FederationConfig
from .counters import can_average, counters_of, exchange_counts, settle_counters
from .exchange import run_exchange
from .held import Held
from .lossy_exchange import run_lossy_exchange
from .moments import moments_of, reset_moments
from .peers import Peers
from .selection import Selection


logger = logging.getLogger(__name__)


class InnerMoments:
    """
    What an averaging does with the inner optimizers.

    Args:
        model (`nn.Module`):
            The prepared model.
        mesh ([`Peers`]):
            The federation, or its [`SlowTier`].
        config ([`FederationConfig`]):
            Its settings.
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        selection ([`Selection`]):
            Which parameters are averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Peers,
        config: FederationConfig,
        optimizers: Sequence[torch.optim.Optimizer],
        selection: Selection,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config
        self.optimizers = optimizers
        self.selection = selection

    def collect(self, shards: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """
        This rank's moments of what is averaged, as [`moments_of`]; none if they are not averaged. Without communication.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                What is averaged, by name.

        Returns:
            `tuple[dict[str, torch.Tensor], list[str]]`: The moments, and what cannot be averaged, in words.
        """
        if self.config.inner_moments != "average":
            return {}, []
        names = {id(param): name for name, param in self.model.named_parameters() if name in shards}
        found, refused = moments_of(self.optimizers, names)
        return found, [
            f"inner_moments='average' cannot average {what}. Use 'keep' or 'reset'." for what in refused[:1]
        ]

    def average(self, held: Held, weights: Sequence[float]) -> bool:
        """
        Replaces the moments by their average. Collective over the world, in this order: the counters, and the buckets of the
        moments.

        Args:
            held ([`Held`]):
                Its moments are written in place.
            weights (`Sequence[float]`):
                Of each group, the same on all ranks; 0 for those that are left out.

        Returns:
            `bool`: Whether they could be: all ranks have exchanged their counters, and answer alike.
        """
        averaged = {id(param) for name, param in self.model.named_parameters() if name in held.shards}
        counters = counters_of(self.optimizers, lambda param: id(param) in averaged)
        counts = exchange_counts(counters, self.mesh)
        if not can_average(counters, counts):
            if self.mesh.is_main:
                logger.warning(
                    "The optimizers of the federation groups have made different numbers of steps, skipped by a gradient "
                    "scaler, say. It is not known how far their moments have grown by then (it is of Adam, AdamW and "
                    "RAdam), and they were not averaged this time."
                )
            return False
        weight, total = weights[self.mesh.group_index], sum(weights)
        run = run_lossy_exchange if held.plans["moments"].codec else run_exchange
        run(held.plans["moments"], held.moments, self.mesh.device, weight, total)
        settle_counters(counters, counts, weights)
        return True

    def settle(self, excluded: tuple[int, ...], averaged: bool, names: Collection[str] | None = None) -> None:
        """
        Fresh moments where they are due: by the setting, or of a group that was left out. Without communication.

        Args:
            excluded (`tuple[int, ...]`):
                Groups that were left out of the average.
            averaged (`bool`):
                Whether the moments were averaged, so that these groups have some.
            names (`Collection[str]`, *optional*):
                Of a fragment's parameters, whose moments alone are touched; by default all.
        """
        if excluded and self.mesh.is_main:
            logger.warning(
                "The parameters of federation group %s were not finite. It was left out of the average, has taken the "
                "average of the others, and starts with %s optimizer moments.",
                ", ".join(map(str, excluded)),
                "averaged" if averaged else "fresh",
            )
        left_out = self.mesh.group_index in excluded and not averaged
        if not left_out and self.config.inner_moments != "reset":
            return
        chosen = {
            id(param)
            for name, param in self.model.named_parameters()
            if (left_out or self.selection.is_averaged(name)) and (names is None or name in names)
        }
        for optimizer in self.optimizers:
            reset_moments(optimizer, lambda param: id(param) in chosen)

"""
The averaging of a whole model over the groups: its parameters, its buffers, the inner optimizers' moments, the outer step.

What takes part in it says [`TrainedParameters`]; [`AveragedTensors`] collects it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from .averaged_tensors import AveragedTensors
from .config import FederationConfig
from .exchange import average_replicated, run_exchange
from .held import Held
from .inner_moments import InnerMoments
from .lora_products import average_products
from .lossy_exchange import RoundStart, run_lossy_exchange
from .metrics import exchange_rows
from .outcome import Exchanged, Outcome
from .outer import OuterLoop
from .peers import Peers
from .residuals import Residuals
from .selection import Selection
from .shards import reshard
from .trained_parameters import TrainedParameters


logger = logging.getLogger(__name__)


class ModelAverager:
    """
    Averages one model over the groups.

    Args:
        model (`nn.Module`):
            The prepared model.
        mesh ([`Peers`]):
            The federation, or its [`SlowTier`].
        config ([`FederationConfig`]):
            Its settings.
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Peers,
        config: FederationConfig,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config
        self.selection = Selection(config)
        self.outer = OuterLoop(config)
        self.residuals = Residuals(self.outer.memory)
        if config.offload_outer_state and not self.outer.keeps_anchors and mesh.layout.num_groups > 1 and mesh.is_main:
            logger.warning(
                "offload_outer_state=True has nothing to move: plain averaging in fp32 without proximal_mu holds nothing between "
                "borders."
            )
        self.trained = TrainedParameters(model, mesh, self.selection)
        self.moments = InnerMoments(model, mesh, config, optimizers, self.selection)
        self.tensors = AveragedTensors(model, mesh, config, self.trained, self.moments, self.outer)
        self.restart()

    def restart(self, trained_before: Iterable[str] = ()) -> None:
        """
        Begins from the model as it is: the next outer step is the first.

        Args:
            trained_before (`Iterable[str]`, *optional*):
                Names of parameters that have trained earlier in a round that is resumed.
        """
        reshard(self.model)
        self.trained.note_trainable(trained_before)
        self.residuals.reset()
        if self.mesh.layout.num_groups > 1:
            self.outer.restart(self.trained.averaged_shards())

    def wait(self) -> None:
        """
        Waits until no other thread of this rank uses the averager's communicators, ahead of collectives in this one. Several
        federations may share a slow tier, and what one has started goes on beside the others.

        All ranks start the same exchanges ahead of this, so each of them ends without anything that follows it here.
        """
        self.mesh.wait()

    def average(
        self,
        held: Held,
        weights: Sequence[float],
        excluded: tuple[int, ...],
        with_moments: bool = True,
        step: bool = True,
        turn: Collection[str] | None = None,
    ) -> Outcome:
        """
        Replaces parameters and buffers by their average over the groups, and makes the outer step. Collective over the
        world: [`~ModelAverager.exchange`]. What follows, [`~ModelAverager.settle`], needs no communication: every rank
        steps its shards.

        What is not in its turn becomes the average and keeps its anchor: the outer optimizer sees all that it has moved since
        its last step in its next one, as if the groups had not been brought together in between.

        Args:
            held ([`Held`]):
                From [`AveragedTensors.collect`], on all ranks for the same parameters.
            weights (`Sequence[float]`):
                Of each group, the same on all ranks; 0 for those that are left out.
            excluded (`tuple[int, ...]`):
                Groups that are left out, the same on all ranks, not all of them. They take the average, and fresh moments.
            with_moments (`bool`, defaults to `True`):
                Whether the moments of all groups are of the same parameters, the same on all ranks.
            step (`bool`, defaults to `True`):
                Whether the outer optimizer steps; if not, the average is the model, and the anchor.
            turn (`Collection[str]`, *optional*):
                Names of the parameters that it steps, the same on all ranks; by default all.

        Returns:
            [`Outcome`]: What it came to.
        """
        outcome = self.settle(held, self.exchange(held, weights, with_moments, step, turn), excluded)
        self.leave_out_frozen()
        return outcome

    def exchange(
        self,
        held: Held,
        weights: Sequence[float],
        with_moments: bool = True,
        step: bool = True,
        turn: Collection[str] | None = None,
    ) -> Exchanged:
        """
        The collectives of an averaging. Without adapters of which products are averaged, and without moments, it touches
        what is held and neither model nor optimizers, so it may run in a thread beside the training steps where that is a
        snapshot.

        Collective over the world, in this order: the buckets of the parameters, adapters of which products are averaged, the
        counters and the buckets of the moments, the buffers, and one small exchange of norms.

        Args:
            held ([`Held`]):
                Written in place: `means` are the averages afterwards, or the pseudo-gradients of what is stepped.
            weights (`Sequence[float]`):
                See [`~ModelAverager.average`].
            with_moments (`bool`, defaults to `True`):
                The same.
            step (`bool`, defaults to `True`):
                The same.
            turn (`Collection[str]`, *optional*):
                The same.

        Returns:
            [`Exchanged`]: For [`~ModelAverager.settle`].
        """
        weight, total = weights[self.mesh.group_index], sum(weights)
        lora_error = None
        with torch.no_grad():
            pairs = self.tensors.pairs(held.shards)
            paired = {name for pair in pairs for name in pair}
            plain = {name: mean for name, mean in held.means.items() if name not in paired}
            row = self._average_parameters(held, plain, weight, total)
            if pairs:
                drift, norm, lora_error = self._average_adapters(held, weights)
                row = {"drift": row["drift"] + drift, "norm": row["norm"] + norm}
            with_moments = with_moments and bool(held.moments)
            if with_moments:
                with_moments = self.moments.average(held, weights)
            self._average_buffers(held, weight, total)
        stepped = {name: mean for name, mean in held.means.items() if step and (turn is None or name in turn)}
        row["pseudo_gradient"] = self.outer.form_pseudo_gradients(stepped, held.dtypes, held.copies)
        rows, _ = exchange_rows(row, self.mesh)
        counted = sum(weight > 0 for weight in weights)
        return Exchanged(
            weights=tuple(weights),
            squared_drift=sum(rows["drift"]) / counted,
            squared_norm=rows["norm"][0],
            # Group 0's: sums over other ranks may be rounded in another way, and all must scale by the same bits.
            pseudo_gradient_norm=rows["pseudo_gradient"][0] ** 0.5,
            with_moments=with_moments,
            lora_error=lora_error,
            step=step,
            turn=None if turn is None else frozenset(turn),
        )

    def settle(
        self,
        held: Held,
        found: Exchanged,
        excluded: tuple[int, ...],
        names: Collection[str] | None = None,
        last: bool = True,
    ) -> Outcome:
        """
        What follows the collectives: the outer step, and fresh moments where they are due. Without communication.

        Args:
            held ([`Held`]):
                After [`~ModelAverager.exchange`]; those of its `shards` that are there get the new model.
            found ([`Exchanged`]):
                From there.
            excluded (`tuple[int, ...]`):
                See [`~ModelAverager.average`].
            names (`Collection[str]`, *optional*):
                Of a fragment's parameters, whose moments alone are touched; by default all.
            last (`bool`, defaults to `True`):
                Whether the outer step is that of the whole model, or of its last fragment.

        Returns:
            [`Outcome`]: What it came to.
        """
        if found.step:
            rate = self.outer.step(held.means, held.shards, held.dtypes, found.pseudo_gradient_norm, last, found.turn)
        else:
            rate = self.outer.take(held.means, held.shards, held.dtypes)
        self.moments.settle(excluded, found.with_moments, names)
        norm = None if rate is None else found.pseudo_gradient_norm
        return Outcome(found.drift, found.weights, found.with_moments, norm, rate, found.lora_error)

    def take_as_it_is(self, held: Held, excluded: tuple[int, ...] = ()) -> Outcome:
        """
        Makes a border of a model that all groups hold already, after synchronous steps. Collective over the world: only the
        buffers are averaged, which every rank has of its own.

        There is no outer step: the model is the anchor of the next round, the outer optimizer's moments and its place in
        the schedule stay as they are, and so do the inner moments, which are equal already.

        Args:
            held ([`Held`]):
                From [`AveragedTensors.collect`].
            excluded (`tuple[int, ...]`, *optional*):
                Groups whose buffers, moments or local layers are not finite: they take the average of the others' buffers.

        Returns:
            [`Outcome`]: No drift, and nothing else.
        """
        with torch.no_grad():
            weight = float(self.mesh.group_index not in excluded)
            self._average_buffers(held, weight, float(self.mesh.layout.num_groups - len(excluded)))
        self.outer.take(held.shards, held.shards, held.dtypes)
        # What was owed is of a model that has been trained without it since.
        self.residuals.reset()
        self.leave_out_frozen()
        return Outcome(0.0)

    def _average_parameters(
        self, held: Held, means: Mapping[str, torch.Tensor], weight: float, total: float
    ) -> dict[str, float]:
        """Forms the averages in `means`; this rank's part in their drift and norm."""
        device, plan = self.mesh.device, held.plans["parameters"]
        if plan.codec is None:
            reports = [run_exchange(plan, means, device, weight, total, held.copies)]
        else:
            # Lossy formats carry differences. What has no anchor yet is sent as it is, and gets one at this border.
            first = held.plans["newcomers"].names() if "newcomers" in held.plans else frozenset()
            newcomers = {name: mean for name, mean in means.items() if name in first}
            known = {name: mean for name, mean in means.items() if name not in first}
            start = RoundStart(self.outer.anchors, held.dtypes)
            residuals = self.residuals.of(plan, device, self.outer.anchors)
            reports = [run_lossy_exchange(plan, known, device, weight, total, start, residuals, held.copies)]
            if newcomers:
                reports.append(run_exchange(held.plans["newcomers"], newcomers, device, weight, total, held.copies))
        return {
            "drift": sum(report.squared_drift.item() for report in reports),
            "norm": sum(report.squared_norm.item() for report in reports),
        }

    def leave_out_frozen(self) -> None:
        """
        At a border: what was frozen before is one model in all groups now, stays as it is and travels no more. Local
        layers remain each group's own.
        """
        self.trained.drop_frozen()
        trained = set(self.trained.names)
        self.outer.forget([name for name in self.outer.anchors if name not in trained])

    def _average_buffers(self, held: Held, weight: float, total: float) -> None:
        local = {name: buffer for name, buffer in held.buffers.items() if self.selection.is_local(name)}
        shared = {name: buffer for name, buffer in held.buffers.items() if name not in local}
        average_replicated(shared, self.mesh, weight, total)
        average_replicated(local, self.mesh, weight, total, in_group=True)

    def _average_adapters(self, held: Held, weights: Sequence[float]) -> tuple[float, float, float]:
        def gather(tables: Mapping[str, torch.Tensor]) -> None:
            run_exchange(held.plans["adapters"], tables, self.mesh.device, 1.0, 1.0)

        parameters = dict(self.model.named_parameters())
        pairs = self.tensors.pairs(held.shards)
        return average_products(pairs, held.shards, parameters, gather, weights, self.mesh, held.copies)

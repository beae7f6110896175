"""What an averaging of a whole model consists of: its parameters, its buffers, and what they tell."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .config import FederationConfig
from .counters import can_average, counters_of, exchange_counts, settle_counters
from .exchange import ExchangePlan, average_replicated, plan_exchange, run_exchange
from .held import Held
from .lora import product_pairs
from .lora_products import average_products
from .lossy_exchange import RoundStart, run_lossy_exchange
from .mesh import Peers
from .metrics import exchange_rows
from .moments import moments_of, reset_moments
from .outcome import Exchanged, Outcome
from .outer import OuterLoop
from .residuals import Residuals
from .selection import Selection
from .shards import all_finite, local_shards, persistent_buffers, reshard, unmanaged_parameters


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
        self.optimizers = optimizers
        self.selection = Selection(config)
        self.outer = OuterLoop(config)
        self.residuals = Residuals(self.outer.memory)
        self._trained: set[str] = set()
        self._plans: dict[str, tuple[object, ExchangePlan]] = {}
        self._adapters = product_pairs(model, self.selection) if config.lora_average == "product" else []
        # A constant such as a causal mask of -inf is no sign of trouble.
        self.checked_buffers = [name for name, buffer in persistent_buffers(model).items() if all_finite([buffer])]
        self.restart()

    def restart(self, trained_before: Iterable[str] = ()) -> None:
        """
        Begins from the model as it is: the next outer step is the first.

        Args:
            trained_before (`Iterable[str]`, *optional*):
                Names of parameters that have trained earlier in a round that is resumed.
        """
        reshard(self.model)
        self.note_trainable(trained_before)
        self.residuals.reset()
        if self.mesh.layout.num_groups > 1:
            self.outer.restart(self.averaged_shards())

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that train, or have since the last border."""
        return sorted(self._trained)

    def note_trainable(self, before: Iterable[str] = ()) -> None:
        """
        Remembers what trains: a layer that is frozen inside a round differs between the groups all the same, and is averaged
        once more.

        Args:
            before (`Iterable[str]`, *optional*):
                What has trained earlier in a round that is resumed.
        """
        self._trained |= {name for name, param in self.model.named_parameters() if param.requires_grad}
        self._trained |= set(before)

    def local_names(self) -> set[str]:
        """Names of the parameters and persistent buffers of which each group has its own."""
        names = {*self._trained, *persistent_buffers(self.model)}
        return {name for name in names if self.selection.is_local(name)}

    def collect(self) -> Held:
        """
        Gathers what this rank brings to a border, without communication.

        Returns:
            [`Held`]: Everything that trains or has trained, the buffers, and the plans; these are kept from border to
            border, and made anew where parameters were unfrozen.
        """
        reshard(self.model)
        self.note_trainable()
        shards = self.averaged_shards()
        means = self.outer.means(shards)
        moments, problems = self._moments(shards)
        problems += self.strays()
        buffers = persistent_buffers(self.model)
        pairs = self._pairs(shards)
        paired = {name for pair in pairs for name in pair}
        plans = self.parameter_plans({n: t for n, t in means.items() if n not in paired})
        if moments:
            # They have no anchor to be a difference to. bfloat16 has fp32's range: a second moment cannot vanish in it.
            wire_format = "fp32" if self.config.wire_format == "fp32" else "bf16"
            plans["moments"] = self.plan("moments", moments, wire_format)
        if pairs:
            groups = self.mesh.layout.num_groups
            tables = {
                name: torch.empty((groups, *shards[name].shape), dtype=shards[name].dtype, device="meta")
                for pair in pairs
                for name in pair
            }
            plans["adapters"] = self.plan("adapters", tables)
        finite = all_finite([*shards.values(), *moments.values(), *self.checked_besides(shards, buffers)])
        dtypes = {name: shard.dtype for name, shard in shards.items()}
        return Held(shards, dtypes, means, moments, buffers, plans, finite, problems, self.copies(shards))

    def average(
        self,
        held: Held,
        weights: Sequence[float],
        excluded: tuple[int, ...],
        with_moments: bool = True,
        step: bool = True,
    ) -> Outcome:
        """
        Replaces parameters and buffers by their average over the groups, and makes the outer step. Collective over the
        world: [`~ModelAverager.exchange`]. What follows, [`~ModelAverager.settle`], needs no communication: every rank
        steps its shards.

        Args:
            held ([`Held`]):
                From [`~ModelAverager.collect`], on all ranks for the same parameters.
            weights (`Sequence[float]`):
                Of each group, the same on all ranks; 0 for those that are left out.
            excluded (`tuple[int, ...]`):
                Groups that are left out, the same on all ranks, not all of them. They take the average, and fresh moments.
            with_moments (`bool`, defaults to `True`):
                Whether the moments of all groups are of the same parameters, the same on all ranks.
            step (`bool`, defaults to `True`):
                Whether the outer optimizer steps; if not, the average is the model.

        Returns:
            [`Outcome`]: What it came to.
        """
        outcome = self.settle(held, self.exchange(held, weights, with_moments, step), excluded)
        self.leave_out_frozen()
        return outcome

    def exchange(
        self, held: Held, weights: Sequence[float], with_moments: bool = True, step: bool = True
    ) -> Exchanged:
        """
        The collectives of an averaging. Without adapters of which products are averaged, and without moments, it touches
        what is held and neither model nor optimizers, so it may run in a thread beside the training steps where that is a
        snapshot.

        Collective over the world, in this order: the buckets of the parameters, adapters of which products are averaged, the
        counters and the buckets of the moments, the buffers, and one small exchange of norms.

        Args:
            held ([`Held`]):
                Written in place: `means` are the averages afterwards, or the pseudo-gradients.
            weights (`Sequence[float]`):
                See [`~ModelAverager.average`].
            with_moments (`bool`, defaults to `True`):
                The same.
            step (`bool`, defaults to `True`):
                The same.

        Returns:
            [`Exchanged`]: For [`~ModelAverager.settle`].
        """
        weight, total = weights[self.mesh.group_index], sum(weights)
        lora_error = None
        with torch.no_grad():
            pairs = self._pairs(held.shards)
            paired = {name for pair in pairs for name in pair}
            plain = {name: mean for name, mean in held.means.items() if name not in paired}
            row = self._average_parameters(held, plain, weight, total)
            if pairs:
                drift, norm, lora_error = self._average_adapters(held, weights)
                row = {"drift": row["drift"] + drift, "norm": row["norm"] + norm}
            with_moments = with_moments and bool(held.moments)
            if with_moments:
                with_moments = self._average_moments(held, weights)
            self._average_buffers(held, weight, total)
        row["pseudo_gradient"] = (
            self.outer.form_pseudo_gradients(held.means, held.dtypes, held.copies) if step else 0.0
        )
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
                After [`~ModelAverager.exchange`]; its `shards` get the new model.
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
            rate = self.outer.step(held.means, held.shards, found.pseudo_gradient_norm, last)
        else:
            rate = self.outer.take(held.means, held.shards)
        self._settle_moments(excluded, found.with_moments, names)
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
                From [`~ModelAverager.collect`].
            excluded (`tuple[int, ...]`, *optional*):
                Groups whose buffers, moments or local layers are not finite: they take the average of the others' buffers.

        Returns:
            [`Outcome`]: No drift, and nothing else.
        """
        with torch.no_grad():
            weight = float(self.mesh.group_index not in excluded)
            self._average_buffers(held, weight, float(self.mesh.layout.num_groups - len(excluded)))
        self.outer.take(held.shards, held.shards)
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

    def has_frozen(self) -> bool:
        """Whether something that is averaged has been frozen since the last border."""
        training = {name for name, param in self.model.named_parameters() if param.requires_grad}
        return any(not self.selection.is_local(name) for name in self._trained - training)

    def leave_out_frozen(self) -> None:
        """
        At a border: what was frozen before is one model in all groups now, stays as it is and travels no more. Local
        layers remain each group's own.
        """
        training = {name for name, param in self.model.named_parameters() if param.requires_grad}
        self._trained &= training | {name for name in self._trained if self.selection.is_local(name)}
        self.outer.forget([name for name in self.outer.anchors if name not in self._trained])

    def _average_buffers(self, held: Held, weight: float, total: float) -> None:
        local = {name: buffer for name, buffer in held.buffers.items() if self.selection.is_local(name)}
        shared = {name: buffer for name, buffer in held.buffers.items() if name not in local}
        average_replicated(shared, self.mesh, weight, total)
        average_replicated(local, self.mesh, weight, total, in_group=True)

    def _shards(self) -> dict[str, torch.Tensor]:
        return local_shards(self.model, plain=self.mesh.in_process)

    def checked_besides(
        self, shards: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """
        What must be finite besides the averaged parameters: the group's own, and buffers that were when training began.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                From [`~ModelAverager.averaged_shards`].
            buffers (`Mapping[str, torch.Tensor]`):
                The persistent buffers.
        """
        local = [shard for name, shard in self._shards().items() if name in self._trained and name not in shards]
        return [*local, *(buffers[name] for name in self.checked_buffers)]

    def averaged_shards(self) -> dict[str, torch.Tensor]:
        """This rank's shards of what is averaged, aliasing the parameters, in the model's order. Reshard first."""
        return {
            name: shard
            for name, shard in self._shards().items()
            if name in self._trained and self.selection.is_averaged(name)
        }

    def _moments(self, shards: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
        if self.config.inner_moments != "average":
            return {}, []
        names = {id(param): name for name, param in self.model.named_parameters() if name in shards}
        found, refused = moments_of(self.optimizers, names)
        return found, [
            f"inner_moments='average' cannot average {what}. Use 'keep' or 'reset'." for what in refused[:1]
        ]

    def strays(self) -> list[str]:
        """What has come to train after the start and cannot be averaged, in words."""
        unmanaged = [] if self.mesh.in_process else unmanaged_parameters(self.model)
        problems = [
            "Trainable parameters were added after training began, and FSDP2 does not manage them, so their gradients "
            f"are reduced nowhere: {', '.join(unmanaged)}. Add them before `prepare`."
        ]
        stray = [n for n in self._trained if not self.selection.is_averaged(n) and not self.selection.is_local(n)]
        return (problems if unmanaged else []) + [
            f"{name} was unfrozen, but is neither averaged nor local: see include_parameters and local_parameters."
            for name in sorted(stray)[:1]
        ]

    def parameter_plans(self, means: Mapping[str, torch.Tensor], part: str = "parameters") -> dict[str, ExchangePlan]:
        """
        The plans of parameters, `"parameters"` and, under a lossy format, `"newcomers"` that have no anchor yet.

        Args:
            means (`Mapping[str, torch.Tensor]`):
                What is averaged, this rank's shards.
            part (`str`, defaults to `"parameters"`):
                Of which part of the model.
        """
        wire_format, anchors = self.config.wire_format, self.outer.anchors
        newcomers = {} if wire_format == "fp32" else {n: mean for n, mean in means.items() if n not in anchors}
        known = {name: mean for name, mean in means.items() if name not in newcomers}
        plans = {"parameters": self.plan(part, known, wire_format)}
        if newcomers:
            plans["newcomers"] = self.plan(f"newcomers of {part}", newcomers)
        return plans

    def plan(self, part: str, tensors: Mapping[str, torch.Tensor], wire_format: str = "fp32") -> ExchangePlan:
        """
        The plan of an exchange, kept for as long as names and sizes stay.

        Args:
            part (`str`):
                What is exchanged.
            tensors (`Mapping[str, torch.Tensor]`):
                This rank's.
            wire_format (`str`, defaults to `"fp32"`):
                How they cross.
        """
        names = tuple((name, tensor.numel(), tensor.dtype) for name, tensor in tensors.items())
        if part not in self._plans or self._plans[part][0] != names:
            plan = plan_exchange(tensors, self.mesh, self.config.bucket_size_bytes, wire_format)
            self._plans[part] = (names, plan)
        return self._plans[part][1]

    def _average_moments(self, held: Held, weights: Sequence[float]) -> bool:
        """Whether they could be: all ranks have exchanged their counters, and answer alike."""
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

    def _pairs(self, shards: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
        """Adapters of which both factors train: where one is frozen, the mean of the other is that of the products."""
        return [pair for pair in self._adapters if all(name in shards for name in pair)]

    def _average_adapters(self, held: Held, weights: Sequence[float]) -> tuple[float, float, float]:
        def gather(tables: Mapping[str, torch.Tensor]) -> None:
            run_exchange(held.plans["adapters"], tables, self.mesh.device, 1.0, 1.0)

        parameters = dict(self.model.named_parameters())
        pairs = self._pairs(held.shards)
        return average_products(pairs, held.shards, parameters, gather, weights, self.mesh, held.copies)

    def copies(self, names: Iterable[str]) -> dict[str, int]:
        """
        How many ranks of a group hold each element of a parameter: its replicas, and axes that do not shard it. To be asked
        while the model is resharded.

        Args:
            names (`Iterable[str]`):
                Of parameters.
        """
        found: dict[str, int] = {}
        for name in names:
            param = self.model.get_parameter(name)
            found[name] = 1
            if isinstance(param, DTensor):
                sizes = zip(param.device_mesh.mesh.shape, param.placements, strict=True)
                sharded = math.prod(size for size, placement in sizes if not placement.is_replicate())
                found[name] = self.mesh.group.size() // sharded
        return found

    def _settle_moments(self, excluded: tuple[int, ...], averaged: bool, names: Collection[str] | None = None) -> None:
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

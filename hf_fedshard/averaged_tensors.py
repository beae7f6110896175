"""What of a model is exchanged at a border, and how: collects its tensors, and makes and keeps their exchange plans."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .config import FederationConfig
from .exchange_plan import ExchangePlan, join_plans, plan_exchange
from .held import Held
from .inner_moments import InnerMoments
from .lora import product_pairs
from .outer import OuterLoop
from .peers import Peers
from .shards import persistent_buffers, reshard, shards_of
from .tensors import accumulation_dtype, all_finite
from .trained_parameters import Survey, TrainedParameters
from .wire import find_codec


class AveragedTensors:
    """
    Collects what a rank brings to a border, without communication.

    Args:
        model (`nn.Module`):
            The prepared model.
        mesh ([`Peers`]):
            The federation, or its [`SlowTier`].
        config ([`FederationConfig`]):
            Its settings.
        trained ([`TrainedParameters`]):
            What takes part.
        moments ([`InnerMoments`]):
            What the inner optimizers bring.
        outer ([`OuterLoop`]):
            Holds the anchors, and says where averages are formed.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Peers,
        config: FederationConfig,
        trained: TrainedParameters,
        moments: InnerMoments,
        outer: OuterLoop,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config
        self.trained = trained
        self.moments = moments
        self.outer = outer
        self._plans: dict[str, tuple[object, ExchangePlan]] = {}
        self._adapters = product_pairs(model, trained.selection) if config.lora_average == "product" else []

    def collect(self, fragments: Sequence[Collection[str] | None] = (None,)) -> Held:
        """
        Gathers what this rank brings to a border, without communication.

        Args:
            fragments (`Sequence`, *optional*):
                Names of the parameters of each fragment, where these are exchanged beside the steps; `None` stands for all.

        Returns:
            [`Held`]: Everything that trains or has trained, the buffers, and the plans; these are kept from border to
            border, and made anew where parameters were unfrozen.
        """
        reshard(self.model)
        found = self.trained.survey()
        shards = shards_of(found.averaged)
        means = self.outer.means(shards)
        moments, problems = self.moments.collect(shards)
        problems += found.strays
        buffers = persistent_buffers(self.model)
        pairs = self.pairs(shards)
        paired = {name for pair in pairs for name in pair}
        plans = self._border_plans({n: t for n, t in means.items() if n not in paired}, fragments)
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
        finite = all_finite([*shards.values(), *moments.values(), *self.checked_besides(found, buffers)])
        dtypes = {name: shard.dtype for name, shard in shards.items()}
        return Held(shards, dtypes, means, moments, buffers, plans, finite, problems, self.copies(found.averaged))

    def checked_besides(self, found: Survey, buffers: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """
        What must be finite besides the averaged parameters: the group's own, and buffers that were when training began.

        Args:
            found ([`Survey`]):
                Of the model.
            buffers (`Mapping[str, torch.Tensor]`):
                The persistent buffers.
        """
        return [*shards_of(found.others).values(), *(buffers[name] for name in self.trained.checked_buffers)]

    def _border_plans(
        self, means: Mapping[str, torch.Tensor], fragments: Sequence[Collection[str] | None]
    ) -> dict[str, ExchangePlan]:
        """The plans of all parameters. Where errors are fed back, the buckets of the fragments, of which something is owed."""
        codec = find_codec(self.config.wire_format)
        if len(fragments) == 1 or codec is None or not codec.feeds_back:
            return self.parameter_plans(means)
        several: dict[str, list[ExchangePlan]] = {}
        rest = dict(means)
        for number, names in enumerate(fragments):
            own = {name: rest.pop(name) for name in means if names is None or name in names}
            for part, plan in self.parameter_plans(own, number).items():
                several.setdefault(part, []).append(plan)
        # What was added to the model since it was divided has no turn, and is averaged at borders alone.
        for part, plan in self.parameter_plans(rest).items() if rest else ():
            several.setdefault(part, []).append(plan)
        return {part: join_plans(plans) for part, plans in several.items()}

    def parameter_plans(
        self, means: Mapping[str, torch.Tensor], fragment: int | None = None
    ) -> dict[str, ExchangePlan]:
        """
        The plans of parameters, `"parameters"` and, under a lossy format, `"newcomers"` that have no anchor yet.

        Args:
            means (`Mapping[str, torch.Tensor]`):
                What is averaged, this rank's shards.
            fragment (`int`, *optional*):
                Number of the fragment that it is; by default the whole model.
        """
        part = "parameters" if fragment is None else f"fragment {fragment}"
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
        # Of what the buckets depend on: a snapshot of parameters in bfloat16, which is fp32, has their plan.
        names = tuple((name, tensor.numel(), accumulation_dtype(tensor.dtype)) for name, tensor in tensors.items())
        if part not in self._plans or self._plans[part][0] != names:
            plan = plan_exchange(tensors, self.mesh, self.config.bucket_size_bytes, wire_format)
            self._plans[part] = (names, plan)
        return self._plans[part][1]

    def pairs(self, shards: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
        """
        Adapters of which both factors train: where one is frozen, the mean of the other is that of the products.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                What is averaged, by name.

        Returns:
            `list[tuple[str, str]]`: Names of the factors A and B; none unless `lora_average="product"`.
        """
        return [pair for pair in self._adapters if all(name in shards for name in pair)]

    def copies(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """
        How many ranks of a group hold each element of a parameter: its replicas, and axes that do not shard it.

        Args:
            parameters (`Mapping[str, torch.Tensor]`):
                By name, of a resharded model.
        """
        found: dict[str, int] = {}
        known: dict[Any, int] = {}  # most parameters are sharded alike
        for name, param in parameters.items():
            placed = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
            if placed not in known:
                known[placed] = 1 if placed is None else self.mesh.group.size() // _num_shards(*placed)
            found[name] = known[placed]
        return found


def _num_shards(mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    return math.prod(
        size for size, placement in zip(mesh.shape, placements, strict=True) if not placement.is_replicate()
    )

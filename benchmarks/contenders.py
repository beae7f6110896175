"""Who trains: one object for each variant, all with the same loop."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hf_fedshard import FederationConfig, Rounds
from hf_fedshard.shards import local_shards, reshard

from .variants import CEILING, Variant
from .workload import Batches, make_model, make_optimizer
from .world import World


class Contender:
    """
    Trains a model step by step.

    Args:
        world ([`World`]):
            Where.
        model (`nn.Module`):
            The model, sharded or wrapped.
        optimizer (`torch.optim.Optimizer`):
            Its optimizer.
        never_meets (`bool`, defaults to `False`):
            Whether the groups never wait for each other.
    """

    def __init__(self, world: World, model: nn.Module, optimizer: Any, never_meets: bool = False) -> None:
        self.world = world
        self.model = model
        self.optimizer = optimizer
        self.never_meets = never_meets
        self.batches = Batches(world.blocks.train, world.workload, world.rank, world.size)

    def step(self) -> float:
        """
        Makes one optimizer step, and the averaging if it is due.

        Returns:
            `float`: Seconds that the averaging took, or next to nothing.
        """
        self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        started = time.perf_counter()
        self._after_step()
        return time.perf_counter() - started

    def _backward(self) -> None:
        batch = self.batches.next()
        self.model(input_ids=batch, labels=batch).loss.backward()

    def _after_step(self) -> None:
        """What the variant does after a step."""

    @property
    def num_averagings(self) -> int | None:
        """Rounds whose average the model has taken in; `None` where nobody counts them."""
        return None

    def evaluated_model(self) -> nn.Module:
        """
        The one model that stands for all ranks at this step: their own, where they hold the same. The run must go on as if
        nobody had asked. Collective over the world.
        """
        return self.model

    @torch.no_grad()
    def evaluate(self) -> float:
        """
        Mean loss of [`~Contender.evaluated_model`] over the held-out blocks. Collective over the world; the training is not
        touched.

        Returns:
            `float`: In nats a token, the same on all ranks.
        """
        model = self.evaluated_model()
        model.eval()
        rows = self.world.blocks.evaluation
        batch = rows[self.world.rank :: self.world.size][: len(rows) // self.world.size].long()
        total = torch.zeros((), dtype=torch.float64)
        for part in batch.split(8):
            total += model(input_ids=part, labels=part).loss.double() * len(part)
        model.train()
        dist.all_reduce(total)
        return float(total) / (len(batch) * self.world.size)

    def close(self) -> None:
        """Ends what runs beside the training."""


class Ours(Contender):
    """FL+FSDP or FL+HSDP by this package."""

    def __init__(self, world: World, model: nn.Module, optimizer: Any, settings: dict[str, Any]) -> None:
        super().__init__(world, model, optimizer)
        settings = {"sync_every": world.workload.sync_every, **settings}
        self.rounds = Rounds(model, world.federation, FederationConfig(num_groups=2, **settings), [optimizer])
        self._num_averagings = 0
        self._copy: nn.Module | None = None

    def _after_step(self) -> None:
        metrics = self.rounds.step(tokens=self.world.workload.step_tokens)
        self._num_averagings += metrics is not None

    @property
    def num_averagings(self) -> int:
        """Rounds whose average the model has taken in."""
        return self._num_averagings

    @torch.no_grad()
    def evaluated_model(self) -> nn.Module:
        """
        The mean of the groups' models as they are after this step, formed in a copy. A border would land at once what is in
        flight, and the run would be another one than a user has.

        The sums are on the mesh's communicators, the averaging beside the steps on those of the slow tier: neither can be
        taken for the other, whatever each rank does first.
        """
        mesh = self.world.federation
        if self._copy is None:
            self._copy = shard_model(make_model(self.world.workload), mesh.fsdp)
        for model in (self.model, self._copy):
            reshard(model)  # the copy's last evaluation has left its head gathered
        own = local_shards(self.model)
        for name, shard in local_shards(self._copy).items():
            shard.copy_(own[name])
            dist.all_reduce(shard, group=mesh.fed)
            shard.div_(mesh.layout.num_groups)
        return self._copy

    def close(self) -> None:
        """Ends the federation, so that nothing of it is watched any longer."""
        self.rounds.release()


class AccelerateLocalSGD(Contender):
    """`accelerate.local_sgd.LocalSGD` on DDP, which shards nothing."""

    def __init__(self, world: World) -> None:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        accelerator = Accelerator(cpu=True)
        plain = make_model(world.workload)
        model, optimizer = accelerator.prepare(plain, make_optimizer(plain, world.workload))
        super().__init__(world, model, optimizer)
        self.local_sgd = LocalSGD(accelerator, model, local_sgd_steps=world.workload.sync_every)
        self.local_sgd.__enter__()

    def _after_step(self) -> None:
        self.local_sgd.step()


def shard_model(model: Any, mesh: DeviceMesh) -> nn.Module:
    """
    Applies FSDP2 as Accelerate does: each layer, the final norm with the head, and the rest with the root.

    Args:
        model (`PreTrainedModel`):
            A Llama.
        mesh (`DeviceMesh`):
            One axis for FSDP, two for HSDP.
    """
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    return model


def make_contender(variant: Variant, world: World) -> Contender:
    """
    Builds a variant. Collective over the world.

    Args:
        variant ([`Variant`]):
            Which.
        world ([`World`]):
            Where.

    Returns:
        [`Contender`]: Ready for its first step, with the same weights as all others.
    """
    if variant.kind == "accelerate":
        return AccelerateLocalSGD(world)
    if variant.kind.startswith("torchft"):
        from .torchft_peers import make_torchft

        return make_torchft(variant.kind, world, shard_model(make_model(world.workload), world.federation.fsdp))
    model: nn.Module = make_model(world.workload)
    if variant.kind == "ddp":
        optimizer = make_optimizer(model, world.workload)
        return Contender(world, nn.parallel.DistributedDataParallel(model), optimizer)
    mesh = {"fsdp": lambda: world.flat, "hsdp": lambda: world.replicated}.get(
        variant.kind, lambda: world.federation.fsdp
    )()
    model = shard_model(model, mesh)
    optimizer = make_optimizer(model, world.workload)
    if variant.kind == "ours":
        return Ours(world, model, optimizer, dict(variant.settings))
    return Contender(world, model, optimizer, never_meets=variant.kind == CEILING)

"""Runs that average beside their steps, on two groups of a small classifier with blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fedshard import guard
from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import FederationMesh, build_federation_mesh
from hf_fedshard.rounds import Rounds

from .data import Batch, collate, feature_samples
from .models import NUM_CLASSES, NUM_FEATURES, full_state
from .outer_runs import adamw, num_samples, sum_over
from .reference_groups import State


NUM_GROUPS = 2
NUM_STEPS = 11


class BlockNet(nn.Module):
    """A classifier of blocks of unequal sizes."""

    def __init__(self, widths: Sequence[int] = (7, 12, 9)) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, widths[0])
        pairs = zip(widths, [*widths[1:], widths[0]], strict=True)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairs])
        self.head = nn.Linear(widths[0], NUM_CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(torch.tanh(hidden))
        return self.head(torch.tanh(hidden))


def block_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BlockNet().to(dtype)


def lora_net(dtype: torch.dtype = torch.float64, with_a: bool = True) -> nn.Module:
    """
    A [`BlockNet`] that PEFT has given an adapter for each block, its base frozen.

    Args:
        dtype (`torch.dtype`):
            Of all parameters.
        with_a (`bool`, defaults to `True`):
            Whether the first factors train.
    """
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        places = [f"layers.{number}" for number in range(3)]
        # Both factors are random, or half of the gradients would be zero in the first step.
        config = LoraConfig(r=3, lora_alpha=6, target_modules=places, init_lora_weights=False)
        model: nn.Module = get_peft_model(BlockNet(), config).to(dtype)
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad and (with_a or "lora_A" not in name))
    return model


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def draws(rank: int, num_ranks: int, num_steps: int = NUM_STEPS) -> list[Batch]:
    """Batches of a rank: those of group 1 have three samples, those of group 0 one."""
    size = 1 + 2 * (rank * NUM_GROUPS // num_ranks)
    samples = feature_samples(size * num_steps, rank)
    return [collate(samples[step * size : (step + 1) * size]) for step in range(num_steps)]


def make_mesh(
    with_slow_tier: bool = True, slow_backend: str | None = None, device: str = "cpu", num_replicas: int | None = None
) -> FederationMesh:
    """By default of 4 ranks FL+FSDP, of 8 ranks FL+HSDP."""
    replicas, size = num_replicas or dist.get_world_size() // 4, dist.get_world_size() // NUM_GROUPS
    layout = FederationLayout(NUM_GROUPS, replicas, {"dp_shard": size // replicas})
    mesh = build_federation_mesh(device, layout, with_slow_tier, slow_backend)
    guard.watch(mesh)
    return mesh


class OverlapRun:
    """One federated run on this rank."""

    def __init__(
        self,
        mesh: FederationMesh,
        dtype: torch.dtype = torch.float64,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self.mesh = mesh
        device = mesh.device
        self.model = fully_shard((model or block_net(dtype)).to(device), mesh=mesh.fsdp)
        self.optimizer = optimizer(self.model.parameters())
        config = FederationConfig(NUM_GROUPS, **{"bucket_size_bytes": 1024, **settings})
        self.rounds = Rounds(self.model, mesh, config, [self.optimizer], num_training_steps=NUM_STEPS)
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        size = num_ranks // NUM_GROUPS
        members = [draws(member, num_ranks) for member in range(rank // size * size, (rank // size + 1) * size)]
        own = members[rank % size]
        self.batches = [{name: value.to(device) for name, value in batch.items()} for batch in own]
        self.items = [sum(num_samples(batch) for batch in batches) for batches in zip(*members, strict=True)]
        everyone = [draws(member, num_ranks) for member in range(num_ranks)]
        self.all_items = [sum(num_samples(batch) for batch in batches) for batches in zip(*everyone, strict=True)]
        self.size = size

    def train(self, step: int) -> torch.Tensor:
        """One step, not counted."""
        batch = self.batches[step]
        # Gradients of synchronous steps are averaged over the groups: together they are those of one batch.
        items = self.all_items[step] / NUM_GROUPS if self.rounds.synchronous else self.items[step]
        loss = sum_over(self.model, batch, items)
        (loss * self.size).backward()  # FSDP2 takes the mean over the ranks of the group
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach() * self.size

    def step(self, step: int) -> Any:
        """One step; the metrics where the outcome of a round was taken in."""
        loss = self.train(step)
        return self.rounds.step(loss, samples=num_samples(self.batches[step]))

    def release(self) -> State:
        """Ends the run; the model of all groups."""
        self.rounds.finish()
        guard.detach(self.rounds)
        return full_state(self.model)


def run_case(mesh: FederationMesh, settings: dict[str, Any], borders: Collection[int] = ()) -> dict[str, Any]:
    """Body: trains, with borders on demand after some steps."""
    run = OverlapRun(mesh, **settings)
    found: dict[str, Any] = {"borders": [], "metrics": [], "groups": []}
    for step in range(NUM_STEPS):
        metrics = run.step(step)
        found["metrics"] += [*metrics.earlier, metrics] if metrics is not None else []
        if step + 1 in borders:
            border = run.rounds.close()
            assert run.rounds.at_border
            found["borders"].append(full_state(run.model))
            found["metrics"] += [earlier.metrics for earlier in border.earlier]
            found["metrics"] += [border.metrics] * (border.metrics not in found["metrics"])
        if step + 1 in (4, 8):
            found["groups"].append(full_state(run.model))  # inside a round: the group's
    found["borders"].append(run.release())
    return found


def run_cases(cases: dict[str, tuple[dict[str, Any], Collection[int]]]) -> dict[str, dict[str, Any]]:
    """Body: all cases on one mesh, one thread of the slow tier after another's jobs."""
    mesh = make_mesh()
    return {name: run_case(mesh, settings, borders) for name, (settings, borders) in cases.items()}

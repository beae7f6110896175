"""Two federation groups on a raw FSDP2 model, their data, and the reference for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_fedshard import guard
from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import build_federation_mesh
from hf_fedshard.rounds import Rounds
from hf_fedshard.shards import reshard

from .data import Batch, batches_by_step, collate, feature_samples, token_samples
from .models import shard_layers
from .reference import train_reference


NUM_STEPS = 5
SYNC_EVERY = 2


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def draws(rank: int, num_steps: int = NUM_STEPS, features: bool = False) -> list[Batch]:
    samples = feature_samples(4 * num_steps, rank) if features else token_samples(2 * num_steps, 8, seed=rank)
    size = len(samples) // num_steps
    return [collate(samples[step * size : (step + 1) * size]) for step in range(num_steps)]


def mean_loss(model: nn.Module, batch: Batch, num_items: int = 1) -> torch.Tensor:
    return model(**batch)["loss"] / num_items


def reference(model: Callable[[], nn.Module], optimizer: Any = adamw, features: bool = False) -> Any:
    batches = batches_by_step([draws(rank, features=features) for rank in range(4)], 2)
    # The mean over two ranks of a mean over their samples.
    return train_reference(model, batches, SYNC_EVERY, optimizer, loss=mean_loss, count=lambda batch: 1)


class Federation:
    """Two groups of two ranks on one model, and what the tests do with it."""

    def __init__(self, model: nn.Module, num_groups: int = 2, optimizer: Any = adamw) -> None:
        self.mesh = build_federation_mesh("cpu", FederationLayout(num_groups, 1, {"dp_shard": 4 // num_groups}))
        guard.watch(self.mesh)
        self.model = model
        if hasattr(model, "blocks"):
            fully_shard(model, mesh=self.mesh.root["dp_shard"])
        else:
            shard_layers(model, self.mesh.root["dp_shard"])
        self.optimizer = optimizer(model.parameters())
        config = FederationConfig(num_groups, SYNC_EVERY, bucket_size_bytes=4096)
        self.rounds = Rounds(model, self.mesh, config, [self.optimizer])

    def train(self, batch: Batch) -> torch.Tensor:
        loss = mean_loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> dict[str, torch.Tensor]:
        reshard(self.model)
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named.items()}

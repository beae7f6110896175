"""Runs of 2 groups x 2 replicas x 2 shards with settings of the outer loop, in double precision, and their reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_fedshard import guard
from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.mesh import FederationMesh, build_federation_mesh
from hf_fedshard.rounds import Rounds

from .data import Batch, batches_by_step, collate, feature_samples
from .models import NUM_CLASSES, NUM_FEATURES, full_state
from .reference import ReferenceResult, train_reference
from .reference_groups import State


NUM_GROUPS, NUM_RANKS = 2, 8
GROUP_SIZE = NUM_RANKS // NUM_GROUPS
SYNC_EVERY = 2
NUM_STEPS = 4


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank adapter, its factors named as PEFT names them."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width, bias=False)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.lora_B["default"](self.lora_A["default"](hidden))


class TinyNet(nn.Module):
    """
    A classifier that is sharded as one unit: eight ranks on two cores pay for each collective of a step.

    Args:
        adapters (`bool`):
            Whether its hidden layer is frozen and has an adapter, and all else is frozen too.
    """

    def __init__(self, adapters: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 11)
        self.hidden = Adapter(11) if adapters else nn.Linear(11, 11)
        self.head = nn.Linear(11, NUM_CLASSES)
        if adapters:
            self.first.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(torch.tanh(self.first(inputs)))))


def _made(dtype: torch.dtype, adapters: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyNet(adapters).to(dtype)


def double() -> nn.Module:
    return _made(torch.float64)


def single() -> nn.Module:
    return _made(torch.float32)


def adapted() -> nn.Module:
    return _made(torch.float64, adapters=True)


def draws(rank: int, num_steps: int = NUM_STEPS) -> list[Batch]:
    """Batches of a rank: those of group 1 have three samples, those of group 0 one."""
    size = 1 + 2 * (rank // GROUP_SIZE)
    samples = feature_samples(size * num_steps, rank)
    return [collate(samples[step * size : (step + 1) * size]) for step in range(num_steps)]


def num_samples(batch: Batch) -> int:
    return len(batch["labels"])


def num_tokens(batch: Batch) -> int:
    """Something to count that is in no fixed relation to the samples."""
    return int((batch["inputs"] > 0).sum())


def sum_over(model: nn.Module, batch: Batch, num_items: float) -> torch.Tensor:
    """Sum of the losses over `num_items`."""
    logits = model(batch["inputs"].to(next(model.parameters()).dtype))
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="sum") / num_items


def dtypes_of(tensors: State) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def make_mesh() -> FederationMesh:
    mesh = build_federation_mesh("cpu", FederationLayout(NUM_GROUPS, 2, {"dp_shard": 2}))
    guard.watch(mesh)
    return mesh


class Run:
    """One federated run on this rank."""

    def __init__(
        self,
        mesh: FederationMesh,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        max_grad_norm: float | None = None,
        **settings: Any,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.mesh = mesh
        self.model = fully_shard(model, mesh=mesh.fsdp)
        self.optimizer = optimizer([param for param in model.parameters() if param.requires_grad])
        config = FederationConfig(NUM_GROUPS, SYNC_EVERY, bucket_size_bytes=1024, **settings)
        self.rounds = Rounds(model, mesh, config, [self.optimizer], num_training_steps=NUM_STEPS)

    def train(self, step: int) -> Any:
        """One step; the metrics where a round has ended."""
        rank = dist.get_rank()
        members = range(rank // GROUP_SIZE * GROUP_SIZE, (rank // GROUP_SIZE + 1) * GROUP_SIZE)
        num_items: float = sum(num_samples(draws(member)[step]) for member in members)
        if self.rounds.synchronous:
            # Gradients are averaged over the groups: together they are those of one batch.
            num_items = sum(num_samples(draws(member)[step]) for member in range(NUM_RANKS)) / NUM_GROUPS
        batch = draws(rank)[step]
        loss = sum_over(self.model, batch, num_items)
        (loss * GROUP_SIZE).backward()  # FSDP2 takes the mean over the ranks of the group
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.rounds.step(loss.detach() * GROUP_SIZE, tokens=num_tokens(batch), samples=num_samples(batch))

    @torch.no_grad()
    def poison(self) -> None:
        """One of this rank's shards is not finite from here on."""
        next(self.model.parameters()).to_local().fill_(float("nan"))


def moments_of(run: Run) -> State:
    """The inner optimizer's moments, whole."""
    names = {id(param): name for name, param in run.model.named_parameters()}
    return {
        f"{names[id(param)]}/{key}": value.full_tensor()
        for param, state in run.optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, DTensor)
    }


def run_case(mesh: FederationMesh, settings: dict[str, Any], make: Callable[[], nn.Module] = double) -> dict[str, Any]:
    """Trains; a setting `poisoned` makes this group's weights NaN at the end of the first round."""
    poisoned = settings.get("poisoned")
    run = Run(mesh, make(), **{name: value for name, value in settings.items() if name != "poisoned"})
    found: dict[str, Any] = {"borders": [], "metrics": []}
    for step in range(NUM_STEPS):
        if step == 1 and poisoned == mesh.group_index:
            run.poison()
        metrics = run.train(step)
        if metrics is not None:
            found["borders"].append(full_state(run.model))
            found["metrics"].append(metrics)
    found["moments"] = moments_of(run)
    outer = run.rounds.averager.outer
    found["anchors"] = sum(anchor.numel() for anchor in outer.anchors.values())
    found["state"] = sum(
        value.numel() for state in (outer.optimizer.state.values() if outer.optimizer else ()) for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )  # fmt: skip
    found["elements"] = sum(shard.numel() for shard in run.rounds.averager.trained.averaged_shards().values())
    run.rounds.finish()
    guard.detach(run.rounds)
    return found


def run_cases(cases: dict[str, dict[str, Any]], make: Callable[[], nn.Module] = double) -> dict[str, dict[str, Any]]:
    """Body: all cases on one mesh."""
    mesh = make_mesh()
    return {name: run_case(mesh, settings, make) for name, settings in cases.items()}


def refer(make: Callable[[], nn.Module] = double, optimizer: Any = adamw, **changes: Any) -> ReferenceResult:
    torch.set_num_threads(1)
    batches = batches_by_step([draws(rank) for rank in range(NUM_RANKS)], NUM_GROUPS)
    return train_reference(make, batches, SYNC_EVERY, optimizer, loss=sum_over, count=num_samples, **changes)


def assert_matches(ranks: list[dict[str, Any]], result: ReferenceResult, tolerance: float = 1e-12) -> float:
    """All ranks hold the same bits, and these are the reference's but for rounding."""
    error, borders = 0.0, len(result.borders)
    for rank in ranks:
        assert len(rank["borders"]) == borders
        for state, first, expected in zip(rank["borders"], ranks[0]["borders"], result.border_states, strict=True):
            for name, tensor in state.items():
                assert torch.equal(tensor, first[name]), name
                if name in expected:
                    error = max(error, (tensor.double() - expected[name].double()).abs().max().item())
    print(f"largest difference {error:.1e}")
    assert error < tolerance, error
    return error

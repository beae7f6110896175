"""Runs that average beside their steps, on two groups of a small classifier with blocks, and the reference for them."""

from __future__ import annotations

import copy
from collections import deque
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
from .models import NUM_CLASSES, NUM_FEATURES
from .outer_runs import full_state, num_samples, sum_over
from .reference import State, weighted_average


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


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def draws(rank: int, num_ranks: int, num_steps: int = NUM_STEPS) -> list[Batch]:
    """Batches of a rank: those of group 1 have three samples, those of group 0 one."""
    size = 1 + 2 * (rank * NUM_GROUPS // num_ranks)
    samples = feature_samples(size * num_steps, rank)
    return [collate(samples[step * size : (step + 1) * size]) for step in range(num_steps)]


def make_mesh(with_slow_tier: bool = True, slow_backend: str | None = None, device: str = "cpu") -> FederationMesh:
    """Of 4 ranks FL+FSDP, of 8 ranks FL+HSDP."""
    replicas = dist.get_world_size() // 4
    layout = FederationLayout(NUM_GROUPS, replicas, {"dp_shard": 2})
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


class Outer:
    """An outer optimizer on whole tensors, stepped for some of them at a time."""

    def __init__(self, start: State, make: Callable[[Any], torch.optim.Optimizer] | None) -> None:
        self.anchors = {name: tensor.clone() for name, tensor in start.items()}
        self.optimizer = make(list(self.anchors.values())) if make else None

    def __call__(self, average: State) -> State:
        if self.optimizer is None:
            return average
        for name, anchor in self.anchors.items():
            anchor.grad = anchor - average[name] if name in average else None
        self.optimizer.step()
        return {name: self.anchors[name].detach().clone() for name in average}


def refer(
    num_ranks: int,
    *,
    periods: Sequence[int],
    delay: int,
    alpha: float = 0.0,
    fragments: Sequence[Collection[str]] | None = None,
    borders: Collection[int] = (),
    weighted: bool = False,
    outer: Callable[[Any], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    average: Callable[[Sequence[State], Sequence[float], State], State] | None = None,
    measured: list[tuple[float, float, float]] | None = None,
    make: Callable[[torch.dtype], nn.Module] = block_net,
) -> list[State]:
    """
    Delayed averaging on whole models in one process, one group after another; shares no code with the package. In a round
    each parameter makes one outer step: a border brings the others together, and leaves their anchors where they are.

    Args:
        num_ranks (`int`):
            Ranks whose batches are taken.
        periods (`Sequence[int]`):
            H of each round, the last for all that follow.
        delay (`int`):
            Steps between a snapshot and its outcome.
        alpha (`float`):
            The share of its own model that a group keeps.
        fragments (`Sequence`, *optional*):
            Names of the parameters of each.
        borders (`Collection[int]`):
            Steps after which a full border is made; the last step is one.
        weighted (`bool`):
            Whether groups count by samples.
        outer (`Callable`, *optional*):
            Makes an outer optimizer.
        dtype (`torch.dtype`):
            Of the model.
        optimizer (`Callable`):
            Makes an inner optimizer.
        average (`Callable`, *optional*):
            Forms the average of parts of the groups' models from them, their weights, and what the last outcome of all
            parameters was. By default it is exact.
        measured (`list`, *optional*):
            Takes, for each average in order: the mean over the groups of the squared distance to it, and the squared norms of it
            and of the pseudo-gradient.
        make (`Callable`):
            Makes the model; what does not train stays as it is.

    Returns:
        `list`: The model at each border.
    """
    torch.set_num_threads(1)
    size = num_ranks // NUM_GROUPS
    batches = [draws(rank, num_ranks) for rank in range(num_ranks)]
    models = [make(dtype)]
    models += [copy.deepcopy(models[0])]
    optimizers = [optimizer(model.parameters()) for model in models]
    names = [name for name, param in models[0].named_parameters() if param.requires_grad]
    parts = [list(part) for part in fragments] if fragments else [names]
    anchors = {name: models[0].get_parameter(name).detach().clone() for name in names}
    stepper = Outer(anchors, outer)
    flights: deque[tuple[int, list[str], list[State], list[float]]] = deque()
    seen = {index: [0.0] * NUM_GROUPS for index in range(len(parts))}
    to_come = set(names)
    found: list[State] = []
    steps, rounds = 0, 0

    def shares(index: int) -> list[float]:
        counts = seen[index] if weighted and sum(seen[index]) else [1.0] * NUM_GROUPS
        seen[index] = [0.0] * NUM_GROUPS
        return [count / sum(counts) for count in counts]

    def form(states: Sequence[State], weights: Sequence[float], turn: Collection[str] = names) -> State:
        mean = average(states, weights, anchors) if average else weighted_average(states, weights)
        stepped = {name: tensor for name, tensor in mean.items() if outer is None or name in turn}
        if measured is not None:
            drifts = [sum((state[name] - mean[name]).square().sum().item() for name in mean) for state in states]
            norms = [
                sum(part.square().sum().item() for part in parts)
                for parts in (mean.values(), (anchors[name] - tensor for name, tensor in stepped.items()))
            ]
            measured.append((sum(drifts) / len(drifts), norms[0], norms[1]))
        new = stepper(stepped)
        anchors.update({name: tensor.clone() for name, tensor in new.items()})
        return {**mean, **new}

    @torch.no_grad()
    def land() -> None:
        _, part, snapshots, weights = flights.popleft()
        new = form(snapshots, weights)
        for model, snapshot in zip(models, snapshots, strict=True):
            for name in part:
                held = model.get_parameter(name)
                held.add_((1 - alpha) * (new[name] - snapshot[name]).to(held.dtype))

    def snapshot(part: Collection[str]) -> list[State]:
        return [{name: model.get_parameter(name).detach().clone() for name in part} for model in models]

    for step in range(NUM_STEPS):
        for group, model in enumerate(models):
            members = batches[group * size : (group + 1) * size]
            items = sum(num_samples(member[step]) for member in members)
            for member in members:
                sum_over(model, member[step], items).backward()
            optimizers[group].step()
            optimizers[group].zero_grad()
            for counts in seen.values():
                counts[group] += items
        steps += 1
        period = periods[min(rounds, len(periods) - 1)]
        while flights and flights[0][0] <= step + 1:
            land()
        due = [index for index in range(len(parts)) if (index + 1) * period // len(parts) == steps]
        is_border = step + 1 in borders or step + 1 == NUM_STEPS
        if due:
            flights.append((step + 1 + delay, parts[due[0]], snapshot(parts[due[0]]), shares(due[0])))
            to_come -= set(parts[due[0]])
            if steps == period:
                steps, rounds, to_come = 0, rounds + 1, set(names)
        if is_border:
            just_started = len(parts) == 1 and bool(due)
            while flights:
                if just_started:
                    # Nothing was trained since: the average is the model.
                    _, part, states, weights = flights.popleft()
                    _take(models, form(states, weights))
                else:
                    land()
            if not just_started:
                weights = shares(len(parts) - 1)
                _take(models, form(snapshot(names), weights, to_come if steps else ()))
                rounds += steps > 0
            for index in seen:
                seen[index] = [0.0] * NUM_GROUPS
            steps, to_come = 0, set(names)
            found.append({name: param.detach().clone() for name, param in models[0].named_parameters()})
    return found


class Delayed:
    """
    Uniform averaging with a delay in [`train_reference`], whose borders are the full ones.

    Args:
        period (`int`):
            H.
        delay (`int`):
            Steps between a snapshot and its outcome.
        borders (`Collection[int]`):
            Steps after which a full border follows.
    """

    def __init__(self, period: int, delay: int, borders: Collection[int]) -> None:
        self.period = period
        self.delay = delay
        self.borders = borders
        self.steps = 0
        self.flights: list[tuple[int, list[State]]] = []
        self.landed: list[int] = []

    @torch.no_grad()
    def __call__(self, number: int, models: list[nn.Module]) -> None:
        self.steps += 1
        while self.flights and (self.flights[0][0] <= number or number in self.borders):
            _, states = self.flights.pop(0)
            mean = weighted_average(states, [1 / len(states)] * len(states))
            for model, state in zip(models, states, strict=True):
                for name, value in state.items():
                    model.get_parameter(name).add_((mean[name] - value).to(value.dtype))
            self.landed.append(number)
        if number in self.borders:
            self.steps = 0
        elif self.steps == self.period:
            self.steps = 0
            states = [{name: param.detach().clone() for name, param in model.named_parameters()} for model in models]
            self.flights.append((number + self.delay, states))


@torch.no_grad()
def _take(models: Sequence[nn.Module], new: State) -> None:
    for model in models:
        for name, value in new.items():
            model.get_parameter(name).copy_(value)

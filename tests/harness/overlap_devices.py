"""
Averaging beside the steps on devices with streams of their own: cases, what holds the streams up, and what must come of it
all the same. On CPU the same bodies run, and threads are held up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hf_fedshard.fragments import divide
from hf_fedshard.mesh import FederationMesh
from hf_fedshard.shards import persistent_buffers

from .models import NUM_CLASSES, NUM_FEATURES
from .overlap_reference import refer
from .overlap_runs import OverlapRun, block_net, make_mesh, nesterov, run_case
from .reference_groups import State
from .wire_reference import ShardedLossyAverage


BUCKET = 1024
# Of a kernel that does nothing: some hundredths of a second, many times a step of these models.
CYCLES = 40_000_000
HELD_UP = ("nobody", "worker", "steps")


@dataclass(frozen=True)
class Case:
    """
    A run of four ranks.

    Args:
        settings (`dict[str, Any]`):
            Of [`OverlapRun`].
        borders (`Collection[int]`):
            Steps after which a full border is made.
        num_replicas (`int`):
            In a group: 1 for FL+FSDP, 2 for FL+HSDP with shards of the whole.
        outer (`Callable`, *optional*):
            Makes the outer optimizer of the reference.
        has_reference (`bool`):
            Whether the reference is exact: not in bfloat16, where a device rounds its steps in a way of its own.
    """

    settings: dict[str, Any]
    borders: Collection[int] = ()
    num_replicas: int = 1
    outer: Callable[[Any], torch.optim.Optimizer] | None = None
    has_reference: bool = True

    def reference(self) -> list[State]:
        """The models at the borders, of one process on the CPU."""
        settings, fragments = self.settings, self.settings.get("num_fragments")
        sizes = {name: param.numel() for name, param in block_net().named_parameters()}
        lossy = settings.get("wire_format")
        return refer(
            4,
            periods=[settings["sync_every"]],
            delay=settings["overlap_steps"],
            borders=self.borders,
            fragments=divide(sizes, fragments) if fragments else None,
            outer=self.outer,
            average=ShardedLossyAverage(lossy, 2, self.num_replicas, 2 // self.num_replicas, BUCKET)
            if lossy
            else None,
        )


NESTEROV: dict[str, Any] = {"outer_optimizer": "nesterov"}
IN_THREE: dict[str, Any] = {"sync_every": 4, "overlap_steps": 4, "num_fragments": 3}
CASES = {
    "whole": Case({"sync_every": 3, "overlap_steps": 2}, (7,)),
    "outer optimizer": Case({"sync_every": 3, "overlap_steps": 1, **NESTEROV}, outer=nesterov),
    # The storage of a snapshot is written five times, while the last exchange may still be reading it if anything is amiss.
    "snapshots in turns": Case({"sync_every": 2, "overlap_steps": 2}),
    "all at once": Case(
        {**IN_THREE, **NESTEROV, "wire_format": "int8", "offload_outer_state": True}, (5, 7), outer=nesterov
    ),
    "codes beside the device": Case({"sync_every": 3, "overlap_steps": 2, "wire_format": "int4"}, (7,)),
    "bfloat16": Case(
        {"sync_every": 3, "overlap_steps": 2, "dtype": torch.bfloat16, "wire_format": "int8", **NESTEROV},
        (7,),
        has_reference=False,
    ),
    "replicas": Case({"sync_every": 3, "overlap_steps": 2}, (7,), num_replicas=2),
    "replicas in fragments": Case({**IN_THREE, "wire_format": "int8"}, (5,), num_replicas=2),
}


class Normed(nn.Module):
    """A classifier with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # A group of one sample has no variance.
        return self.head(self.norm(torch.cat([inputs, inputs.flip(0) + 1])))[: len(inputs)]


def stall(device: torch.device) -> None:
    """Holds up the stream that this thread launches on, or the thread where there are no streams."""
    if device.type == "cuda":
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(0.005)


@contextlib.contextmanager
def held_up(mesh: FederationMesh, whom: str) -> Iterator[None]:
    """
    Lets one of the two who work at a time be late, so that a wait that is missing between them shows in the values.

    Args:
        mesh ([`FederationMesh`]):
            With a slow tier.
        whom (`str`):
            `"worker"`: what it launches comes late, while it itself is done early. `"steps"`: so do the steps, and the
            copies behind them. `"nobody"`.
    """
    (tier,) = mesh.slow_tiers
    worker, train = tier.worker, OverlapRun.train
    submit = worker.submit

    def submit_late(job: Callable[[], Any]) -> Any:
        def late() -> Any:
            stall(mesh.device)
            return job()

        return submit(late)

    def train_late(run: OverlapRun, step: int) -> torch.Tensor:
        stall(mesh.device)
        return train(run, step)

    with contextlib.ExitStack() as stack:
        if whom == "worker":
            stack.enter_context(mock.patch.object(worker, "submit", submit_late))
        elif whom == "steps":
            stack.enter_context(mock.patch.object(OverlapRun, "train", train_late))
        yield


def check_cases(device: str, slow_backend: str | None, names: Collection[str] = tuple(CASES)) -> dict[str, float]:
    """
    Body of four ranks: each case is the reference, and the same bits whoever is late.

    Args:
        device (`str`):
            `"cuda"` or `"cpu"`.
        slow_backend (`str`, *optional*):
            `"nccl"`, `"gloo"`, or that of the device.
        names (`Collection[str]`):
            Of the cases.

    Returns:
        `dict[str, float]`: For each case with a reference the largest difference from it.
    """
    meshes: dict[int, FederationMesh] = {}
    errors = {}
    for name in names:
        case = CASES[name]
        if case.num_replicas not in meshes:
            meshes[case.num_replicas] = make_mesh(True, slow_backend, device, case.num_replicas)
        mesh = meshes[case.num_replicas]
        runs = []
        for whom in HELD_UP:
            with held_up(mesh, whom):
                settings = {**case.settings, "slow_backend": slow_backend}
                runs.append(run_case(mesh, settings, case.borders)["borders"])
        for whom, run in zip(HELD_UP[1:], runs[1:], strict=True):
            for number, (state, first) in enumerate(zip(run, runs[0], strict=True)):
                for key, tensor in state.items():
                    assert torch.equal(tensor, first[key]), f"{name}: {key} at border {number} with late {whom}"
        if case.has_reference:
            error = 0.0
            for state, expected in zip(runs[0], case.reference(), strict=True):
                error = max(
                    error, *((state[key].cpu() - tensor).abs().max().item() for key, tensor in expected.items())
                )
            assert error < 1e-10, f"{name}: {error}"
            errors[name] = error
    return errors


def check_buffers(device: str, slow_backend: str | None) -> None:
    """
    Body of four ranks: statistics take the average of all ranks' snapshots, whoever is late.

    Args:
        device (`str`):
            `"cuda"` or `"cpu"`.
        slow_backend (`str`, *optional*):
            See [`check_cases`].
    """
    mesh = make_mesh(True, slow_backend, device, 1)
    for whom in HELD_UP:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Normed().double()
        with held_up(mesh, whom):
            run = OverlapRun(mesh, model=model, sync_every=3, overlap_steps=2, slow_backend=slow_backend)
            for step in range(5):
                loss = run.train(step)
                if step == 2:
                    own = {name: buffer.cpu().clone() for name, buffer in persistent_buffers(run.model).items()}
                run.rounds.step(loss)
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
            held = persistent_buffers(run.model)
            for name in ("norm.running_mean", "norm.running_var"):
                mean = torch.stack([each[name] for each in everyone]).mean(0)
                torch.testing.assert_close(held[name].cpu(), mean, rtol=1e-12, atol=0, msg=f"{name} with late {whom}")
            assert held["norm.num_batches_tracked"].item() == 5
            run.release()

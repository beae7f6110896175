"""What averaging beside the steps holds in memory, and that its start does not wait for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fedshard import guard
from hf_fedshard.residuals import Residuals
from hf_fedshard.slow_tier import SlowTierWorker
from hf_fedshard.snapshots import Snapshots
from tests.harness.live_memory import LiveMemory
from tests.harness.overlap_runs import OverlapRun, make_mesh, run_case
from tests.harness.pool import WorkerPool


WIDTH, DEPTH, SLACK = 64, 4, 4096
NUM_ELEMENTS = DEPTH * WIDTH * WIDTH // 2
"""Of a rank's shards."""


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).to(dtype)


def live_bytes(settings: dict[str, Any]) -> dict[str, list[int]]:
    """Body: bytes beside the model that are alive while an exchange is in flight, between two, and when the run has ended."""
    run = OverlapRun(make_mesh(), model=layers(), **{"sync_every": 4, "overlap_steps": 2, **settings})
    memory, submit = LiveMemory(), SlowTierWorker.submit
    found: dict[str, list[int]] = {"in flight": [], "between": [], "end": []}

    def watched(worker: SlowTierWorker, job: Callable[[], Any]) -> Any:
        def look() -> Any:
            with memory:
                return job()

        future = submit(worker, look)
        future.exception()  # one thread after another uses the watch
        return future

    with mock.patch.object(SlowTierWorker, "submit", watched), memory:
        for _ in range(16):
            with torch.no_grad():
                for param in run.model.parameters():
                    param.to_local().add_(0.01)  # type: ignore[attr-defined]
            run.rounds.step()
            assert run.rounds.overlap is not None
            found["in flight" if run.rounds.overlap.in_flight else "between"].append(memory.alive_bytes)
        run.rounds.finish()
        found["end"].append(memory.alive_bytes)
    guard.detach(run.rounds)
    return found


@pytest.mark.parametrize("settings", [{}, {"num_fragments": 2, "overlap_steps": 1}], ids=["whole", "fragments"])
def test_memory_beside_the_steps(world4: WorkerPool, settings: dict[str, Any]) -> None:
    """The figures of docs/overlap.md: 4 bytes an element are kept, and as much again for what is in flight."""
    in_flight = 8 if "num_fragments" not in settings else 6  # one of two fragments at a time
    for rank in world4.run(live_bytes, settings):
        # From the second round on: all that is kept has been made.
        for found, stated in ((rank["in flight"][4:], in_flight), (rank["between"][4:], 4), (rank["end"], 0)):
            assert found
            for size in found:
                assert abs(size - stated * NUM_ELEMENTS) < SLACK, (stated, size / NUM_ELEMENTS)


def taken_in(settings: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Body: a run whose outcomes are taken in all at once, and parameter by parameter."""
    mesh, turns = make_mesh(), Snapshots._turns

    def alone(*args: Any) -> list[list[str]]:
        return [[name] for names in turns(*args) for name in names]

    found = [run_case(mesh, settings)["borders"][-1]]
    with mock.patch.object(Snapshots, "_turns", alone):
        found.append(run_case(mesh, settings)["borders"][-1])
    return found


@pytest.mark.parametrize("outer", ["fedavg", "nesterov"])
def test_an_outcome_may_come_parameter_by_parameter(world4: WorkerPool, outer: str) -> None:
    """As it does where it was exchanged in host memory."""
    settings = {"dtype": torch.float32, "sync_every": 3, "overlap_steps": 2, "outer_optimizer": outer}
    for first, second in world4.run(taken_in, settings):
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


class Reads(TorchDispatchMode):
    """Notes what reads a floating-point value, for which a device would be waited for. Meshes of ranks are on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero") and args[0].is_floating_point():
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def started(settings: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Body: reads of the thread that trains, and the weights that groups were given by their updates."""
    mesh = make_mesh()
    run = OverlapRun(
        mesh, sync_every=4, overlap_steps=2, group_weights="steps", outer_optimizer="nesterov", **settings
    )
    weights = []
    with Reads() as reads:
        for step in range(8):
            # As a fused optimizer under a gradient scaler: group 1 skips every fourth step, and only the device knows.
            skipped = torch.tensor(float(step % 4 == 0 and mesh.group_index == 1))
            run.rounds.note_optimizer_step(skipped)
            metrics = run.rounds.step(torch.ones(()))
            weights += [metrics.weights[1]] if metrics else []
    run.rounds.overlap.discard()  # type: ignore[union-attr]
    run.release()
    return reads.names, weights


@pytest.mark.parametrize("settings", [{}, {"num_fragments": 2}, {"wire_format": "int8"}], ids=str)
def test_a_start_reads_nothing_from_the_device(world4: WorkerPool, settings: dict[str, Any]) -> None:
    for names, weights in world4.run(started, settings):
        assert not names
        assert weights == [0.75]


def cuts(settings: dict[str, Any]) -> list[int]:
    """Body: how often residuals were cut anew, up to the first exchange and after it."""
    run = OverlapRun(make_mesh(), model=layers(torch.bfloat16), sync_every=3, overlap_steps=1, **settings)
    cut, counts = Residuals._cut, []

    def counted(residuals: Residuals, *args: Any) -> torch.Tensor:
        counts.append(threading.get_ident())
        return cut(residuals, *args)

    found = []
    with mock.patch.object(Residuals, "_cut", counted):
        for step in range(10):
            with torch.no_grad():
                for param in run.model.parameters():
                    param.to_local().add_(0.01 * (1 + run.mesh.group_index))  # type: ignore[attr-defined]
            run.rounds.step()
            if step in (4, 7):
                run.rounds.close()
            found.append(len(counts))
        run.rounds.finish()
        guard.detach(run.rounds)
    return [found[3], len(counts)]


@pytest.mark.parametrize("num_fragments", [1, 2])
@pytest.mark.parametrize("outer", [{}, {"outer_optimizer": "nesterov"}], ids=str)
def test_borders_use_the_residuals_of_the_exchanges(
    world4: WorkerPool, outer: dict[str, Any], num_fragments: int
) -> None:
    for first, last in world4.run(cuts, {"wire_format": "int8", "num_fragments": num_fragments, **outer}):
        assert first == last > 0

"""Outer state in host memory: the same bits, and how much a border takes on the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fedshard import outer_checkpoint, outer_memory
from hf_fedshard.averaging import ModelAverager
from hf_fedshard.checkpoint_layout import OUTER_FOLDER
from hf_fedshard.config import FederationConfig
from hf_fedshard.mesh import FederationMesh
from hf_fedshard.outer import OuterLoop
from hf_fedshard.simulation import Simulation
from tests.harness.live_memory import LiveMemory
from tests.harness.outer_runs import adamw, dtypes_of, run_case, single
from tests.harness.outer_runs import make_mesh as make_mesh_of_8
from tests.harness.pool import WorkerPool
from tests.test_exchange import make_mesh


# Options of the outer loop, and what a border may take on the device in buckets and in shards of the largest parameter.
# docs/wire.md has these figures.
STATED: dict[str, tuple[dict[str, Any], float, float]] = {
    "fedavg": ({}, 2, 0),
    "fedavg bf16": ({"wire_format": "bf16"}, 4.5, 0),
    "fedavg int8": ({"wire_format": "int8"}, 3.4, 0),
    "fedavg int4": ({"wire_format": "int4"}, 3.1, 0),
    "nesterov": ({"outer_optimizer": "nesterov"}, 2, 3),
    "fedadam": ({"outer_optimizer": "fedadam"}, 2, 5),
    "nesterov int8": ({"outer_optimizer": "nesterov", "wire_format": "int8"}, 3.4, 3),
}
BUCKET, WIDTH = 64 * 1024, 256


def border_memory(sizes: tuple[int, int, int], device: str = "cpu") -> dict[str, tuple[int, int]]:
    """Body: peak of memory on the device at the second border, with outer state in host memory and beside the parameters."""
    mesh = make_mesh(sizes, device)
    found = {}
    for name, (settings, *_) in STATED.items():
        peaks = [_second_border(mesh, {**settings, "offload_outer_state": offload}) for offload in (True, False)]
        found[name] = peaks[0], peaks[1]
    return found


def _second_border(mesh: FederationMesh, settings: dict[str, Any]) -> int:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).to(mesh.device)
    fully_shard(model, mesh=mesh.fsdp)
    averager = ModelAverager(model, mesh, FederationConfig(2, bucket_size_bytes=BUCKET, **settings), [])
    peak = 0
    for number in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.01 * (mesh.group_index + number + 1))
        held = averager.tensors.collect()
        if mesh.device.type == "cpu":
            with LiveMemory() as memory:
                averager.average(held, [1.0, 1.0], ())
            peak = memory.peak_bytes
        else:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            averager.average(held, [1.0, 1.0], ())
            peak = torch.cuda.max_memory_allocated() - before
    return peak


@pytest.mark.parametrize("sizes", [(2, 1, 2)], ids=str)
def test_memory_of_a_border(sizes: tuple[int, int, int], device: str, world4: WorkerPool) -> None:
    shard = 4 * WIDTH * WIDTH // sizes[2]
    for rank in world4.run(border_memory, sizes, device, limit_seconds=120):
        for name, (_, buckets, shards) in STATED.items():
            offloaded, beside = rank[name]
            if device == "cuda" and buckets > 2:
                buckets += 1  # a piece of the anchor, or a residual, is brought there
            stated = max(buckets * BUCKET, shards * shard)
            assert 0.9 * stated < offloaded <= stated * 1.02 + 8192, (name, offloaded / BUCKET, offloaded / shard)
            if "fedavg" not in name and "int" not in name:
                assert beside <= offloaded, "what is brought to the device is there already without offload"


OFFLOADED = {
    "fedavg": {},
    "proximal": {"proximal_mu": 0.5},
    "nesterov": {"outer_optimizer": "nesterov", "outer_max_norm": 0.05},
    "fedadagrad": {"outer_optimizer": "fedadagrad"},
    "fedyogi": {"outer_optimizer": "fedyogi", "proximal_mu": 0.1},
    "NAdam": {"outer_optimizer": "NAdam"},
    "ASGD": {"outer_optimizer": "ASGD"},
    "int4": {"outer_optimizer": "AdamW", "wire_format": "int4", "group_weights": "samples"},
    "poisoned": {"outer_optimizer": "RMSprop", "wire_format": "int8", "poisoned": 0},
}


def both_ways() -> dict[str, bool]:
    """Body: whether runs with and without offload hold the same bits at every border."""
    mesh, found = make_mesh_of_8(), {}
    for name, settings in OFFLOADED.items():
        first, second = (
            run_case(mesh, {**settings, "offload_outer_state": offload}, single) for offload in (False, True)
        )
        found[name] = all(
            torch.equal(tensor, other[key])
            for state, other in zip(first["borders"], second["borders"], strict=True)
            for key, tensor in state.items()
        )
        assert (first["anchors"], first["state"]) == (second["anchors"], second["state"])
    return found


def test_offload_changes_no_bit(world8: WorkerPool) -> None:
    for rank in world8.run(both_ways, limit_seconds=240):
        assert rank == dict.fromkeys(OFFLOADED, True)


@pytest.mark.parametrize("name", ["nesterov", "fedyogi", "Adagrad", "NAdam", "Rprop"])
def test_one_by_one_is_all_at_once(name: str) -> None:
    """As it is done with pseudo-gradients that lie in host memory, and anchors that do not."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in (7, 33)]
    found = []
    for alone in (False, True):
        outer = OuterLoop(FederationConfig(2, outer_optimizer=name))
        shards = {str(number): tensor.clone() for number, tensor in enumerate(start)}
        outer.restart(shards)
        assert outer.optimizer is not None
        for number in range(3):
            gradients = {key: 0.1 * (number + 1) * shard.sin() for key, shard in shards.items()}
            for key, gradient in gradients.items():
                if alone:
                    outer.memory.step(outer.optimizer, outer.anchors[key], gradient)
                else:
                    outer.anchors[key].grad = gradient
            if not alone:
                outer.optimizer.step()
            assert all(anchor.grad is None for anchor in outer.anchors.values()) == alone
        assert outer.optimizer.param_groups[0]["params"] == list(outer.anchors.values())
        found.append(outer)
    for key, anchor in found[0].anchors.items():
        assert torch.equal(anchor, found[1].anchors[key])
        assert not torch.equal(anchor, start[int(key)])
        for one, other in zip(*(outer.optimizer.state[outer.anchors[key]].values() for outer in found), strict=True):  # type: ignore[union-attr]
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nesterov", "Adagrad", "AdamW"])
def test_outer_state_is_in_pinned_host_memory(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    results = []
    for offload in (False, True):
        outer = OuterLoop(FederationConfig(2, outer_optimizer=name, offload_outer_state=offload))
        shards = {"a": torch.ones(7, 3, device="cuda"), "b": torch.ones(5, device="cuda", dtype=torch.bfloat16)}
        outer.restart(shards)
        for number in range(3):
            means = outer.means(shards)
            for mean in means.values():
                mean.add_(0.1 * (number + 1))
            dtypes = dtypes_of(shards)
            norm = outer.form_pseudo_gradients(means, dtypes, dict.fromkeys(shards, 1)) ** 0.5
            outer.step(means, shards, dtypes, norm)
        assert outer.optimizer is not None
        held = [*outer.anchors.values()]
        for anchor in outer.anchors.values():
            held += [value for value in outer.optimizer.state[anchor].values() if value.shape == anchor.shape]
        if offload:
            assert all(tensor.is_pinned() for tensor in held)
        results.append(shards)
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_what_a_checkpoint_brings_back_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies go to the device of the parameter, here one without memory; the anchor, in host memory, says nothing of it."""
    outer = OuterLoop(
        FederationConfig(2, outer_optimizer="AdamW", outer_options="amsgrad=True", offload_outer_state=True)
    )
    outer.restart({"weight": torch.ones(3, 2)})
    averager: Any = SimpleNamespace(outer=outer, model=nn.Linear(2, 3, bias=False, device="meta"))
    asked = []

    def empty_on_host(like: torch.Tensor, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        asked.append(pinned)
        return torch.zeros(like.shape, dtype=dtype)

    monkeypatch.setattr(outer_memory, "empty_on_host", empty_on_host)
    # The second moment's maximum is of an option that the run which was saved did not have.
    stored = {f"weight/{key}": torch.empty(3, 2) for key in ("exp_avg", "exp_avg_sq", "rest")}
    monkeypatch.setattr(outer_checkpoint, "stored_tensors", lambda folder: {**stored, "weight/step": torch.empty(())})
    monkeypatch.setattr(outer_checkpoint, "load_tensors", lambda wanted, folder: None)
    monkeypatch.setattr(outer_checkpoint, "as_sharded", lambda shard, param: shard)
    (tmp_path / OUTER_FOLDER).mkdir(parents=True)
    outer_checkpoint._read(tmp_path, {"on_cpu": ["step"]}, averager, inside=False)
    assert outer.optimizer is not None
    state = outer.optimizer.state[outer.anchors["weight"]]
    assert set(state) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"} and "weight" in outer.apart.remainders
    assert asked == [True] * 4


@pytest.mark.parametrize(
    ("settings", "holds_something"),
    [
        ({}, False),
        ({"outer_optimizer": "nesterov"}, True),
        ({"proximal_mu": 0.1}, True),
        ({"wire_format": "bf16"}, True),
    ],
)
def test_offload_of_nothing_is_told(
    settings: dict[str, Any], holds_something: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    config = FederationConfig(3, offload_outer_state=True, **settings)
    simulation = Simulation(single(), config, adamw)
    told = ["has nothing to move" in record.getMessage() for record in caplog.records]
    assert told == ([] if holds_something else [True]), "once"
    assert bool(simulation.groups[0].rounds.averager.outer.anchors) == holds_something

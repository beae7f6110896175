"""Averaging beside the training steps through lossy wire formats, whole and in fragments, and with outer state in host memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from hf_fedshard.fragments import divide
from tests.harness.overlap_reference import refer
from tests.harness.overlap_runs import block_net, make_mesh, nesterov, run_case, run_cases
from tests.harness.pool import WorkerPool
from tests.harness.wire_reference import ShardedLossyAverage
from tests.test_overlap import assert_reference


BUCKET = 1024
WHOLE = {"sync_every": 3, "overlap_steps": 2}
IN_TWO = {"sync_every": 4, "overlap_steps": 2, "num_fragments": 2}
IN_THREE = {"sync_every": 4, "overlap_steps": 4, "num_fragments": 3}
NESTEROV = {"outer_optimizer": "nesterov"}

# Settings, borders on demand. 11 steps.
CASES: dict[str, tuple[dict[str, Any], Collection[int]]] = {
    "bf16": ({**WHOLE, "wire_format": "bf16"}, (7,)),
    "int8": ({**WHOLE, "wire_format": "int8"}, (6,)),
    "int4": ({**WHOLE, "wire_format": "int4", **NESTEROV}, (7,)),
    "int8 alpha": ({**WHOLE, "wire_format": "int8", "overlap_alpha": 0.5}, ()),
    "bf16 fragments": ({**IN_TWO, "wire_format": "bf16", **NESTEROV}, ()),
    "int8 fragments": ({**IN_TWO, "wire_format": "int8"}, (6,)),
    "int4 fragments": ({**IN_TWO, "wire_format": "int4", "group_weights": "samples"}, (6,)),
    "int8 several in flight": ({**IN_THREE, "wire_format": "int8", **NESTEROV, "offload_outer_state": True}, (5, 7)),
}
HYBRID = ("int4", "int8 fragments", "int8 several in flight")


def expected(name: str, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """The same steps, delays and codes on whole models in one process."""
    settings, borders = CASES[name]
    sizes = {name: param.numel() for name, param in block_net().named_parameters()}
    fragments = settings.get("num_fragments")
    return refer(
        num_ranks,
        periods=[settings["sync_every"]],
        delay=settings["overlap_steps"],
        alpha=settings.get("overlap_alpha", 0.0),
        fragments=divide(sizes, fragments) if fragments else None,
        borders=borders,
        weighted="group_weights" in settings,
        outer=nesterov if "outer_optimizer" in settings else None,
        average=ShardedLossyAverage(settings["wire_format"], 2, num_ranks // 4, 2, BUCKET),
    )


@pytest.fixture(scope="module")
def flat(world4: WorkerPool) -> list[dict[str, dict[str, Any]]]:
    return world4.run(run_cases, CASES, limit_seconds=200)


@pytest.fixture(scope="module")
def hybrid(world8: WorkerPool) -> list[dict[str, dict[str, Any]]]:
    return world8.run(run_cases, {name: CASES[name] for name in HYBRID}, limit_seconds=200)


@pytest.mark.parametrize("name", CASES)
def test_fl_fsdp_is_the_reference(flat: list[dict[str, dict[str, Any]]], name: str) -> None:
    assert_reference([rank[name] for rank in flat], expected(name, 4), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRID)
def test_fl_hsdp_is_the_reference(hybrid: list[dict[str, dict[str, Any]]], name: str) -> None:
    assert_reference([rank[name] for rank in hybrid], expected(name, 8), 1e-12)


def both_ways() -> list[dict[str, torch.Tensor]]:
    """Body: a run in single precision with outer state beside the parameters, and in host memory."""
    mesh = make_mesh()
    settings = {**IN_TWO, **NESTEROV, "wire_format": "int8", "proximal_mu": 0.1, "dtype": torch.float32}
    return [run_case(mesh, {**settings, "offload_outer_state": held})["borders"][-1] for held in (False, True)]


def test_offload_changes_no_bit(world4: WorkerPool) -> None:
    for first, second in world4.run(both_ways, limit_seconds=100):
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())

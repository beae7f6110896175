"""LoRA adapters averaged beside the training steps, as they are and in codes, whole and in fragments."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import pytest
import torch

from hf_fedshard.fragments import divide, trained_sizes
from tests.harness.overlap_reference import refer
from tests.harness.overlap_runs import lora_net, make_mesh, nesterov, run_case
from tests.harness.pool import WorkerPool
from tests.harness.wire_reference import ShardedLossyAverage
from tests.test_overlap import assert_reference


BUCKET = 1024
WHOLE: dict[str, Any] = {"sync_every": 3, "overlap_steps": 2}
IN_THREE: dict[str, Any] = {"sync_every": 4, "overlap_steps": 4, "num_fragments": 3}

# Settings, borders on demand. 11 steps.
CASES: dict[str, tuple[dict[str, Any], Collection[int]]] = {
    "factors": (WHOLE, (7,)),
    "codes": ({**WHOLE, "wire_format": "int8"}, (7,)),
    "codes in fragments": ({**IN_THREE, "wire_format": "int8", "outer_optimizer": "nesterov"}, ()),
    "second factors": ({**WHOLE, "wire_format": "int8", "lora_average": "freeze_a", "overlap_alpha": 0.25}, (6,)),
}


def runs() -> dict[str, Any]:
    """Body: all cases."""
    mesh = make_mesh()
    return {name: run_case(mesh, {**case, "model": lora_net()}, borders) for name, (case, borders) in CASES.items()}


@pytest.fixture(scope="module")
def flat(world4: WorkerPool) -> list[dict[str, Any]]:
    return world4.run(runs, limit_seconds=200)


@pytest.mark.parametrize("name", CASES)
def test_is_the_reference(flat: list[dict[str, Any]], name: str) -> None:
    settings, borders = CASES[name]
    model = lora_net(with_a=settings.get("lora_average") != "freeze_a")
    trained = [key for key, param in model.named_parameters() if param.requires_grad]
    fragments = settings.get("num_fragments")
    expected = refer(
        4,
        periods=[settings["sync_every"]],
        delay=settings["overlap_steps"],
        alpha=settings.get("overlap_alpha", 0.0),
        fragments=[names & set(trained) for names in divide(trained_sizes(model, trained), fragments)]
        if fragments
        else None,
        borders=borders,
        outer=nesterov if "outer_optimizer" in settings else None,
        average=ShardedLossyAverage(settings["wire_format"], 2, 1, 2, BUCKET) if "wire_format" in settings else None,
        make=partial(lora_net, with_a=settings.get("lora_average") != "freeze_a"),
    )
    assert_reference([rank[name] for rank in flat], expected, 1e-12)
    frozen = {key: param for key, param in model.named_parameters() if key not in trained}
    for rank in flat:
        for state in rank[name]["borders"]:
            assert all(torch.equal(state[key], param) for key, param in frozen.items()), "the base stays"


def test_only_adapters_travel(flat: list[dict[str, Any]]) -> None:
    elements = sum(param.numel() for param in lora_net().parameters() if param.requires_grad)
    for rank in flat:
        sent = {name: rank[name]["metrics"][0].bytes_sent for name in CASES}
        assert sent["factors"] == 8 * elements
        assert sent["codes"] < 0.5 * sent["factors"]

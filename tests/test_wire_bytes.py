"""A lossy format that saves nothing is told at the start."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hf_fedshard.config import FederationConfig
from hf_fedshard.simulation import Simulation
from tests.harness.outer_runs import adamw
from tests.harness.overlap_runs import block_net


def started(num_groups: int, **settings: Any) -> Simulation:
    torch.set_num_threads(1)
    return Simulation(block_net(torch.float32), FederationConfig(num_groups, 4, **settings), adamw)


@pytest.mark.parametrize(
    ("num_groups", "settings", "is_told"),
    [
        (2, {"wire_format": "int8"}, False),  # 378 elements, padded to 384
        (32, {"wire_format": "int8"}, True),  # to 2048
        (2, {"wire_format": "int8", "overlap_steps": 1, "num_fragments": 4}, False),
        (8, {"wire_format": "int8", "overlap_steps": 1, "num_fragments": 4}, True),  # to 512 in each fragment
        (16, {"wire_format": "bf16"}, False),
    ],
)
def test_padding_that_eats_up_what_is_saved(
    num_groups: int, settings: dict[str, Any], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_fedshard"):
        simulation = started(num_groups, **settings)
    told = [record.getMessage() for record in caplog.records if "saves nothing here" in record.getMessage()]
    assert len(told) == is_told, "once, by the main rank, or not at all"
    sent = []
    for _ in range(6):
        for group in simulation.groups:
            group.count_step()
        metrics = simulation.step()
        sent += [metrics.bytes_sent] if metrics is not None else []
    elements = sum(param.numel() for param in simulation.model.parameters())
    plain = 2 * 4 * elements * (num_groups - 1) // num_groups
    assert (sent[0] >= plain) == is_told
    if is_told:
        assert f"sends {sent[0]} bytes in a round, and would send {plain} in fp32" in told[0]
        assert ("num_fragments=4" in told[0]) == ("num_fragments" in settings)

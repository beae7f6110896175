"""What cannot be combined with averaging beside the steps says so at start."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fedshard import FederationConfig
from hf_fedshard.slow_tier import SlowTier


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"overlap_steps": -1}, "overlap_steps must be an integer of at least 0, but got -1"),
    "no integer": ({"overlap_steps": True}, "overlap_steps must be an integer of at least 0, but got True"),
    "above a period": ({"overlap_steps": 9}, "overlap_steps=9 must be 8 or less with a shortest period of 8"),
    "in a list": (
        {"overlap_steps": 5, "sync_every": "16x2,4x3,*2"},
        "overlap_steps=5 must be 4 or less with a shortest period of 4",
    ),
    "by drift": (
        {"overlap_steps": 2, "sync_every": "drift", "max_drift": 0.1, "min_sync_every": 2},
        r"overlap_steps=2 must be 1 or less with a shortest period of 2 \(min_sync_every=2\)",
    ),
    "auto": ({"overlap_steps": 2, "sync_every": "auto", "min_sync_every": 4}, "sync_every='auto' cannot be used with"),
    "moments": ({"overlap_steps": 1, "inner_moments": "average"}, "inner_moments='average' cannot be used with"),
    "products": ({"overlap_steps": 1, "lora_average": "product"}, "lora_average='product' cannot be used with"),
    "alpha": ({"overlap_steps": 1, "overlap_alpha": 1.0}, "overlap_alpha must be a number of at least 0 and below 1"),
    "alpha alone": ({"overlap_alpha": 0.5}, "overlap_alpha=0.5 is for averaging beside the steps. Set overlap_steps"),
    "fragments alone": ({"num_fragments": 2}, "num_fragments=2 is for averaging beside the steps"),
    "no fragment": ({"overlap_steps": 1, "num_fragments": 0}, "num_fragments must be an integer of at least 1"),
    "many fragments": (
        {"overlap_steps": 1, "num_fragments": 9},
        "num_fragments=9 must not be above the shortest period, which is 8",
    ),
    "fragments by drift": (
        {"overlap_steps": 1, "num_fragments": 2, "sync_every": "drift", "max_drift": 0.1, "min_sync_every": 2},
        "sync_every='drift' cannot be used with overlap_steps=1, num_fragments=2",
    ),
    "fragments clipped": (
        {"overlap_steps": 1, "num_fragments": 2, "outer_max_norm": 1.0},
        "outer_max_norm=1.0 cannot be used with",
    ),
    "fragments weighed by a function": (
        {"overlap_steps": 1, "num_fragments": 2, "group_weights": lambda counts: [1.0] * len(counts)},
        "group_weights=.*lambda.* cannot be used with",
    ),
    "backend": ({"slow_backend": "mpi"}, "slow_backend must be one of gloo, nccl, or unset, but got 'mpi'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    settings, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        FederationConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_steps": 8},
        {"overlap_steps": 3, "sync_every": "4x2,8"},
        {"overlap_steps": 3, "sync_every": "drift", "max_drift": 0.1, "min_sync_every": 4},
        {"overlap_steps": 7, "num_fragments": 8, "overlap_alpha": 0.5, "outer_optimizer": "nesterov"},
        {"overlap_steps": 1, "inner_moments": "reset", "lora_average": "freeze_a", "proximal_mu": 0.1},
        {"slow_backend": "gloo"},
    ],
)
def test_allowed(settings: dict[str, Any]) -> None:
    FederationConfig(**settings)


def test_nccl_needs_gpus() -> None:
    unused: Any = None
    with pytest.raises(ValueError, match="slow_backend='nccl' needs NVIDIA GPUs, but this run trains on cpu"):
        SlowTier(unused, "cpu", "nccl")

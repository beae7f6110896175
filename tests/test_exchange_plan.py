"""The bucket planner, for any sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_fedshard.exchange_plan import plan_exchange
from hf_fedshard.layout import FederationLayout


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


# On a loaded machine the time of one example says nothing.
@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(DTYPES)), max_size=12),
    capacity=st.integers(1, 1000),
    replicas=st.integers(1, 5),
)
def test_plan_covers_each_element_once(sizes: list[tuple[int, torch.dtype]], capacity: int, replicas: int) -> None:
    tensors = {str(i): torch.empty(numel, dtype=dtype, device="meta") for i, (numel, dtype) in enumerate(sizes)}
    layout = FederationLayout(2, replicas, {"dp_shard": 2})
    mesh: Any = SimpleNamespace(layout=layout, fed=None, replicate=None)
    plan = plan_exchange(tensors, mesh, capacity)
    covered = dict.fromkeys(tensors, 0)
    order: dict[torch.dtype, list[int]] = {}
    for bucket in plan.buckets:
        used = 0
        for piece in bucket.pieces:
            assert piece.start == covered[piece.name] < piece.stop
            assert piece.offset == used
            covered[piece.name] = piece.stop
            used += piece.stop - piece.start
            assert bucket.dtype == torch.promote_types(tensors[piece.name].dtype, torch.float32)
            order.setdefault(bucket.dtype, []).append(int(piece.name))
        assert used <= bucket.numel < used + replicas
        assert bucket.numel % replicas == 0
        assert bucket.numel * bucket.dtype.itemsize <= max(capacity, replicas * bucket.dtype.itemsize)
    assert covered == {name: tensor.numel() for name, tensor in tensors.items()}
    assert all(names == sorted(names) for names in order.values())

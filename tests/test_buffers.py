"""Buffers of any dtype and shape: they are handed on at the start, averaged or taken from rank 0 at borders, and stored."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_fedshard.shards import persistent_buffers
from tests.harness.overlap_runs import OverlapRun, block_net, make_mesh
from tests.harness.pool import WorkerPool


FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
CONSTANTS = ("bool", "complex64", "complex128")
SHAPES = {"scalar": (), "empty": (0, 2), "row": (1, 3)}


def fill(buffers: dict[str, torch.Tensor], value: int) -> None:
    for buffer in buffers.values():
        buffer.copy_(torch.full(buffer.shape, value).to(buffer.dtype))


def copies(buffers: dict[str, torch.Tensor]) -> dict[str, list[complex]]:
    return {name: buffer.to(torch.complex128).reshape(-1).tolist() for name, buffer in buffers.items()}


def odd_buffers(overlap_steps: int) -> list[dict[str, list[complex]]]:
    """Body: the buffers at the start, and when the first round's average was taken in, after `2 + overlap_steps` steps."""
    model, rank = block_net(), dist.get_rank()
    for dtype in (*FLOATS, *INTEGERS, *CONSTANTS):
        for shape, sizes in SHAPES.items():
            model.register_buffer(f"{dtype}_{shape}", torch.zeros(sizes, dtype=getattr(torch, dtype)))
    fill(dict(model.named_buffers()), rank + 1)
    run = OverlapRun(make_mesh(), model=model, sync_every=2, overlap_steps=overlap_steps)
    buffers = persistent_buffers(run.model)
    found = [copies(buffers)]
    for step in range(2 + overlap_steps):
        run.train(step)
        # What is counted meanwhile comes on top.
        fill(buffers, rank + step + 1)
        run.rounds.step()
    found.append(copies(buffers))
    run.release()
    found.append(copies(buffers))
    return found


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_of_any_dtype_and_shape(world4: WorkerPool, overlap_steps: int) -> None:
    for rank, (start, taken_in, end) in enumerate(world4.run(odd_buffers, overlap_steps)):
        for shape, sizes in SHAPES.items():
            numel = torch.Size(sizes).numel()
            for dtype in (*FLOATS, *INTEGERS, *CONSTANTS):
                name = f"{dtype}_{shape}"
                assert start[name] == [1] * numel, name
                # At the end of the round the ranks held 2, 3, 4 and 5; every further step has counted one more.
                expected = 3.5 if dtype in FLOATS else 2 + overlap_steps
                if dtype in CONSTANTS and overlap_steps:
                    expected = rank + 3  # until a border
                if dtype == "bool":
                    expected = 1
                assert taken_in[name] == [expected] * numel, name
                at_border = 3.5 if dtype in FLOATS else 1 if dtype == "bool" else 2 + overlap_steps
                assert end[name] == [at_border] * numel, name

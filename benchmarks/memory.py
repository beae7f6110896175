"""Peak memory of a rank that trains one variant and nothing else, in a world of its own."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from .contenders import make_contender
from .records import Records
from .variants import Variant
from .workload import Batches, make_model, make_optimizer
from .world import World


NUM_ROUNDS = 2


def resident_bytes(field: str = "VmRSS") -> int:
    """
    Args:
        field (`str`, *optional*, defaults to `"VmRSS"`):
            Of `/proc/self/status`: `VmRSS` for now, `VmHWM` for the peak.

    Returns:
        `int`: Resident memory of this process.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory(
    world: World,
    variant: Variant,
    baseline_bytes: int,
    records: Records,
    session: str,
    say: Callable[[str], None],
) -> None:
    """
    Trains some rounds and compares the peak with what the process held before its model was made. Collective over the
    world.

    Args:
        world ([`World`]):
            Where.
        variant ([`Variant`]):
            Who trains.
        baseline_bytes (`int`):
            Resident memory when the process began, for the record.
        records ([`Records`]):
            Where the figures go.
        session (`str`):
            The run of the benchmark.
        say (`Callable`):
            Takes lines of progress.
    """
    _import_and_forget(world)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before = resident_bytes()
    contender = make_contender(variant, world)
    for _ in range(NUM_ROUNDS * world.workload.sync_every):
        contender.step()
    peaks: list[Any] = [None] * world.size
    dist.all_gather_object(peaks, resident_bytes("VmHWM") - before)
    contender.close()
    if world.rank == 0:
        shape = f"2x{world.node_size}"
        records.append(
            "memory",
            {
                "variant": variant.name,
                "shape": shape,
                "session": session,
                "peak_bytes": max(peaks),
                "process_bytes": baseline_bytes,
            },
        )
        say(f"[memory, {shape}] {variant.name:18} {max(peaks) / 1e6:.0f} MB")


def _import_and_forget(world: World) -> None:
    """What torch and Transformers load at a first step is nobody's memory, and what was freed is given back."""
    model: nn.Module = make_model(world.workload)
    optimizer = make_optimizer(model, world.workload)
    batch = Batches(world.blocks.train, world.workload, 0, 1).next()
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)

"""The recorder of collectives sees everything, whatever issued it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.collectives import Collective, CollectiveRecorder
from tests.harness.data import (
    collate,
    token_samples,
)
from tests.harness.models import shard_layers, tiny_llama
from tests.harness.pool import WorkerPool


def _record_fsdp_step() -> dict[str, list[Collective]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fed", "shard"))
    model = shard_layers(tiny_llama(), mesh["shard"])
    batch = collate(token_samples(2))
    found = {}
    with CollectiveRecorder() as recorder:
        loss = model(**batch).loss
    found["forward"] = recorder.collectives
    with CollectiveRecorder() as recorder:
        loss.backward()
    found["backward"] = recorder.collectives
    with CollectiveRecorder() as recorder:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    found["clip"] = recorder.collectives
    with CollectiveRecorder() as recorder:
        dist.all_gather_object([None] * 4, "x")
    found["object"] = recorder.collectives
    return found


def _record_rest() -> list[Collective]:
    import threading

    from torch.distributed import _functional_collectives as functional

    rank = dist.get_rank()
    with CollectiveRecorder() as recorder:
        group = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(5),), kwargs={"group": group})
        thread.start()
        thread.join()
        dist.destroy_process_group(group)
        dist.barrier()
        dist.broadcast_object_list([rank], 0)
        functional.all_reduce(torch.ones(7, dtype=torch.float64), "sum", dist.group.WORLD) + 0
        if rank < 2:
            peer, value = 1 - rank, torch.ones(2, dtype=torch.int16)
            (dist.send if rank == 0 else dist.recv)(value, peer)
        dist.monitored_barrier()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3, bias=False))
        ddp(torch.ones(1, 3)).sum().backward()
    dist.all_reduce(torch.ones(11))
    return recorder.collectives


def _overflow() -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with CollectiveRecorder():
        for _ in range(int(os.environ["TORCH_FR_BUFFER_SIZE"]) + 1):
            dist.all_reduce(torch.ones(1), group=alone)


def test_recorder_sees_fsdp(world4: WorkerPool) -> None:
    for rank, found in enumerate(world4.run(_record_fsdp_step)):
        inside = (0, 1) if rank < 2 else (2, 3)
        names = {part: [collective.name for collective in collectives] for part, collectives in found.items()}
        # Two layers and the root. Forward leaves the root gathered, so backward gathers the layers again; gloo reduces
        # and scatters with an all-reduce.
        assert names["forward"] == ["all_gather"] * 3
        assert sorted(names["backward"]) == ["all_gather"] * 2 + ["all_reduce"] * 3
        assert names["clip"] == ["all_reduce"]
        assert names["object"] == ["all_gather"] * 2
        for part in ("forward", "backward", "clip"):
            assert {collective.ranks for collective in found[part]} == {inside}
            assert not any(collective.crosses([0, 0, 1, 1]) for collective in found[part])
        assert all(collective.crosses([0, 0, 1, 1]) for collective in found["object"])
        parameters = sum(parameter.numel() for parameter in tiny_llama().parameters())
        assert sum(collective.num_elements for collective in found["forward"]) == parameters / 2
        assert sum(collective.num_bytes for collective in found["forward"]) == parameters * 2
        assert "_record_fsdp_step" in found["object"][0].stack


def test_recorder_sees_every_door(world4: WorkerPool) -> None:
    for rank, found in enumerate(world4.run(_record_rest)):
        by_name: dict[str, list[Collective]] = {}
        for collective in found:
            by_name.setdefault(collective.name, []).append(collective)
        sizes = [collective.num_bytes for collective in by_name["all_reduce"]]
        assert 20 in sizes, "issued by another thread, in a group that is gone"
        assert 56 in sizes, "functional, double"
        assert 36 in sizes, "the C++ reducer of DDP"
        assert 44 not in sizes, "issued after the end of the recording"
        thread_call = next(collective for collective in by_name["all_reduce"] if collective.num_bytes == 20)
        assert thread_call.ranks == ((0, 1) if rank < 2 else (2, 3))
        assert len(by_name["barrier"]) == 1
        assert len(by_name["monitored_barrier"]) == 1
        assert len(by_name["broadcast"]) >= 2
        point_to_point = [name for name in by_name if name in ("send", "recv")]
        assert point_to_point == ([["send"], ["recv"], [], []][rank])
        assert all(by_name[name][0].num_bytes == 4 for name in point_to_point)


def test_recorder_refuses_an_incomplete_list(world4: WorkerPool) -> None:
    assert all("raise TORCH_FR_BUFFER_SIZE" in error.message for error in world4.run_failing(_overflow))

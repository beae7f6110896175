"""torchft's LocalSGD and DiLoCo: each node is a replica group, sharded inside as ours are. Optional."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .contenders import Contender
from .network import NUM_NODES
from .workload import make_optimizer
from .world import World


TIMEOUT = timedelta(seconds=300)
OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Of DiLoCo, arXiv 2311.08105."""


class TorchftContender(Contender):
    """
    Trains inside a context of torchft, which averages by hooks of the optimizer.

    Args:
        world ([`World`]):
            Where.
        model (`nn.Module`):
            The sharded model.
        optimizer (`torch.optim.Optimizer`):
            The inner optimizer.
        manager (`torchft.Manager`):
            This rank's manager.
        context (`torchft.local_sgd.LocalSGD` or `torchft.local_sgd.DiLoCo`):
            What averages.
        lighthouse (`Any`):
            On rank 0 the server that the managers meet at; kept alive here.
    """

    def __init__(
        self, world: World, model: nn.Module, optimizer: Any, manager: Any, context: Any, lighthouse: Any
    ) -> None:
        super().__init__(world, model, optimizer)
        self.manager = manager
        self.context = context
        self.lighthouse = lighthouse
        context.__enter__()

    def step(self) -> float:
        """As the others; the averaging is part of the optimizer's step, so both are timed together."""
        self._backward()
        before = self.manager.current_step()
        started = time.perf_counter()
        self.optimizer.step()
        seconds = time.perf_counter() - started
        self.optimizer.zero_grad()
        return seconds if self.manager.current_step() != before else 0.0

    def close(self) -> None:
        """Leaves the context and ends the servers."""
        self.context.__exit__(None, None, None)
        dist.barrier()
        self.manager.shutdown(wait=False)
        dist.barrier()
        if self.lighthouse is not None:
            self.lighthouse.shutdown()


def make_torchft(kind: str, world: World, model: nn.Module) -> TorchftContender:
    """
    Starts a lighthouse on rank 0 and a manager on every rank. Collective over the world.

    Args:
        kind (`str`):
            `"torchft"` for LocalSGD, `"torchft_diloco"` for DiLoCo.
        world ([`World`]):
            Where.
        model (`nn.Module`):
            The model, sharded inside the node.

    Returns:
        [`TorchftContender`]: Ready to train.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=NUM_NODES) if world.rank == 0 else None
    address = world.addresses[world.node]
    # Each replica group has a store of its own, on its first rank.
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if world.local_rank == 0 else None
    ports: list[Any] = [None] * world.size
    own = (_port(lighthouse.address()) if lighthouse else None, store.port if store is not None else None)
    dist.all_gather_object(ports, own)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=NUM_NODES,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=world.local_rank,
        world_size=world.node_size,
        store_addr=address,
        store_port=ports[world.node * world.node_size][1],
        lighthouse_addr=f"http://{world.addresses[0]}:{ports[0][0]}",
        replica_id=f"node_{world.node}",
        hostname=address,
        # Its messages cross the link also while others are measured.
        heartbeat_interval=timedelta(seconds=1),
        # All groups begin with the same weights.
        init_sync=False,
    )
    optimizer = make_optimizer(model, world.workload)
    every = world.workload.sync_every
    if kind == "torchft":
        context: Any = LocalSGD(manager, model, optimizer, sync_every=every)
    else:
        outer = torch.optim.SGD(model.parameters(), lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
        context = DiLoCo(manager, [model], optimizer, outer, sync_every=every, use_bucketization=True)
    contender = TorchftContender(world, model, optimizer, manager, context, lighthouse)
    contender.store = store  # type: ignore[attr-defined]
    return contender


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])

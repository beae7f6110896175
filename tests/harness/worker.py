"""One worker of a pool: waits for bodies, runs each in a clean process state, reports."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from .reports import RankError, RankReport


OUTPUT_TAIL_BYTES = 6000
# Dumps the Python stacks of all threads, and works while the rank is blocked inside a collective.
DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Task:
    """
    One body to run.

    Args:
        index (`int`):
            Number of the body in the life of its pool: the name space of its keys in the pool's store.
        port (`int`):
            Value of `MASTER_PORT`. Serves a store of this body alone when `init_group` is off.
        payload (`bytes`):
            Pickled `(body, args, kwargs)`.
        env (`dict[str, str]`):
            Environment variables for this body alone.
        init_group (`bool`):
            Whether the default process group is made before the body starts.
        timeout_seconds (`float`):
            Limit of a collective of the default group.
    """

    index: int
    port: int
    payload: bytes
    env: dict[str, str] = field(default_factory=dict)
    init_group: bool = True
    timeout_seconds: float = 60.0


def worker_main(rank: int, world_size: int, port: int, pipe: Connection, log_path: str) -> None:
    """
    Entry point of a worker process.

    Args:
        rank (`int`):
            Rank of this worker.
        world_size (`int`):
            Workers in the pool.
        port (`int`):
            Port of the pool's rendezvous store, which the test process serves.
        pipe (`Connection`):
            Channel to the test process: receives a [`Task`] or `None` (the end), sends a [`RankReport`], receives a
            go, cleans up, sends `None`.
        log_path (`str`):
            File that takes this worker's stdout, stderr and stack dumps.
    """
    _die_with_parent()
    log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # After a fork the inherited objects may still point at a pytest capture file.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(DUMP_SIGNAL, file=sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(rank_env(rank, world_size))
    slate = CleanSlate()
    # One connection for all bodies, each with its own prefix. A connection per body costs more, and stalls for 5 s
    # now and then on some kernels.
    store = dist.TCPStore("127.0.0.1", port, None, False)

    while (task := _receive(pipe)) is not None:
        start_of_output = os.fstat(log).st_size
        report = _run(rank, world_size, store, task)
        sys.stdout.flush()
        sys.stderr.flush()
        end = os.fstat(log).st_size
        begin = max(start_of_output, end - OUTPUT_TAIL_BYTES)
        output = os.pread(log, end - begin, begin).decode(errors="replace")
        pipe.send_bytes(_dump(report, output))
        # Nobody tears down before everybody has reported: a peer may still be inside the body's last collective.
        if _receive(pipe) is None:
            break
        slate.restore()
        pipe.send_bytes(b"clean")


def rank_env(rank: int, world_size: int) -> dict[str, str]:
    """
    The variables with which `torchrun` starts a worker on a single node, but for `MASTER_PORT`, which a body that
    makes the default group has for itself: the keys of an earlier default group would mislead it.

    Args:
        rank (`int`):
            Rank of the worker.
        world_size (`int`):
            Number of workers.

    Returns:
        `dict[str, str]`: Environment variables.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        # The test process serves the store, as the agent of torchrun does: `init_process_group()` with its default
        # `env://` then works for whoever calls it, Accelerate included, and no rank opens a port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class CleanSlate:
    """What a process looks like before its first body, restored after each one."""

    def __init__(self) -> None:
        from transformers.trainer import DEFAULT_CALLBACKS

        self._env = dict(os.environ)
        self._filters = list(warnings.filters)
        self._callbacks = list(DEFAULT_CALLBACKS)

    def restore(self) -> None:
        """
        Forgets what a body left behind: process groups, Accelerate's singletons, environment, torch's global settings,
        callbacks for every Trainer. Patched classes and imports stay: `fresh=True` is for those.
        """
        from accelerate.state import AcceleratorState, GradientState
        from transformers.trainer import DEFAULT_CALLBACKS

        os.environ.clear()
        os.environ.update(self._env)
        warnings.filters[:] = self._filters  # type: ignore[index]
        DEFAULT_CALLBACKS[:] = self._callbacks
        if (guard := sys.modules.get("hf_fedshard.guard")) is not None:
            guard.reset()
        forget_dtensor_caches()
        if (cpu := sys.modules.get("hf_fedshard.cpu")) is not None:
            cpu.uninstall()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        gc.collect()
        # The default group and with it those of all device meshes. On gloo this is local, and all ranks have left the
        # body. A new default group costs 10 ms a rank; removing the subgroups one by one and keeping it would leave
        # the counters and store keys of the old body.
        if dist.is_initialized():
            dist.destroy_process_group()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def forget_dtensor_caches() -> None:
    """
    DTensor keeps redistribution plans by the content of a mesh. The next body's meshes may be equal to those of the last,
    but their process groups have other names, and the kept plans would look for the old ones.
    """
    from torch.distributed.tensor import DTensor, _redistribute

    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def _run(rank: int, world_size: int, store: dist.Store, task: Task) -> RankReport:
    started = time.monotonic()
    try:
        os.environ.update(task.env, MASTER_PORT=str(task.port))
        body, args, kwargs = _load(task.payload)
        _seed()
        if task.init_group:
            cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
            if cuda:
                torch.cuda.set_device(rank)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=dist.PrefixStore(f"body{task.index}", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=task.timeout_seconds),
            )
        value = body(*args, **kwargs)
        return RankReport(rank, value=value, seconds=time.monotonic() - started)
    except BaseException as error:  # a body may call sys.exit or pytest.skip
        return RankReport(rank, error=RankError.from_exception(rank, error), seconds=time.monotonic() - started)


def _load(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    return pickle.loads(payload)


def _dump(report: RankReport, output: str) -> bytes:
    # Plain pickle, not `Connection.send`: torch's reducers for the latter share memory with a process that may be
    # killed before the value is read.
    try:
        return pickle.dumps(RankReport(report.rank, report.value, report.error, output, report.seconds))
    except Exception as error:
        text = f"The value returned by the body cannot be pickled: {error}"
        record = RankError(report.rank, type(error).__name__, text, traceback.format_exc(), ("Exception",))
        return pickle.dumps(RankReport(report.rank, None, record, output, report.seconds))


def _receive(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None


def _seed(seed: int = 0) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _die_with_parent() -> None:
    # PR_SET_PDEATHSIG = 1: a rank that hangs in a collective must not outlive an interrupted test run.
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

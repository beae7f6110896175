"""Pools of worker processes that live as long as the pytest session and run the bodies of many tests."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .environment import SERVER_ENV, patched_environment
from .reports import RankError, RankReport, WorldError, WorldTimeoutError
from .worker import DUMP_SIGNAL, Task, worker_main


# Imported once in the fork server, so that a worker starts with them in memory. Transformers and torch import lazily:
# what a training run needs is named here, or every worker pays for it in its first body.
PRELOAD = ["tests.harness.preload"]
# After one rank has failed, the others either fail too (wrong settings are found by every rank) or hang in a
# collective that the failed one will never join.
GRACE_SECONDS = 5.0
DEFAULT_LIMIT_SECONDS = 60.0


class WorkerPool:
    """
    A world of `world_size` processes. The processes start at the first body and again after a body that left them in
    an unusable state; every body gets a fresh default process group.

    Args:
        world_size (`int`):
            Number of ranks.
        limit_seconds (`float`, *optional*, defaults to 60.0):
            Time a body may take.
    """

    def __init__(self, world_size: int, limit_seconds: float = DEFAULT_LIMIT_SECONDS) -> None:
        self.world_size = world_size
        self.limit_seconds = limit_seconds
        self.num_starts = 0
        self._index = 0
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        env: dict[str, str] | None = None,
        init_group: bool = True,
        fresh: bool = False,
        limit_seconds: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """
        Runs `body(*args, **kwargs)` on every rank.

        Args:
            body (`Callable`):
                Function defined at the top level of a module: it travels by name.
            args (`Any`):
                Positional arguments, picklable.
            env (`dict[str, str]`, *optional*):
                Environment variables for this body alone.
            init_group (`bool`, *optional*, defaults to `True`):
                Whether the default process group exists when the body starts. With `False` the body finds what a
                script finds under `accelerate launch`: the variables, and no group.
            fresh (`bool`, *optional*, defaults to `False`):
                Whether to run the body in new processes which nobody uses after it, for what cannot be undone in a
                process: imports with side effects, patched classes. Costs some tenths of a second.
            limit_seconds (`float`, *optional*):
                Time the body may take. Defaults to the pool's limit.
            kwargs (`Any`):
                Keyword arguments, picklable.

        Returns:
            `list`: What each rank returned, by rank.
        """
        reports, order = self._run(body, args, kwargs, env, init_group, fresh, limit_seconds)
        if order:
            raised = ", ".join(str(error.rank) for error in order)
            if all(error.type_name == "Skipped" for error in order) and len(order) == self.world_size:
                import pytest

                pytest.skip(order[0].message)
            output = reports[order[0].rank].output
            raise WorldError(
                f"{body.__qualname__} failed on rank {raised} of {self.world_size}.",
                order,
                f"--- output of rank {order[0].rank}\n{output}" if output else "",
            )
        return [report.value for report in reports]

    def run_failing(
        self,
        body: Callable[..., Any],
        *args: Any,
        env: dict[str, str] | None = None,
        init_group: bool = True,
        fresh: bool = False,
        limit_seconds: float | None = None,
        **kwargs: Any,
    ) -> list[RankError]:
        """
        Runs a body that has to raise on every rank. Arguments as for [`WorkerPool.run`].

        Returns:
            `list[RankError]`: The exception of each rank, by rank.
        """
        reports, _ = self._run(body, args, kwargs, env, init_group, fresh, limit_seconds)
        errors = [report.error for report in reports if report.error is not None]
        quiet = [report.rank for report in reports if report.error is None]
        if quiet:
            raise WorldError(f"{body.__qualname__} has to raise on every rank and did not on {quiet}.", errors)
        return errors

    def close(self) -> None:
        """Ends the workers. The next body starts new ones."""
        for pipe in self._pipes:
            pipe.close()  # an idle worker leaves when its pipe ends
        for process in self._processes:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._pipes, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _run(
        self,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        env: dict[str, str] | None,
        init_group: bool,
        fresh: bool,
        limit_seconds: float | None,
    ) -> tuple[list[RankReport], list[RankError]]:
        """Returns the reports by rank, and the errors in the order in which they arrived."""
        limit = self.limit_seconds if limit_seconds is None else limit_seconds
        payload = pickle.dumps((body, args, kwargs))
        if fresh:
            self.close()
        self._start()
        assert self._store is not None
        self._index += 1
        # A body that makes the default group itself does it through `env://`, whose keys have no prefix.
        store = self._store if init_group else _serve_store()
        task = pickle.dumps(Task(self._index, store.port, payload, env or {}, init_group, limit))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        reports, order = self._collect(body.__qualname__, limit)
        if fresh:
            self.close()
            return reports, order
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps("go"))
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(limit):
                self._give_up(f"{body.__qualname__}: rank {rank} hangs in the clean-up.", [rank], order)
            pipe.recv_bytes()
        return reports, order

    def _collect(self, name: str, limit: float) -> tuple[list[RankReport], list[RankError]]:
        deadline = time.monotonic() + limit
        reports: dict[int, RankReport] = {}
        order: list[RankError] = []
        while len(reports) < self.world_size:
            open_ranks = [rank for rank in range(self.world_size) if rank not in reports]
            ready = wait([self._pipes[rank] for rank in open_ranks], max(0.0, deadline - time.monotonic()))
            if not ready:
                why = f"no end after {limit:g} s" if not order else f"hangs after rank {order[0].rank} raised"
                self._give_up(f"{name}: rank {', '.join(map(str, open_ranks))}: {why}.", open_ranks, order)
            for rank in (rank for rank in open_ranks if self._pipes[rank] in ready):
                try:
                    report: RankReport = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    self._processes[rank].join(timeout=5)
                    code = self._processes[rank].exitcode
                    self._give_up(f"{name}: rank {rank} died with exit code {code}.", open_ranks, order)
                reports[rank] = report
                if report.error is not None:
                    order.append(report.error)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [reports[rank] for rank in range(self.world_size)], order

    def _give_up(self, title: str, ranks: list[int], errors: list[RankError]) -> None:
        """Raises, with the stacks of `ranks`, and leaves the start of a new world to the next body."""
        assert self._folder is not None
        folder = Path(self._folder.name)
        sizes = {rank: (folder / f"{rank}.log").stat().st_size for rank in ranks}
        for rank in ranks:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None:
                # It may end between the two lines, where all ranks are killed at once.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, DUMP_SIGNAL)
        time.sleep(0.3)  # the dump is written by a signal handler
        stacks = [f"--- rank {rank} is here\n{_tail(folder / f'{rank}.log', sizes[rank] - 1500)}" for rank in ranks]
        for process in self._processes:
            process.kill()
        self.close()
        raise WorldTimeoutError(title, errors, "\n".join(stacks))

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.close()
        self.num_starts += 1
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        self._store = _serve_store()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with patched_environment(SERVER_ENV):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=worker_main,
                    args=(rank, self.world_size, self._store.port, theirs, f"{self._folder.name}/{rank}.log"),
                    name=f"rank{rank}",
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)


def _serve_store() -> dist.TCPStore:
    # Port 0: the system chooses a free one, and no other process can take it in between.
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _tail(path: Path, begin: int) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, begin))
        return file.read().decode(errors="replace")

"""
Records every collective this process issues, at the level of the back end.

The source is torch's flight recorder (`TORCH_FR_BUFFER_SIZE`), which gloo and NCCL feed for each piece of work they
enqueue: it does not matter which thread issued it (autograd, a helper thread) nor through which door it came (the Python
API, functional collectives, DTensor, FSDP2, the C++ reducer of DDP, object collectives, barriers). Two kinds of calls
bypass it on gloo and are recorded at the methods of `ProcessGroup`: point-to-point operations and `monitored_barrier`.
Accesses to a rendezvous store are no collectives and are not recorded.

Names are the back end's: gloo runs a reduce-scatter as an `all_reduce`, and an object collective is two collectives.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d


_ITEM_BYTES = {"Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8}
_POINT_TO_POINT = ("send", "recv", "recv_anysource", "monitored_barrier")


@dataclass(frozen=True)
class Collective:
    """
    One collective of this process.

    Args:
        name (`str`):
            The back end's name: `all_gather`, `all_reduce`, `broadcast`, `barrier`, ...
        ranks (`tuple[int, ...]`):
            Global ranks of the process group.
        num_elements (`int`):
            Elements in this rank's input tensors.
        num_bytes (`int`):
            Bytes of this rank's input tensors.
        stack (`str`):
            Python stack of the caller, innermost frame first.
    """

    name: str
    ranks: tuple[int, ...]
    num_elements: int
    num_bytes: int
    stack: str = ""

    def crosses(self, group_of: Callable[[int], int] | Sequence[int]) -> bool:
        """
        Whether the process group has ranks of more than one federation group.

        Args:
            group_of (`Callable[[int], int]` or `Sequence[int]`):
                Federation group of each global rank.

        Returns:
            `bool`: `True` if a border is crossed.
        """
        lookup = group_of if callable(group_of) else group_of.__getitem__
        return len({lookup(rank) for rank in self.ranks}) > 1

    def __str__(self) -> str:
        return f"{self.name} over {list(self.ranks)}, {self.num_bytes} bytes, from\n{self.stack}"


class CollectiveRecorder:
    """
    Context manager; `recorder.collectives` holds what was issued inside it.

    ```python
    with CollectiveRecorder() as recorder:
        trainer.train()
    assert not recorder.crossing([0, 0, 1, 1])
    ```
    """

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self._direct: list[Collective] = []
        self._groups: dict[str, tuple[int, ...]] = {}
        self._begin: dict[str, int] = {}
        self._restore: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()

    def crossing(self, group_of: Callable[[int], int] | Sequence[int]) -> list[Collective]:
        """
        The recorded collectives that cross the border of a federation group.

        Args:
            group_of (`Callable[[int], int]` or `Sequence[int]`):
                Federation group of each global rank.

        Returns:
            `list[Collective]`: In the order of issue.
        """
        return [collective for collective in self.collectives if collective.crosses(group_of)]

    def names(self) -> list[str]:
        """
        Returns:
            `list[str]`: Names of the recorded collectives, in the order of issue.
        """
        return [collective.name for collective in self.collectives]

    def __enter__(self) -> CollectiveRecorder:
        self._note_groups()
        self._begin = {source: _next_id(dump(False)) for source, dump in _sources()}
        self._watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owner, name, original in reversed(self._restore):
            setattr(owner, name, original)
        self._restore.clear()
        self._note_groups()
        found: list[Collective] = []
        for source, dump in _sources():
            entries = dump(True)
            first, last = self._begin[source], _next_id(entries)
            new = [entry for entry in entries if entry["record_id"] >= first]
            # An incomplete list would let a test pass that has to fail.
            if kind is None and len(new) != last - first:
                raise RuntimeError(
                    f"{last - first} collectives were issued and the flight recorder kept {len(new)}: record less, or"
                    " raise TORCH_FR_BUFFER_SIZE."
                )
            found += [self._convert(entry) for entry in new]
        self.collectives = found + self._direct

    def _watch(self) -> None:
        recorder = self
        new_group = distributed_c10d._new_process_group_helper
        destroy = distributed_c10d.destroy_process_group

        # Groups that are made and destroyed while recording: their names must still be known at the end.
        def noting_new_group(*args: Any, **kwargs: Any) -> Any:
            result = new_group(*args, **kwargs)
            recorder._note_groups()
            return result

        def noting_destroy(*args: Any, **kwargs: Any) -> Any:
            recorder._note_groups()
            return destroy(*args, **kwargs)

        for owner in (distributed_c10d, dist):
            self._replace(owner, "destroy_process_group", noting_destroy)
        self._replace(distributed_c10d, "_new_process_group_helper", noting_new_group)
        for name in _POINT_TO_POINT:
            self._replace(dist.ProcessGroup, name, self._direct_call(name))

    def _direct_call(self, name: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, name)

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensors = [tensor for arg in args if isinstance(arg, (list, tuple)) for tensor in arg]
            tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
            elements = sum(tensor.numel() for tensor in tensors)
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            ranks = tuple(dist.get_process_group_ranks(group))
            with self._lock:
                self._direct.append(Collective(name, ranks, elements, num_bytes))
            return original(group, *args, **kwargs)

        return call

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._restore.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _note_groups(self) -> None:
        world = distributed_c10d._world
        for group, name in dict(world.pg_names).items():
            ranks = world.pg_group_ranks.get(group)
            if ranks:
                self._groups[name] = tuple(sorted(ranks))

    def _convert(self, entry: dict[str, Any]) -> Collective:
        name = str(entry["process_group"][0])
        if name not in self._groups:
            raise RuntimeError(f"The process group {entry['process_group']} of {entry['profiling_name']} is unknown.")
        sizes = [math.prod(shape) for shape in entry["input_sizes"]]
        num_bytes = sum(
            size * _ITEM_BYTES.get(kind, 8) for size, kind in zip(sizes, entry["input_dtypes"], strict=True)
        )
        frames: Iterable[dict[str, Any]] = entry.get("frames", ())
        stack = "\n".join(f"  {frame['filename']}:{frame['line']} {frame['name']}" for frame in frames)
        return Collective(entry["profiling_name"].split(":")[-1], self._groups[name], sum(sizes), num_bytes, stack)


def _sources() -> list[tuple[str, Callable[[bool], list[dict[str, Any]]]]]:
    names = [name for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]

    def reader(name: str) -> Callable[[bool], list[dict[str, Any]]]:
        def read(stacks: bool) -> list[dict[str, Any]]:
            trace = pickle.loads(getattr(c10d, name)(includeStackTraces=stacks))
            return sorted(trace.get("entries", []), key=lambda entry: entry["record_id"])

        return read

    return [(name, reader(name)) for name in names]


def _next_id(entries: list[dict[str, Any]]) -> int:
    return entries[-1]["record_id"] + 1 if entries else 0

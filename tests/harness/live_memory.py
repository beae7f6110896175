"""How much memory the tensors take that are made inside a block and alive at one time."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """
    Context manager; `peak_bytes` is the most that was alive at the end of an operation, in memory that did not exist before.
    It stands for a GPU's counter where there is none. What a kernel needs for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        # The references keep addresses from being taken by memory that is new.
        self._before: dict[int, StorageWeakRef] = {}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs or {})):
            if storage._cdata not in self._alive:
                self._before[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._before and storage._cdata not in self._alive:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        return result

    @property
    def alive_bytes(self) -> int:
        """What is alive now."""
        return sum(size for held, size in self._alive.values() if not held.expired())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)]
    return [tensor.untyped_storage() for tensor in tensors]

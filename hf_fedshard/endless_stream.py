"""A stream that begins again when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class EndlessStream(IterableDataset[Any]):
    """
    Repeats a stream: groups whose streams are of unequal length would end an epoch at different steps.

    Args:
        dataset (`Iterable`):
            A streaming dataset that can be read again, or is longer than it is read.
        begun (`Iterator`, *optional*):
            A reading of it that stands at its first sample, to go on with in place of the first one.
    """

    def __init__(self, dataset: Any, begun: Iterator[Any] | None = None) -> None:
        self.dataset = dataset
        self._begun = begun

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_begun": None}  # an open reading cannot be sent to a worker

    def __iter__(self) -> Iterator[Any]:
        in_worker = get_worker_info() is not None
        # A stream may give each worker another part, which it decides where its reading begins: that was outside.
        begun, self._begun = (None if in_worker else self._begun), None
        first = True
        while True:
            empty = True
            for sample in self.dataset if begun is None else begun:
                empty = False
                yield sample
            if empty and first and in_worker:
                return  # fewer files than workers: this one has nothing to read
            begun, first = None, False
            if empty:
                raise RuntimeError(
                    "A stream of training data cannot be read a second time. Give each group a dataset that can be, or as "
                    "many samples as its steps need and a batch of each rank more, which is read ahead."
                )

    def set_epoch(self, epoch: int) -> None:
        """Hands the epoch on, on which a shuffled stream's order depends."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

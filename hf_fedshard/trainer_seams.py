"""What the parts of a Trainer's checkpoints share: methods of one instance, checked before they are replaced, put back after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from transformers import Trainer

from .checkpointed_run import CheckpointedRun
from .seams import Patches, check_seams


Method = Callable[..., Any]


class TrainerSeams(ABC):
    """
    Replaces bound methods on the Trainer of one run.

    Args:
        run ([`CheckpointedRun`]):
            The run.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    SEAMS: ClassVar[Mapping[str, Sequence[str]]]
    """The methods of `Trainer` that are replaced or called, with the parameters that they must take."""

    def __init__(self, run: CheckpointedRun) -> None:
        check_seams(Trainer, self.SEAMS)
        self.run = run
        self.trainer: Any = run.trainer
        self._patches = Patches()

    @abstractmethod
    def install(self) -> None:
        """Replaces the methods. Call once."""

    def remove(self) -> None:
        """Puts every method back."""
        self._patches.undo()

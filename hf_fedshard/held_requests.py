"""What callbacks ask of a Trainer inside a round, held back until all ranks can hear of it at a border."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from transformers import TrainerControl


FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")


class HeldRequests:
    """Requests of this rank, the flags of a `TrainerControl`, since the last border."""

    def __init__(self) -> None:
        self._pending_flags: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The flags that are held back."""
        return sorted(self._pending_flags)

    def restore(self, names: Iterable[str]) -> None:
        """
        Goes on inside a round.

        Args:
            names (`Iterable[str]`):
                From [`~HeldRequests.names`].
        """
        self._pending_flags = set(names)

    def hold_back(self, control: TrainerControl, flags: Sequence[str] = FLAGS) -> None:
        """
        Takes requests out of Trainer's hands.

        Args:
            control (`TrainerControl`):
                Trainer's; its flags are cleared.
            flags (`Sequence[str]`, *optional*):
                Which of them. Defaults to all.
        """
        for flag in flags:
            if getattr(control, flag):
                self._pending_flags.add(flag)
                setattr(control, flag, False)

    def give_back(self, control: TrainerControl) -> None:
        """
        Puts what is held back into Trainer's hands again, on this rank.

        Args:
            control (`TrainerControl`):
                Trainer's.
        """
        for flag in self._pending_flags:
            setattr(control, flag, True)
        self._pending_flags.clear()

    def drop(self, flag: str) -> None:
        """
        Forgets a request.

        Args:
            flag (`str`):
                Its flag.
        """
        self._pending_flags.discard(flag)

    def votes(self) -> dict[str, bool]:
        """For each flag, whether it is held back on this rank."""
        return {flag: flag in self._pending_flags for flag in FLAGS}

    def meet(self, control: TrainerControl, votes: Mapping[str, bool]) -> None:
        """
        At a border: what any rank has asked for holds for all, and nothing is held back any more.

        Args:
            control (`TrainerControl`):
                Trainer's.
            votes (`Mapping[str, bool]`):
                For each flag, whether any rank has asked for it.
        """
        self._pending_flags.clear()
        for flag in FLAGS:
            if votes[flag]:
                setattr(control, flag, True)

"""What Trainer's own schedule asks for, and where an epoch ends: what all ranks know without a word."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback


class ScheduledRequests:
    """
    Logging, evaluation, saving and stopping that the arguments of a Trainer ask for, by steps or by epochs. Trainer's own
    callback for it is asked, with a control of its own: what it says depends on arguments and step alone, which are equal on
    all ranks, while other callbacks may ask on some ranks only.

    Args:
        trainer (`Trainer`):
            The Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.pending = False
        """Whether something was asked for since the last border."""
        self._flow = next(
            (item for item in trainer.callback_handler.callbacks if isinstance(item, DefaultFlowCallback)), None
        )

    def note(self, event: str, state: TrainerState) -> None:
        """
        To be called with each event.

        Args:
            event (`str`):
                Its name.
            state (`TrainerState`):
                What it came with.
        """
        if self._flow is None or event not in ("on_step_end", "on_epoch_end"):
            return
        control: Any = TrainerControl()
        getattr(self._flow, event)(self.trainer.args, state, control)
        if event == "on_step_end" and epoch_is_whole(state):
            # The epoch ends with this step, and what is asked for then is known: a round that ends here as well need not be
            # followed by another one first.
            self._flow.on_epoch_end(self.trainer.args, state, control)
        self.pending |= bool(control.should_log or control.should_evaluate or control.should_save)

    def is_over(self, state: TrainerState) -> bool:
        """
        Whether the training ends with this step.

        Args:
            state (`TrainerState`):
                At the end of a step.
        """
        return state.global_step >= state.max_steps


def epoch_is_whole(state: TrainerState) -> bool:
    """
    Whether the step that was made last is the last one of its epoch, so that `on_epoch_end` comes after it.

    Args:
        state (`TrainerState`):
            Trainer's, at the end of a step.
    """
    return float(state.epoch or 0).is_integer()

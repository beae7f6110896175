"""Trainer's own checkpoint on SIGTERM (`enable_jit_checkpoint`), and how it is taken out: it saves on per-rank timers."""

from __future__ import annotations

import signal
from typing import Any


def take_out_jit_checkpoint(trainer: Any) -> None:
    """
    Removes Trainer's callback, and its signal handler, which starts a timer that the callback would wait for.

    Args:
        trainer (`Trainer`):
            The instance.
    """
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    for callback in list(trainer.callback_handler.callbacks):
        if isinstance(callback, JITCheckpointCallback):
            trainer.callback_handler.remove_callback(callback)
            manager = callback.jit_manager
            if manager is not None and signal.getsignal(signal.SIGTERM) == manager._sigterm_handler:
                previous = manager._original_sigterm_handler
                signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)

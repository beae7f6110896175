"""Where a run stands in its rounds, as a checkpoint holds it: at a border, or inside a round."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .counting import RoundCounter
from .metrics import Tally


class ResumableRounds(RoundCounter):
    """The part of [`Rounds`] that is saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Where the federation stands, at a border: numbers of rounds and steps, and the period. Fit for JSON."""
        return {"round": self.round, **self.course.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """
        Told that the model was replaced by a checkpoint's, the same in all groups: a round begins with the next step.
        Collective over the world where synchronous steps at the end go on.

        Args:
            state (`Mapping[str, Any]`):
                From [`~Rounds.state_dict`].
        """
        if self.overlap is not None:
            self.overlap.discard()
        self._next_round()
        self.round = int(state["round"])
        self.course.load_state_dict(state)
        self.averager.restart()

    def state_inside(self) -> dict[str, Any]:
        """Where this rank stands inside a round whose steps are its group's own, as plain values."""
        return {
            **self.state_dict(),
            "steps_in_round": self.steps,
            "num_optimizer_steps": self.num_optimizer_steps,
            "num_skipped_steps": float(self.num_skipped_steps),
            "trained": self.averager.trained.names,
            "border_seconds": self.border_seconds,
            "seconds": self._tally.seconds(),
            "tally": {name: value for name, value in vars(self._tally).items() if name != "started"},
        }

    def restore_inside(self, state: Mapping[str, Any]) -> None:
        """
        Told that the model was replaced by what this rank's group held inside a round. Without communication: how many steps
        are behind is different in each group, and so would be what they did about synchronous steps.

        Args:
            state (`Mapping[str, Any]`):
                From [`~Rounds.state_inside`], of the same group.
        """
        self.round = state["round"]
        self.course.load_state_dict(state, inside=True)
        self.steps = state["steps_in_round"]
        self.num_optimizer_steps = state["num_optimizer_steps"]
        self.num_skipped_steps = state.get("num_skipped_steps", 0.0)
        self.averager.restart(state["trained"])
        self.border_seconds = state["border_seconds"]
        self._tally = Tally(started=time.perf_counter() - state["seconds"], **state["tally"])

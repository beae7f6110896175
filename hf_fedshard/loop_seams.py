"""What is replaced on an Accelerator in a loop of one's own, beside the collectives: when it saves, and when a round's clock starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from .rounds import Rounds
from .seams import Patches, check_seams


SEAMS = {
    "backward": ("loss",),
    "get_state_dict": ("model", "unwrap"),
}


def tie_to_rounds(accelerator: Accelerator, rounds: Rounds) -> Patches:
    """
    Has an Accelerator look at the rounds before it does what they have a say in, by replacing bound methods on this instance.

    - `backward`: the first of a round starts its clock. What a loop does at a border, an evaluation or a checkpoint, is no
      part of the next round, or `sync_every="auto"` would take its first step to last as long. A hook of the model would see
      the forward pass ahead of it too, but becomes part of the graph where models are compiled.
    - `get_state_dict` of the model that is averaged, and of no other: raises inside a round, where every group holds another
      one, and what is saved would be one group's. Accelerate's own hooks for saving and loading run when the weights are
      written or overwritten already.

    Args:
        accelerator (`Accelerator`):
            The instance.
        rounds ([`Rounds`]):
            What averages its model.

    Returns:
        [`Patches`]: To be undone at the end of the federation.

    Raises:
        UpstreamChangedError: If a method is not as expected.
    """

    def start_clock(*args: Any, **kwargs: Any) -> None:
        if not rounds.clock_is_set:  # once, also where a step has several micro-batches
            rounds.begin_step()

    def check_model(model: Any, *args: Any, **kwargs: Any) -> None:
        if rounds.is_about(model):
            check_border(rounds, "accelerator.get_state_dict")

    check_seams(Accelerator, SEAMS)
    patches = Patches()
    patches.replace(accelerator, "backward", _after(start_clock))
    patches.replace(accelerator, "get_state_dict", _after(check_model))
    return patches


def check_border(rounds: Rounds, what: str) -> None:
    """
    Refuses what needs one model.

    Args:
        rounds ([`Rounds`]):
            What averages it.
        what (`str`):
            The call, for the message.

    Raises:
        RuntimeError: Inside a round, where every group holds another model.
    """
    if rounds.at_border:
        return
    where = f"{rounds.steps} steps into a round"
    if rounds.overlap is not None and rounds.overlap.in_flight:
        where += f" and with an averaging in flight (overlap_steps={rounds.config.overlap_steps})"
    raise RuntimeError(
        f"{what} was called {where}, where every group holds another model. Call it where `fedavg.at_border` is true, or "
        "after `fedavg.finish()`; `fedavg.close()` on every rank makes a border at once."
    )


def _after(first: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes a method that does something else with its arguments first."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            first(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    return make

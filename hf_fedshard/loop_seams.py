"""What is replaced on an Accelerator in a loop of one's own, beside the collectives: when it saves, and when a round's clock starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from .accelerate_checkpoint import check_border
from .rounds import Rounds
from .seams import Patches, check_seam


def start_clock_with_steps(accelerator: Accelerator, rounds: Rounds) -> Patches:
    """
    What a loop does at a border, an evaluation or a checkpoint, is no part of the next round: its clock starts with the first
    backward pass, or `sync_every="auto"` would take its first step to last as long. A hook of the model would see the forward
    pass ahead of it too, but becomes part of the graph where models are compiled.

    Args:
        accelerator (`Accelerator`):
            The instance.
        rounds ([`Rounds`]):
            What averages its model.

    Returns:
        [`Patches`]: To be undone at the end of the federation.
    """
    begun = -1

    def first_of_round(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            if begun != rounds.round:  # once, also where a step has several micro-batches
                begun = rounds.round
                rounds.begin_step()
            return original(*args, **kwargs)

        return backward

    check_seam(Accelerator, "backward", ("loss",))
    patches = Patches()
    patches.replace(accelerator, "backward", first_of_round)
    return patches


def keep_saving_to_borders(accelerator: Accelerator, rounds: Rounds) -> Patches:
    """
    Inside a round every group holds another model, and what is saved would be one group's. Accelerate's own hooks for saving
    and loading run when the weights are written or overwritten already, so its methods are replaced on this instance.

    Args:
        accelerator (`Accelerator`):
            The instance.
        rounds ([`Rounds`]):
            What averages its model.

    Returns:
        [`Patches`]: To be undone at the end of the federation.
    """

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_state_dict(*args: Any, **kwargs: Any) -> Any:
            check_border(rounds, "accelerator.get_state_dict")
            return original(*args, **kwargs)

        return get_state_dict

    check_seam(Accelerator, "get_state_dict", ("model", "unwrap"))
    patches = Patches()
    patches.replace(accelerator, "get_state_dict", guarded)
    return patches

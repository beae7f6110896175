"""The reference for a recorded run of Trainer, and the comparison with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from .data import batches_by_step
from .reference import ReferenceResult, train_reference
from .reference_groups import State
from .trainer_runs import LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, make_model


def adamw_as_trainer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """
    Args:
        parameters (`Iterable[torch.nn.Parameter]`):
            Parameters of a Llama.

    Returns:
        `torch.optim.Optimizer`: What Trainer makes for them: no weight decay on norms.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE)


def refer(
    ranks: list[dict[str, Any]],
    kind: str = "llama",
    num_groups: int = 2,
    sync_every: int | Collection[int] = 3,
    accumulation: int = 2,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw_as_trainer,
    learning_rate: float = LEARNING_RATE,
    **changes: Any,
) -> ReferenceResult:
    """
    The reference on the batches that the ranks recorded. Arguments as for [`train`] and `train_reference`.

    Returns:
        `ReferenceResult`: The reference.
    """
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits, and takes a core from somebody
    batches = batches_by_step([rank["batches"] for rank in ranks], num_groups, accumulation)
    # Trainer's default is a linear schedule without warm-up.
    options = {
        "learning_rate": lambda step: learning_rate * (1 - step / len(batches)),
        "max_grad_norm": MAX_GRAD_NORM,
        **changes,
    }
    return train_reference(lambda: make_model(kind), batches, sync_every, optimizer, **options)


def largest(states: State, others: State) -> float:
    """
    Args:
        states (`dict[str, torch.Tensor]`):
            A state.
        others (`dict[str, torch.Tensor]`):
            Another one.

    Returns:
        `float`: Largest difference of an element, over the names in both.
    """
    common = [name for name, tensor in states.items() if name in others and tensor.is_floating_point()]
    assert len(common) > 3
    return max((states[name].double() - others[name].double()).abs().max().item() for name in common)


def assert_matches(
    ranks: list[dict[str, Any]], result: ReferenceResult, kind: str, tolerance: float
) -> tuple[float, float]:
    """
    All ranks hold the same bits at each border, and they are the reference's within a tolerance.

    Args:
        ranks (`list`):
            What [`train`] returned.
        result (`ReferenceResult`):
            From [`refer`].
        kind (`str`):
            For [`make_model`].
        tolerance (`float`):
            Largest difference of an element.

    Returns:
        `tuple[float, float]`: Largest difference, and how far the weights have moved at most.
    """
    # What ends on a border is not seen at the beginning of a step.
    inner = [
        state for state, step in zip(result.border_states, result.borders, strict=True) if step < result.borders[-1]
    ]
    error = 0.0
    for rank in ranks:
        assert len(rank["borders"]) == len(inner)
        own, first = [*rank["borders"], rank["state"]], [*ranks[0]["borders"], ranks[0]["state"]]
        for state, same, expected in zip(own, first, [*inner, result.state], strict=True):
            assert all(torch.equal(tensor, same[name]) for name, tensor in state.items())
            error = max(error, largest(state, expected))
    moved = largest(make_model(kind).state_dict(), result.state)
    print(f"largest difference {error:.2e}, the weights have moved by {moved:.2e}")
    assert error <= tolerance, f"largest difference {error:.2e}, the weights have moved by {moved:.2e}"
    return error, moved

"""
Step counters of inner optimizers whose moments are averaged. Adam divides its moments by what has reached them so far, a
part `1 - beta^t` after `t` steps; of groups that have made different numbers of steps they cannot be averaged as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .metrics import exchange_rows
from .peers import Peers
from .shards import local_part


# Which of an optimizer's betas each of its moments decays by. The step of these depends on nothing else that counts.
_BETAS: dict[type[torch.optim.Optimizer], dict[str, int]] = {
    torch.optim.Adam: {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 1},  # AdamW is one
    torch.optim.RAdam: {"exp_avg": 0, "exp_avg_sq": 1},
}


@dataclass(frozen=True)
class Counter:
    """
    The steps of one parameter.

    Args:
        state (`dict[str, Any]`):
            The optimizer's state of it, with its `step`.
        betas (`dict[str, float]`, *optional*):
            What its moments decay by, as far as they are divided by what has reached them; `None` of an optimizer that is
            not known here.
    """

    state: dict[str, Any]
    betas: dict[str, float] | None


def counters_of(
    optimizers: Sequence[torch.optim.Optimizer], chosen: Callable[[Any], bool] = lambda param: True
) -> list[Counter]:
    """
    The counters of all parameters that have one.

    Args:
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        chosen (`Callable[[torch.Tensor], bool]`, *optional*):
            Which parameters; by default all.
    """
    found = []
    for optimizer in optimizers:
        places = next((places for kind, places in _BETAS.items() if isinstance(optimizer, kind)), None)
        for group in optimizer.param_groups:
            betas = None
            if places is not None:
                betas = {key: float(group["betas"][place]) for key, place in places.items()}
            for param in group["params"]:
                if chosen(param) and "step" in optimizer.state.get(param, {}):
                    found.append(Counter(optimizer.state[param], betas))
    return found


def exchange_counts(counters: Sequence[Counter], mesh: Peers) -> list[tuple[float, ...]]:
    """
    What each group has counted. Collective over the world.

    Args:
        counters (`Sequence[Counter]`):
            Of the same parameters on all ranks.
        mesh ([`Peers`]):
            The federation.

    Returns:
        `list[tuple[float, ...]]`: For each counter the steps of group 0, 1, ...
    """
    if not counters:  # on all ranks alike: SGD counts nothing
        return []
    steps = [counter.state["step"] for counter in counters]
    # Brought together before they are read, which is when a device is waited for.
    elsewhere = [step for step in steps if isinstance(step, torch.Tensor) and step.device.type != "cpu"]
    read = iter(torch.stack(elsewhere).tolist() if elsewhere else [])
    counts = [
        next(read) if isinstance(step, torch.Tensor) and step.device.type != "cpu" else float(step) for step in steps
    ]
    size = mesh.group.size()
    rows, _ = exchange_rows({str(place): count / size for place, count in enumerate(counts)}, mesh)
    return [tuple(float(round(count)) for count in column) for column in rows.values()]


def can_average(counters: Sequence[Counter], counts: Sequence[tuple[float, ...]]) -> bool:
    """
    Whether averages of the moments have a meaning: where the groups count alike, or it is known what reaches them by when.

    Args:
        counters (`Sequence[Counter]`):
            This rank's.
        counts (`Sequence[tuple[float, ...]]`):
            From [`exchange_counts`].
    """
    return all(counter.betas is not None or len(set(of)) == 1 for counter, of in zip(counters, counts, strict=True))


@torch.no_grad()
def settle_counters(
    counters: Sequence[Counter], counts: Sequence[tuple[float, ...]], weights: Sequence[float]
) -> None:
    """
    Gives moments that were averaged the scale of one counter, the largest, and all groups that counter. Without
    communication.

    What has reached the average `m` of the groups' moments is the average of `1 - beta^t`. Divided by it, `m` is an
    average of all gradients of all groups, in which a group without a step has no part; times `1 - beta^T` it is what
    Adam expects after `T` steps. Where all groups count alike nothing is touched.

    Args:
        counters (`Sequence[Counter]`):
            This rank's.
        counts (`Sequence[tuple[float, ...]]`):
            From [`exchange_counts`].
        weights (`Sequence[float]`):
            Of each group in the average.
    """
    for counter, of in zip(counters, counts, strict=True):
        if len(set(of)) == 1:
            continue
        last = max(count for count, weight in zip(of, weights, strict=True) if weight)
        for key, beta in (counter.betas or {}).items():
            reached = sum(weight * (1 - beta**count) for weight, count in zip(weights, of, strict=True)) / sum(weights)
            if key in counter.state and reached:
                local_part(counter.state[key]).mul_((1 - beta**last) / reached)
        if isinstance(counter.state["step"], torch.Tensor):
            counter.state["step"].fill_(last)
        else:
            counter.state["step"] = type(counter.state["step"])(last)

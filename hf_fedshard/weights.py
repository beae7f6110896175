"""How much each group counts in an average."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .metrics import exchange_rows
from .peers import Peers


BY_NAME = ("uniform", "samples", "tokens", "steps")


@dataclass(frozen=True)
class GroupCounts:
    """
    What a group did in a round, summed over its ranks.

    Args:
        group (`int`):
            Its number.
        samples (`float`):
            Samples that it trained on.
        tokens (`float`):
            Tokens that it trained on; under Trainer those with a label.
        steps (`float`):
            Updates of its weights; a step that a gradient scaler skipped is none.
        loss (`float`):
            Mean training loss, `nan` if none was given.
    """

    group: int
    samples: float
    tokens: float
    steps: float
    loss: float


WeightFunction = Callable[[Sequence[GroupCounts]], Sequence[float]]


def find_weight_function(weights: str | WeightFunction) -> WeightFunction | None:
    """
    The function that a setting means.

    Args:
        weights (`str` or `Callable`):
            `group_weights`.

    Returns:
        `Callable` or `None`: `None` for the names in `BY_NAME`.

    Raises:
        ValueError: If it is neither one of them, nor a function, nor the place of one.
    """
    if not isinstance(weights, str):
        if callable(weights):
            return weights
    elif weights in BY_NAME:
        return None
    elif ":" in weights:
        module, _, name = weights.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"group_weights={weights!r} cannot be imported: {error}.") from error
        if callable(found):
            return found
    raise ValueError(
        f"group_weights must be one of {', '.join(BY_NAME)}, a function of a list of GroupCounts, or the place of one "
        f"as 'module:function', but got {weights!r}."
    )


def count_batch(batch: Any, exactly: bool = True, shifts_labels: bool = True) -> tuple[int, int | None]:
    """
    Samples and tokens of a batch. Tokens are positions with a label that the loss counts; or, without labels, positions.

    A collator that pads nothing (`DataCollatorWithFlattening`, `padding_free` of TRL) puts all samples into one row, without
    an `attention_mask`: there `position_ids` tell them apart, which begin anew with each.

    Args:
        batch (`Any`):
            What a data loader gave.
        exactly (`bool`, defaults to `True`):
            Whether tokens are counted, and samples inside a row. Looking into labels and positions waits for the device.
        shifts_labels (`bool`, defaults to `True`):
            Whether the loss takes a label as that of the position before it, as causal models do: then nothing predicts the
            first one of a row. Encoder-decoder and masked models count all.

    Returns:
        `tuple[int, int | None]`: Samples, and tokens; `None` where there are none to count.
    """
    tensors = [value for value in batch.values() if hasattr(value, "shape") and value.ndim] if _is_dict(batch) else []
    if not tensors:
        return 0, None
    if not exactly:
        return len(tensors[0]), None
    labels = batch.get("labels")
    samples = _samples_in_rows(batch)
    if labels is not None and getattr(labels, "ndim", 0) > 1:
        shifted = batch.get("shift_labels")
        if shifted is None:
            shifted = labels[:, 1:] if shifts_labels else labels
        return samples or len(labels), int((shifted != -100).sum())
    tokens = batch.get("input_ids")
    return samples or len(tensors[0]), None if tokens is None else tokens.numel()


def _samples_in_rows(batch: Any) -> int | None:
    """Of a batch whose rows hold several: runs of positions, of two at least, since padding counts none."""
    positions = batch.get("position_ids")
    if "attention_mask" in batch or getattr(positions, "ndim", 0) != 2:
        return None
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    begins = goes_on.clone()
    begins[:, 1:] &= ~goes_on[:, :-1]
    return int(begins.sum())


def _is_dict(batch: Any) -> bool:
    return hasattr(batch, "get") and hasattr(batch, "values")


def group_weights(
    setting: str | WeightFunction, rows: Mapping[str, Sequence[float]], excluded: Collection[int], mesh: Peers
) -> tuple[float, ...]:
    """
    The weight of each group in the average, the same on all ranks. Equal weights are 1 each, so that the average is that
    of uniform weights bit for bit; others are relative to the largest.

    Collective over the world for a function alone, which sees equal numbers on all ranks and yet may not give equal
    weights: what the ranks of a group give for it is exchanged, so that all use the same.

    Args:
        setting (`str` or `Callable`):
            `group_weights`.
        rows (`Mapping[str, Sequence[float]]`):
            Sums of each group: `samples`, `tokens`, `updates`, `loss_sum`, `num_losses`.
        excluded (`Collection[int]`):
            Groups that are left out: they have weight 0, whatever they counted.
        mesh ([`Peers`]):
            The federation.

    Raises:
        ValueError: On every rank, if the weights are no weights.
    """
    groups = range(mesh.layout.num_groups)
    function = find_weight_function(setting)
    if function is None:
        column = {"steps": "updates"}.get(str(setting), str(setting))
        given = [1.0 for _ in groups] if setting == "uniform" else list(rows[column])
        if setting == "steps" and not any(given[group] for group in groups if group not in excluded):
            given = [1.0 for _ in groups]  # no group has moved: all hold one model, which is the average
    else:
        given = _call(function, rows, mesh)
    weights = [0.0 if group in excluded else float(given[group]) for group in groups]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(_explain(setting, given))
    largest = max(weights)
    return tuple(weight / largest for weight in weights)


def _call(function: WeightFunction, rows: Mapping[str, Sequence[float]], mesh: Peers) -> list[float]:
    counts = [
        GroupCounts(group, samples, tokens, updates, total / number if number else math.nan)
        for group, (samples, tokens, updates, total, number) in enumerate(
            zip(
                *(rows[name] for name in ("samples", "tokens", "updates", "loss_sum", "num_losses")),
                strict=True,
            )
        )
    ]
    mine = math.nan
    problem: Exception | None = None
    try:
        own = function(counts)
        if len(own) == len(counts):
            mine = float(own[mesh.group_index])
    except Exception as error:  # the others wait in the exchange
        problem = error
    exchanged, _ = exchange_rows({"weight": mine / mesh.group.size()}, mesh)
    if problem is not None:
        raise ValueError(f"group_weights={_name(function)} failed: {type(problem).__name__}: {problem}") from problem
    return exchanged["weight"]


def _explain(setting: str | WeightFunction, given: Sequence[float]) -> str:
    if setting in ("samples", "tokens") and not any(given):
        return (
            f"group_weights={setting!r}, but no group has counted any {setting} in this round. Hand them over: "
            f"`fedavg.step(loss, {setting}=...)`; under Trainer use group_weights='samples', or batches with labels."
        )
    return (
        f"group_weights={_name(setting)} gave {list(given)}: it must give one number for each group, none negative or "
        "infinite, and of the groups that take part not all zero."
    )


def _name(setting: str | WeightFunction) -> str:
    return repr(setting) if isinstance(setting, str) else describe_function(setting)


def describe_function(function: Any) -> str:
    """
    A function by its name, the same on all ranks.

    Args:
        function (`Any`):
            The function.
    """
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__qualname__)}"

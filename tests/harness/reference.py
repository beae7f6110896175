"""
Federated training of G groups in one process, on full models, one group after another: what the sharded, parallel run
has to reproduce. It follows the algorithm literally and shares no code with the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .data import IGNORED_LABEL, Batch


State = dict[str, torch.Tensor]


@dataclass
class ReferenceResult:
    """
    Outcome of [`train_reference`].

    Args:
        state (`dict[str, torch.Tensor]`):
            Full state dict at the end, which is a border: equal in all groups, but for integer buffers.
        borders (`list[int]`):
            Numbers of optimizer steps done at each border.
        border_states (`list[dict[str, torch.Tensor]]`):
            Full state dict at each border.
        losses (`list[list[float]]`):
            `[step][group]`: loss over all label tokens of the group's batch.
        grad_norms (`list[list[float]]`):
            `[step][group]`: norm of the group's gradient before clipping.
        num_items (`list[list[int]]`):
            `[step][group]`: label tokens.
        models (`list[torch.nn.Module]`):
            The model of each group.
        optimizers (`list[torch.optim.Optimizer]`):
            The optimizer of each group.
    """

    state: State = field(default_factory=dict)
    borders: list[int] = field(default_factory=list)
    border_states: list[State] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    grad_norms: list[list[float]] = field(default_factory=list)
    num_items: list[list[int]] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


def train_reference(
    model_factory: Callable[[], nn.Module],
    batches: Sequence[Sequence[Sequence[Sequence[Batch]]]],
    sync_every: int | Collection[int],
    optimizer_factory: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    learning_rate: Callable[[int], float] | None = None,
    max_grad_norm: float | None = None,
    loss: Callable[[nn.Module, Batch, int], torch.Tensor] | None = None,
    count: Callable[[Batch], int] | None = None,
    weights: Callable[[int, list[int]], Sequence[float]] | None = None,
    outer: Callable[[State, State, int], State] | None = None,
    synchronous: Callable[[int], bool] = lambda step: False,
    before_step: Callable[[nn.Module, State], None] | None = None,
    at_border: Callable[[list[nn.Module], list[torch.optim.Optimizer], Sequence[float]], None] | None = None,
    is_local: Callable[[str], bool] = lambda name: False,
    after_step: Callable[[int, list[nn.Module]], None] = lambda number, models: None,
) -> ReferenceResult:
    """
    Trains, averaging after each `sync_every` optimizer steps and after the last one.

    Args:
        model_factory (`Callable`):
            Makes the initial model. Called once: all groups start from the same weights.
        batches (`Sequence`):
            `[step][group][rank inside the group][micro-batch]`, as [`batches_by_step`] gives it.
        sync_every (`int`):
            H, optimizer steps in a round, or the numbers of steps after which the groups are averaged.
        optimizer_factory (`Callable`):
            Makes a group's optimizer from its trainable parameters.
        learning_rate (`Callable[[int], float]`, *optional*):
            Learning rate of the optimizer step with this number, from 0. By default the optimizer's own.
        max_grad_norm (`float`, *optional*):
            Limit of the norm of a group's gradient.
        loss (`Callable`, *optional*, defaults to `causal_lm_loss`):
            `loss(model, batch, num_items)`: this micro-batch's share of the group's loss.
        count (`Callable`, *optional*, defaults to `num_label_tokens`):
            Items of a micro-batch. `num_items` is the sum over the group's ranks and micro-batches of the step.
        weights (`Callable[[int, list[int]], Sequence[float]]`, *optional*):
            `weights(round, items)` with the items which each group has seen in the round. Uniform by default.
        outer (`Callable[[State, State, int], State]`, *optional*):
            `outer(previous, average, round)`: trainable parameters after the border. The average by default.
        synchronous (`Callable[[int], bool]`, *optional*):
            Whether the step with this number, from 0, has one batch over all groups. Where such steps begin, the groups'
            optimizer moments are averaged.
        before_step (`Callable[[torch.nn.Module, State], None]`, *optional*):
            `before_step(model, anchor)`: called with a group's model between clipping and its optimizer's step.
        at_border (`Callable`, *optional*):
            `at_border(models, optimizers, shares)`: called when the groups hold the new model.
        is_local (`Callable[[str], bool]`, *optional*):
            Which parameters each group keeps for itself.
        after_step (`Callable[[int, list[torch.nn.Module]], None]`, *optional*):
            `after_step(number, models)`: called when all groups have made so many steps, ahead of a border.

    Returns:
        `ReferenceResult`: Weights, losses, norms.
    """
    loss = loss or causal_lm_loss
    count = count or num_label_tokens
    num_groups, num_ranks = len(batches[0]), len(batches[0][0])
    models = [model_factory()]
    models += [copy.deepcopy(models[0]) for _ in range(num_groups - 1)]
    optimizers = [optimizer_factory([p for p in model.parameters() if p.requires_grad]) for model in models]
    # Parameters belong to a group, buffers to a rank: nothing inside a group keeps those of its ranks equal.
    buffers = [[_clone(dict(model.named_buffers())) for _ in range(num_ranks)] for model in models]
    result = ReferenceResult(models=models, optimizers=optimizers)
    anchor = _clone(_trainable(models[0]))
    seen = [0] * num_groups

    for step, step_batches in enumerate(batches):
        if synchronous(step):
            # Every group computes the same step, of the ranks of all groups.
            if step and not synchronous(step - 1):
                _average_moments(optimizers)
            step_batches = [[rank for group in step_batches for rank in group]] * num_groups
        losses, norms, items = [], [], []
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for param_group in optimizer.param_groups if learning_rate else ():
                param_group["lr"] = learning_rate(step)  # type: ignore[misc]
            num_items = sum(count(batch) for rank in step_batches[group] for batch in rank)
            model.train()
            total = 0.0
            for rank, micro_batches in enumerate(step_batches[group]):
                _load(dict(model.named_buffers()), buffers[group][rank % num_ranks])
                for batch in micro_batches:
                    value = loss(model, batch, num_items)
                    value.backward()
                    total += value.item()
                buffers[group][rank % num_ranks] = _clone(dict(model.named_buffers()))
            limit = float("inf") if max_grad_norm is None else max_grad_norm
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            if before_step:
                before_step(model, anchor)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            items.append(num_items)
            seen[group] += num_items
        result.losses.append(losses)
        result.grad_norms.append(norms)
        result.num_items.append(items)
        after_step(step + 1, models)

        due = (step + 1) % sync_every == 0 if isinstance(sync_every, int) else step + 1 in sync_every
        if due or step + 1 == len(batches):
            number = len(result.borders)
            shares = weights(number, seen) if weights else [1.0 / num_groups] * num_groups
            average = weighted_average([_trainable(model) for model in models], shares)
            average = {name: tensor for name, tensor in average.items() if not is_local(name)}
            anchor = outer(anchor, average, number) if outer else average
            flat = [rank for group in buffers for rank in group]
            mean_buffers = weighted_average(flat, [1.0 / len(flat)] * len(flat))
            for group, model in enumerate(models):
                _load(_trainable(model), anchor)
                for rank in range(num_ranks):
                    _load(buffers[group][rank], mean_buffers)
                _load(dict(model.named_buffers()), buffers[group][0])
            if at_border:
                at_border(models, optimizers, shares)
            seen = [0] * num_groups
            result.borders.append(step + 1)
            result.border_states.append(_clone(models[0].state_dict()))

    result.state = result.border_states[-1]
    return result


def causal_lm_loss(model: nn.Module, batch: Batch, num_items: int) -> torch.Tensor:
    """
    Sum of the token losses of a micro-batch over the label tokens of the group's whole batch.

    Args:
        model (`torch.nn.Module`):
            A causal language model.
        batch (`dict[str, torch.Tensor]`):
            `labels` of shape `(batch, length)` and the inputs.
        num_items (`int`):
            Label tokens of all ranks of the group and all micro-batches of the optimizer step.

    Returns:
        `torch.Tensor`: Scalar. Its sum over ranks and micro-batches is the group's loss.
    """
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    # As Transformers does, whatever the model's type: a double model is compared in the same precision.
    logits = logits.float()
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )
    return total / num_items


def num_label_tokens(batch: Batch) -> int:
    """
    Args:
        batch (`dict[str, torch.Tensor]`):
            `labels` of shape `(batch, length)`.

    Returns:
        `int`: Predicted tokens; the first label of a sequence predicts nothing.
    """
    return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())


def weighted_average(states: Sequence[State], weights: Sequence[float]) -> State:
    """
    The weighted sum of states, in fp32, or in fp64 for double tensors.

    Args:
        states (`Sequence[dict[str, torch.Tensor]]`):
            States with the same keys.
        weights (`Sequence[float]`):
            One weight per state.

    Returns:
        `dict[str, torch.Tensor]`: The average of the floating-point entries, in the precision of the sum.
    """
    average: State = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            dtype = torch.promote_types(first.dtype, torch.float32)
            average[name] = sum(  # type: ignore[assignment]
                state[name].detach().to(dtype) * weight for state, weight in zip(states, weights, strict=True)
            )
    return average


@torch.no_grad()
def _average_moments(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for states in zip(*(list(optimizer.state.values()) for optimizer in optimizers), strict=True):
        for name, value in states[0].items():
            if value.ndim:
                mean = sum(state[name] for state in states) / len(states)
                for state in states:
                    state[name].copy_(mean)


def _trainable(model: nn.Module) -> State:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _clone(state: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@torch.no_grad()
def _load(target: State, source: State) -> None:
    for name in target.keys() & source.keys():
        target[name].copy_(source[name])

"""
Federated training of G groups in one process, on full models, one group after another: what the sharded, parallel run
has to reproduce. It follows the algorithm literally and shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .data import IGNORED_LABEL, Batch
from .reference_groups import State, average_moments, clone, make_groups, take, trainable, weighted_average


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
    groups = make_groups(model_factory, optimizer_factory, len(batches[0]), len(batches[0][0]))
    models, optimizers = [group.model for group in groups], [group.optimizer for group in groups]
    result = ReferenceResult(models=models, optimizers=optimizers)
    anchor = clone(trainable(models[0]))
    seen = [0] * len(groups)

    for step, step_batches in enumerate(batches):
        if synchronous(step):
            # Every group computes the same step, of the ranks of all groups.
            if step and not synchronous(step - 1):
                average_moments(optimizers)
            step_batches = [[rank for group in step_batches for rank in group]] * len(groups)
        losses, norms, items = [], [], []
        for group, group_batches in zip(groups, step_batches, strict=True):
            if learning_rate:
                group.set_learning_rate(learning_rate(step))
            items.append(sum(count(batch) for rank in group_batches for batch in rank))
            losses.append(group.backward(group_batches, loss, items[-1]))
            norms.append(group.clip(max_grad_norm))
            if before_step:
                before_step(group.model, anchor)
            group.step()
        result.losses.append(losses)
        result.grad_norms.append(norms)
        result.num_items.append(items)
        seen = [before + new for before, new in zip(seen, items, strict=True)]
        after_step(step + 1, models)

        due = (step + 1) % sync_every == 0 if isinstance(sync_every, int) else step + 1 in sync_every
        if due or step + 1 == len(batches):
            number = len(result.borders)
            shares = weights(number, seen) if weights else [1.0 / len(groups)] * len(groups)
            average = weighted_average([trainable(model) for model in models], shares)
            average = {name: tensor for name, tensor in average.items() if not is_local(name)}
            anchor = outer(anchor, average, number) if outer else average
            take(groups, anchor)
            if at_border:
                at_border(models, optimizers, shares)
            seen = [0] * len(groups)
            result.borders.append(step + 1)
            result.border_states.append(clone(models[0].state_dict()))

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

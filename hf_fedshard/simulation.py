"""
The groups of a federation one after another in a single process: the package's own rounds, weights, moments and outer
steps on whole models, without process groups. Exact, and cheap enough for research on small models.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import nn

from .border import Border
from .config import FederationConfig
from .handshake import FederationMismatchError
from .layout import FederationLayout
from .lora import check_adapters
from .metrics import RoundMetrics
from .selection import Selection
from .simulated_gradients import average_gradients
from .simulated_groups import SimulatedGroup
from .simulated_peers import Alone, InMemoryPeer, Meeting, SimulatedPeers


T = TypeVar("T")


class Simulation:
    """
    A federation in one process. Each group trains when the loop says so; at a border the groups meet, in threads, and run
    what processes run: weights, averages, moments, outer step. Between processes sums may be rounded in another order.

    With `overlap_steps` they meet where an averaging starts, and each takes its outcome in when it is due: what a delay, the
    alpha and fragments cost in loss can be studied, while times are those of a process that does one thing after another.

    Takes the memory of G models and optimizers, and of the outer state and the snapshots G times.

    Args:
        model (`nn.Module`):
            The initial model; group 0 trains it, the others copies of it.
        config ([`FederationConfig`]):
            The settings.
        optimizer (`Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]`):
            Makes a group's inner optimizer from the parameters that train.
        num_groups (`int`, *optional*):
            G. Defaults to that of `config`.
        num_training_steps (`int`, *optional*):
            Optimizer steps of the whole run. Needed with `sync_steps_at_end`.

    Raises:
        ValueError: If the settings do not fit the model or a single process, or there are fewer than 2 groups.

    Example:

    ```python
    import torch

    simulation = Simulation(model, FederationConfig(num_groups=2, sync_every=8), torch.optim.AdamW)
    batches = iter(dataloader)
    for _ in range(10):
        for group in simulation.groups:  # one after another
            loss = group.model(**next(batches)).loss
            loss.backward()
            group.count_step(loss)
        simulation.average_gradients()  # where the step is synchronous
        for group in simulation.groups:
            group.optimizer.step()
            group.optimizer.zero_grad()
        metrics = simulation.step()  # those of a round, where one has ended
    simulation.finish()
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        config: FederationConfig,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        num_groups: int | None = None,
        num_training_steps: int | None = None,
    ) -> None:
        size = num_groups or config.num_groups
        if size is None or size < 2:
            raise ValueError(f"A simulation needs at least 2 groups, but num_groups is {size!r}.")
        _check_settings(config)
        selection = Selection(config)
        selection.check(model)
        check_adapters(model, config.lora_average, selection)
        self.config = config
        self._meeting = Meeting(size)
        device = next(model.parameters()).device
        layout = FederationLayout(size, 1, {"dp_shard": 1})
        models = [model, *(copy.deepcopy(model) for _ in range(size - 1))]
        self.groups: list[SimulatedGroup] = []
        for index, own in enumerate(models):
            peers = SimulatedPeers(layout, InMemoryPeer(self._meeting, index), Alone(), device)
            inner = optimizer([param for param in own.parameters() if param.requires_grad])
            self.groups.append(SimulatedGroup(index, own, inner, peers, config, num_training_steps))

    @property
    def model(self) -> nn.Module:
        """The model of group 0: at a border that of all."""
        return self.groups[0].model

    @property
    def at_border(self) -> bool:
        """Whether all groups hold one model."""
        return all(group.rounds.at_border for group in self.groups)

    @property
    def synchronous(self) -> bool:
        """Whether the next step is synchronous: with the mean of all groups' gradients."""
        return self.groups[0].rounds.synchronous

    def average_gradients(self) -> None:
        """
        To be called when every group has done its backward passes and none has made its step: in a synchronous step the
        gradients of all groups become their mean, ahead of clipping. In all other steps it does nothing, so a loop that has
        synchronous steps calls it in every one.

        Raises:
            ValueError: If some groups have a gradient of a parameter and others have none.
        """
        if self.synchronous:
            parts = [part for group in self.groups if (part := group.gradients) is not None]
            average_gradients([group.model for group in self.groups], parts)

    def step(self) -> RoundMetrics | None:
        """
        To be called when every group has made a step: averages them if the round is over. With `overlap_steps` it starts and
        takes in what is due.

        Returns:
            [`RoundMetrics`] or `None`: The metrics where a round ended, or its outcome was taken in, as of [`Rounds.step`].

        Raises:
            FederationMismatchError: If the groups have made different numbers of steps, where they are averaged.
        """
        rounds = [group.rounds for group in self.groups]
        if any(each.is_due and each.needs_border for each in rounds):
            return self.close().report()
        if not any(each.has_to_advance for each in rounds):
            return None
        steps = [each.course.num_steps for each in rounds]
        if len(set(steps)) > 1:  # the first to be averaged would wait for the others
            raise FederationMismatchError(
                f"The groups have made different numbers of optimizer steps: {steps} in group 0, 1, .... Call `step()` when "
                "each of them has made one."
            )
        border = self._together(lambda group: group.rounds.advance())[0]
        return None if border is None else border.report()

    def finish(self) -> RoundMetrics | None:
        """
        Averages the last round even if it is short.

        Returns:
            [`RoundMetrics`] or `None`: Its metrics, as of [`Rounds.finish`]; `None` if the groups are at a border.
        """
        metrics = None if self.at_border else self.close().report()
        for group in self.groups:
            group.rounds.release()
        return metrics

    def close(self, sums: Mapping[str, float] | None = None) -> Border:
        """
        Closes the round, as [`Rounds.close`] on all groups at once.

        Args:
            sums (`Mapping[str, float]`, *optional*):
                Numbers that each group hands in.

        Returns:
            [`Border`]: What group 0 saw.
        """
        return self._together(lambda group: group.rounds.close(sums=sums))[0]

    def _together(self, call: Callable[[SimulatedGroup], T]) -> list[T]:
        return self._meeting.hold([functools.partial(call, group) for group in self.groups])


def _check_settings(config: FederationConfig) -> None:
    if config.slow_backend:
        raise ValueError(f"A simulation averages in memory: leave slow_backend={config.slow_backend!r} unset.")
    if config.sync_every == "auto":
        raise ValueError(
            "sync_every='auto' follows the time that steps and averagings take, and a simulation takes another one. Give "
            "a number, a list of periods, or 'drift'."
        )

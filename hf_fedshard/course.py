"""The course of a federated run: how long each round is, and whether its steps are synchronised over all groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .collectives import broadcast_from_first
from .config import FederationConfig
from .initial import hold_the_same_bits
from .measured_periods import make_periods
from .mesh import FederationMesh
from .peers import Peers
from .periods import MeasuredRound
from .simulated_gradients import SimulatedGradients
from .synchronous import GradientSync, Phases, SynchronousGradients
from .unified_moments import unify_moments


logger = logging.getLogger(__name__)


class Course:
    """
    Knows where in a run the model is, and what comes next. Changes at borders only, on all ranks alike.

    Args:
        model (`nn.Module`):
            The prepared model.
        mesh ([`Peers`]):
            The federation. With one group there is nothing to choose and nothing to synchronise.
        config ([`FederationConfig`]):
            Its settings.
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        num_training_steps (`int`, *optional*):
            Optimizer steps of the whole run.

    Attributes:
        num_steps (`int`): Optimizer steps behind, those of the running round included.
        synchronous (`bool`): Whether the steps of the round that is running, or begins next, are synchronous.
        gradients ([`SynchronousGradients`], *optional*): Averages the gradients of synchronous steps, if there are any.

    Raises:
        ValueError: If the length of the run is needed and missing, or FSDP2's seam is taken.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Peers,
        config: FederationConfig,
        optimizers: Sequence[torch.optim.Optimizer],
        num_training_steps: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.config = config
        self.optimizers = optimizers
        self.num_steps = 0
        self.synchronous = False
        self.periods = make_periods(config)
        self.phases = Phases(config.sync_steps_at_start, config.sync_steps_at_end, num_training_steps)
        self.gradients: SynchronousGradients | None = None
        if mesh.layout.num_groups > 1 and (config.sync_steps_at_start or config.sync_steps_at_end):
            if isinstance(mesh, FederationMesh):
                self.gradients = GradientSync(model, mesh)
            else:
                self.gradients = SimulatedGradients()

    @property
    def period(self) -> int:
        """H of the round that is running or begins next."""
        return self.periods.current

    @property
    def turns_synchronous(self) -> bool:
        """Whether the next step is synchronous."""
        return self.gradients is not None and self.phases.is_synchronous(self.num_steps)

    def steps_left(self, steps: int) -> float:
        """
        Steps to the end of the running round, which comes after a period, and where synchronous steps begin or end.

        Args:
            steps (`int`):
                Its steps so far, which [`~Course.num_steps`] includes.
        """
        return min(self.period, self.phases.steps_left(self.num_steps - steps)) - steps

    def begin(self) -> None:
        """
        Prepares the round that begins next, at a border. Collective over the world where synchronous steps begin: the
        groups' optimizers then get one state.
        """
        if self.gradients is None:
            return
        before, self.synchronous = self.synchronous, self.phases.is_synchronous(self.num_steps)
        if self.synchronous and not before and self.num_steps:
            sent, _ = unify_moments(self.optimizers, self.mesh, self.config.bucket_size_bytes)
            self.gradients.bytes_sent += sent
        self.gradients.switch(self.synchronous)

    def end(self, found: MeasuredRound, agreed: bool = False) -> None:
        """
        Chooses the next period. Collective over the world where the choice rests on measurements: all ranks take rank 0's.

        Args:
            found ([`MeasuredRound`]):
                The round that has ended. Synchronous ones tell nothing about the period.
            agreed (`bool`, defaults to `False`):
                Whether all ranks were given the same numbers, so that nothing has to be sent.
        """
        measured = self.periods.measured
        if self.synchronous or (measured and self.mesh.layout.num_groups == 1):
            return
        self.periods.after_round(found)
        if measured and not agreed:
            chosen = torch.tensor(self.period, dtype=torch.int64, device=self.mesh.device)
            broadcast_from_first(chosen, self.mesh.fed, self.mesh.group)
            self.periods.current = int(chosen)
        if self.periods.news and self.mesh.is_main:
            logger.info(self.periods.news)
        self.periods.news = ""

    def holds_one_model(self, shards: Mapping[str, torch.Tensor]) -> bool:
        """
        Whether the groups hold one model already at the end of a round, as they do after synchronous steps. Collective over
        the world after those.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                This rank's.
        """
        if not self.synchronous or self.gradients is None:
            return False
        equal = hold_the_same_bits([shards], self.mesh)
        if not equal and self.mesh.is_main:
            logger.warning(
                "The groups differ after synchronous steps: something else than the optimizer has changed parameters on "
                "some ranks only. They are averaged."
            )
        return equal

    def slow_bytes(self, of_averaging: int) -> int:
        """
        Bytes that this rank sends to other groups in the round that ends. After synchronous steps without the averaging, as
        long as these hold one model: see [`~Course.holds_one_model`].

        Args:
            of_averaging (`int`):
                What an averaging takes.
        """
        if self.gradients is None:
            return of_averaging
        return self.gradients.take_bytes() + (0 if self.synchronous else of_averaging)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, at a border, fit for JSON."""
        # What was measured holds for this shape of the world alone.
        shape = str(self.mesh.layout) if self.periods.measured else ""
        periods = {"sync_every": self.config.sync_every, "shape": shape, **self.periods.state_dict()}
        return {"steps": self.num_steps, "periods": periods}

    def load_state_dict(self, state: Mapping[str, Any], inside: bool = False) -> None:
        """
        Goes on from a checkpoint's place. Collective over the world where synchronous steps at the end go on, and only at a
        border.

        Args:
            state (`Mapping[str, Any]`):
                From [`~Course.state_dict`]. With another `sync_every`, or another shape of the world where the period was
                measured, the periods begin anew.
            inside (`bool`, defaults to `False`):
                Whether the place is inside a round, whose steps are then the group's own.
        """
        self.num_steps = int(state.get("steps", 0))
        self.periods = make_periods(self.config)
        stored = dict(state.get("periods") or {})
        same = stored.pop("sync_every", None) == self.config.sync_every
        if stored.pop("shape", "") in ("", str(self.mesh.layout)) and same:
            self.periods.load_state_dict(stored)
        self.synchronous = False
        if not inside:
            self.begin()
        elif self.gradients is not None:
            self.gradients.switch(False)

    def release(self) -> None:
        """Takes the hooks out of the model."""
        if self.gradients is not None:
            self.gradients.switch(False)

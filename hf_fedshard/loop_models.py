"""The models that an Accelerate loop has federated, in a checkpoint: the first at its head, each other in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .checkpoint import load_group_state, load_model, save_federation
from .checkpoint_layout import read_description
from .checkpoint_state import GroupState, Place
from .loop_seams import check_border
from .manifest import CheckpointError
from .model_files import gather_adapters, write_model_files
from .outer_checkpoint import resume_outer_state, take_outer_state
from .rounds import Rounds
from .seams import check_attribute


class LoopModels:
    """
    Writes and reads all models that an accelerator's loop has federated, in the order in which that was done. The folder of
    each is laid out as the checkpoint of a single one, so that it can be exported by itself.

    Args:
        accelerator (`Accelerator`):
            Whose schedulers, registered objects and gradient scaler are stored as well, with the first model.
        place ([`Place`]):
            This rank's place in the federation.
        rule (`str`):
            `optimizer_on_reshape`.
    """

    def __init__(self, accelerator: Any, place: Place, rule: str) -> None:
        self.accelerator = accelerator
        self.place = place
        self.rule = rule
        self.rounds: list[Rounds] = []

    def add(self, rounds: Rounds) -> None:
        """
        Has a model be part of the checkpoints, also when its federation is over, until the accelerator forgets its models
        (`free_memory`, `clear`).

        Args:
            rounds ([`Rounds`]):
                What averages it; in the place of what has done so before.
        """
        check_attribute(self.accelerator, "_models")
        known = {id(module) for model in self.accelerator._models for module in model.modules()}
        self.rounds = [each for each in self.rounds if id(each.model) in known or each.model is rounds.model]
        models = [each.model for each in self.rounds]
        if rounds.model in models:
            self.rounds[models.index(rounds.model)] = rounds
        else:
            self.rounds.append(rounds)

    @property
    def nested(self) -> list[str]:
        """Folders of the models but the first, in a checkpoint."""
        return [f"model_{index}" for index in range(1, len(self.rounds))]

    def check_border(self, what: str) -> None:
        """
        Refuses what needs one model of each kind.

        Args:
            what (`str`):
                The call, for the message.

        Raises:
            RuntimeError: If any of them is inside a round.
        """
        for rounds in self.rounds:
            check_border(rounds, what)

    def save(self, folder: Path) -> tuple[dict[str, int], list[dict[str, torch.Tensor]]]:
        """
        Writes the models and the groups' states, one after another. Collective over the world.

        Args:
            folder (`Path`):
                The checkpoint.

        Returns:
            `tuple[dict[str, int], list[dict[str, torch.Tensor]]]`: crc32 of the files that this rank has written, by path in
            the folder; and the adapters of each model, see [`gather_adapters`].

        Raises:
            CheckpointError: On every rank, if any rank cannot write.
        """
        written: dict[str, int] = {}
        adapters = []
        for index, (name, rounds) in enumerate(self._places()):
            description = {"round": rounds.round, "step": self.accelerator.step, "progress": rounds.state_dict()}
            if not index:
                description["num_models"] = len(self.rounds)
            outer = take_outer_state(rounds.averager)
            found = save_federation(
                folder / name, rounds.model, self._group_state(index), self.place, description, outer=outer
            )
            written |= {(Path(name) / file).as_posix(): crc32 for file, crc32 in found.items()}
            adapters.append(gather_adapters(rounds.model))
        return written, adapters

    def write_files(self, folder: Path, adapters: list[dict[str, torch.Tensor]]) -> None:
        """
        Writes the models' configurations and adapters, on one rank.

        Args:
            folder (`Path`):
                The checkpoint.
            adapters (`list[dict[str, torch.Tensor]]`):
                From [`~LoopModels.save`].
        """
        for (name, rounds), own in zip(self._places(), adapters, strict=True):
            write_model_files(rounds.model, folder / name, own)

    def load(self, folder: Path) -> list[dict[str, Any]]:
        """
        Reads the models and this group's states. Without communication.

        Args:
            folder (`Path`):
                The checkpoint.

        Returns:
            `list[dict[str, Any]]`: What it says of each.

        Raises:
            CheckpointError: If it is of other models, or of another number of them.
        """
        first = read_description(folder)
        stored = first.get("num_models", 1)
        if stored != len(self.rounds):
            raise CheckpointError(
                f"The checkpoint holds {stored} federated models, and this run has federated {len(self.rounds)}. Call "
                "plugin.federate for each model, in the same order, before load_state."
            )
        for index, (name, rounds) in enumerate(self._places()):
            load_model(folder / name, rounds.model, self.place, rounds.averager.selection.is_local)
            load_group_state(folder / name, rounds.model, self._group_state(index), self.place, self.rule)
        return [first, *(read_description(folder / name) for name in self.nested)]

    def resume(self, folder: Path, saved: list[dict[str, Any]]) -> None:
        """
        Has the rounds go on from a checkpoint whose models are read. Collective over the world.

        Args:
            folder (`Path`):
                The checkpoint.
            saved (`list[dict[str, Any]]`):
                From [`~LoopModels.load`].

        Raises:
            CheckpointError: On every rank, if it is of another outer loop.
        """
        for (name, rounds), own in zip(self._places(), saved, strict=True):
            rounds.restore(own.get("progress") or {"round": own["round"], "steps": 0})
            resume_outer_state(folder / name, rounds.averager, self.place)

    def _places(self) -> list[tuple[str, Rounds]]:
        return list(zip([".", *self.nested], self.rounds, strict=True))

    def _group_state(self, index: int) -> GroupState:
        accelerator, optimizers = self.accelerator, self.rounds[index].optimizers
        if index:
            return GroupState(optimizers)
        others = {f"scheduler {number}": item for number, item in enumerate(accelerator._schedulers)}
        others |= {f"registered object {number}": item for number, item in enumerate(accelerator._custom_objects)}
        if accelerator.scaler is not None:
            others["gradient scaler"] = accelerator.scaler
        return GroupState(optimizers, others)

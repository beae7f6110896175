"""`accelerator.save_state` and `load_state` of a federated loop: the same checkpoints as under Trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator

from .checkpoint import load_group_state, load_model, save_federation
from .checkpoint_choice import check_whole, list_checkpoints
from .checkpoint_folder import Staging, clean_up, rotate
from .checkpoint_layout import read_description
from .checkpoint_state import GroupState, Place
from .manifest import CheckpointError, has_manifest
from .model_files import gather_adapters, write_model_files
from .outer_checkpoint import resume_outer_state, take_outer_state
from .parts import refuse
from .rank_state import load_rank_state, save_rank_state
from .reshape import describe_reshape
from .rounds import Rounds
from .seams import Patches, check_seams
from .shared_errors import together


logger = logging.getLogger(__name__)

Method = Callable[..., Any]

SEAMS = {
    "save_state": ("output_dir", "safe_serialization"),
    "load_state": ("input_dir", "load_kwargs"),
}


class AcceleratorCheckpoints:
    """
    Group-correct checkpoints of an Accelerate loop, by replacing `save_state` and `load_state` on the accelerator.

    Not by Accelerate's hooks: those of `save_state` run when model and optimizer are written, those of `load_state` when
    they are read.

    Args:
        accelerator (`Accelerator`):
            The instance.
        rounds ([`Rounds`]):
            What averages its model.
        place ([`Place`]):
            This rank's place in the federation.
        rule (`str`):
            `optimizer_on_reshape`.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    def __init__(self, accelerator: Accelerator, rounds: Rounds, place: Place, rule: str) -> None:
        check_seams(Accelerator, SEAMS)
        self.accelerator: Any = accelerator
        self.rounds = rounds
        self.place = place
        self.rule = rule
        patches = Patches()
        patches.replace(accelerator, "save_state", lambda original: self.save_state)
        patches.replace(accelerator, "load_state", lambda original: self.load_state)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """
        Takes the place of `Accelerator.save_state`: at a border, aside, complete before older ones are deleted.
        Collective over the world.

        Args:
            output_dir (`str`, *optional*):
                The checkpoint. Without it, and with automatic checkpoint naming, the next in `project_dir`.
            safe_serialization (`bool`, defaults to `True`):
                Must be true: nothing is pickled.
            kwargs (`Any`):
                None are known.

        Returns:
            `str`: The folder.

        Raises:
            RuntimeError: Inside a round.
            ValueError: On wrong arguments.
            CheckpointError: On every rank, if any cannot write.
        """
        check_border(self.rounds, "accelerator.save_state")
        if not safe_serialization or kwargs:
            raise ValueError("save_state of a federated run takes an output_dir only: it pickles nothing.")
        accelerator, project = self.accelerator, self.accelerator.project_configuration
        automatic = project.automatic_checkpoint_naming
        folder = self._automatic_folder() / f"checkpoint_{accelerator.save_iteration}" if automatic else output_dir
        if folder is None:
            raise ValueError("Give save_state an output_dir, or switch automatic_checkpoint_naming on.")
        final = Path(folder)
        staging = Staging(final)
        error: Exception | None = None
        if automatic and final.exists():
            error = ValueError(
                f"{final} exists. Set accelerator.project_configuration.iteration to the number to go on from."
            )
        elif final.exists() and not has_manifest(final) and any(final.iterdir()):
            error = ValueError(
                f"{final} exists and is no checkpoint, and would be replaced. Give a folder of its own."
            )
        together("Saving a checkpoint", error)
        # Order on every rank, all over the world but where said: the folder, weights and groups' states, adapters
        # (inside the group), an agreement about the files of single ranks, the commit, an agreement about rotation.
        staging.begin()
        progress = self.rounds.state_dict()
        description = {"round": self.rounds.round, "step": accelerator.step, "progress": progress}
        outer = take_outer_state(self.rounds.averager)
        written = save_federation(
            staging.folder, self.rounds.model, self._group_state(), self.place, description, outer=outer
        )
        adapters = gather_adapters(self.rounds.model)
        try:
            states = [self._position(dataloader) for dataloader in accelerator._dataloaders]
            save_rank_state(staging.folder, dist.get_rank(), {"step": accelerator.step, "data": states})
            for hook in accelerator._save_model_state_pre_hook.values():
                hook(accelerator._models, [], str(staging.folder))
            if accelerator.is_main_process:
                write_model_files(self.rounds.model, staging.folder, adapters)
        except Exception as problem:
            error = problem
        together("Saving a checkpoint", error)
        staging.commit(written)
        if automatic and accelerator.is_main_process:
            try:
                rotate(final.parent, project.total_limit, [final])
            except OSError as problem:
                error = problem
        together("Deleting old checkpoints", error)
        project.iteration += 1
        return str(final)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """
        Takes the place of `Accelerator.load_state`. Collective over the world. The next step begins a round.

        Args:
            input_dir (`str`, *optional*):
                The checkpoint. Without it, and with automatic checkpoint naming, the newest in `project_dir`.
            load_kwargs (`dict`, *optional*):
                Without effect: nothing is unpickled.
            kwargs (`Any`):
                The same.

        Raises:
            ValueError: If there is no checkpoint to load.
            CheckpointError: On every rank, if it is damaged, or of another run; nothing is loaded from a damaged one.
        """
        folder = Path(input_dir) if input_dir is not None else None
        parent = self._automatic_folder() if folder is None else folder.parent
        chosen: list[Path | None] = [folder]
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                clean_up(parent)
                chosen = [folder or next(iter(list_checkpoints(parent)), None)]
            except OSError as problem:
                error = problem
        together("Loading a checkpoint", error)
        dist.broadcast_object_list(chosen, src=0)
        if chosen[0] is None:
            raise ValueError(f"There is no checkpoint in {parent}.")
        found = chosen[0]
        check_whole(found, "accelerator.load_state({!r})")
        saved: dict[str, Any] = {}
        try:
            saved = self._load(found)
        except Exception as problem:
            error = problem
        # Before the rounds go on: they exchange moments where synchronous steps do, and would wait for a rank that has failed.
        together("Loading a checkpoint", error)
        self.rounds.restore(saved.get("progress") or {"round": saved["round"], "steps": 0})
        resume_outer_state(found, self.rounds.averager, self.place)
        sentence = describe_reshape(saved, self.place.layout, self.rule)
        if sentence and self.accelerator.is_main_process:
            logger.warning(sentence)

    def _load(self, folder: Path) -> dict[str, Any]:
        """What each rank reads by itself, and the description. Without communication."""
        accelerator = self.accelerator
        refuse(folder, "accelerator.load_state: a Trainer wrote it, and resumes from it")
        load_model(folder, self.rounds.model, self.place, self.rounds.averager.selection.is_local)
        load_group_state(folder, self.rounds.model, self._group_state(), self.place, self.rule)
        saved = read_description(folder)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook([], str(folder))
        state = load_rank_state(folder, dist.get_rank())
        positions = [] if state is None else state["data"]
        same_world = saved["world_size"] == self.place.layout.world_size
        if any(position is not None for position in positions) and not same_world:
            raise CheckpointError(
                f"The positions of stateful data loaders were saved by {saved['world_size']} ranks and cannot be carried "
                f"over to {self.place.layout.world_size}. Switch use_stateful_dataloader off and skip batches."
            )
        for dataloader, position in zip(accelerator._dataloaders, positions, strict=False):
            if position is not None:
                dataloader.load_state_dict(position)
        accelerator.step = saved["step"] if state is None else state["step"]
        return saved

    def _group_state(self) -> GroupState:
        accelerator = self.accelerator
        others = {f"scheduler {index}": item for index, item in enumerate(accelerator._schedulers)}
        others |= {f"registered object {index}": item for index, item in enumerate(accelerator._custom_objects)}
        if accelerator.scaler is not None:
            others["gradient scaler"] = accelerator.scaler
        return GroupState(self.rounds.optimizers, others)

    def _position(self, dataloader: Any) -> Any:
        return dataloader.state_dict() if getattr(dataloader, "use_stateful_dataloader", False) else None

    def _automatic_folder(self) -> Path:
        if not self.accelerator.project_configuration.automatic_checkpoint_naming:
            raise ValueError("Name the checkpoint, or switch automatic_checkpoint_naming on.")
        return Path(os.fspath(self.accelerator.project_dir)) / "checkpoints"


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

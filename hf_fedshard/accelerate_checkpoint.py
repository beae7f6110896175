"""`accelerator.save_state` and `load_state` of a federated loop: the same checkpoints as under Trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator

from .checkpoint_choice import check_whole, list_checkpoints
from .checkpoint_folder import Staging, clean_up, rotate
from .loop_models import LoopModels
from .manifest import CheckpointError, has_manifest
from .parts import refuse
from .rank_state import load_rank_state, save_rank_state
from .reshape import describe_reshape
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
        models ([`LoopModels`]):
            What it has federated, by now and later.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    def __init__(self, accelerator: Accelerator, models: LoopModels) -> None:
        check_seams(Accelerator, SEAMS)
        self.accelerator: Any = accelerator
        self.models = models
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
        self.models.check_border("accelerator.save_state")
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
        # Order on every rank, all over the world but where said: the folder; of each model its weights and groups' states, and
        # adapters (inside the group); an agreement about the files of single ranks, the commit, an agreement about rotation.
        staging.begin()
        written, adapters = self.models.save(staging.folder)
        try:
            states = [self._position(dataloader) for dataloader in accelerator._dataloaders]
            save_rank_state(staging.folder, dist.get_rank(), {"step": accelerator.step, "data": states})
            for hook in accelerator._save_model_state_pre_hook.values():
                hook(accelerator._models, [], str(staging.folder))
            if accelerator.is_main_process:
                self.models.write_files(staging.folder, adapters)
        except Exception as problem:
            error = problem
        together("Saving a checkpoint", error)
        staging.commit(written, self.models.nested)
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
        saved: list[dict[str, Any]] = []
        try:
            saved = self._load(found)
        except Exception as problem:
            error = problem
        # Before the rounds go on: they exchange moments where synchronous steps do, and would wait for a rank that has failed.
        together("Loading a checkpoint", error)
        self.models.resume(found, saved)
        sentence = describe_reshape(saved[0], self.models.place.layout, self.models.rule)
        if sentence and self.accelerator.is_main_process:
            logger.warning(sentence)

    def _load(self, folder: Path) -> list[dict[str, Any]]:
        """What each rank reads by itself, and the models' descriptions. Without communication."""
        accelerator = self.accelerator
        refuse(folder, "accelerator.load_state: a Trainer wrote it, and resumes from it")
        saved = self.models.load(folder)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook([], str(folder))
        state = load_rank_state(folder, dist.get_rank())
        positions = [] if state is None else state["data"]
        same_world = saved[0]["world_size"] == self.models.place.layout.world_size
        if any(position is not None for position in positions) and not same_world:
            raise CheckpointError(
                f"The positions of stateful data loaders were saved by {saved[0]['world_size']} ranks and cannot be carried "
                f"over to {self.models.place.layout.world_size}. Switch use_stateful_dataloader off and skip batches."
            )
        for dataloader, position in zip(accelerator._dataloaders, positions, strict=False):
            if position is not None:
                dataloader.load_state_dict(position)
        accelerator.step = saved[0]["step"] if state is None else state["step"]
        return saved

    def _position(self, dataloader: Any) -> Any:
        return dataloader.state_dict() if getattr(dataloader, "use_stateful_dataloader", False) else None

    def _automatic_folder(self) -> Path:
        if not self.accelerator.project_configuration.automatic_checkpoint_naming:
            raise ValueError("Name the checkpoint, or switch automatic_checkpoint_naming on.")
        return Path(os.fspath(self.accelerator.project_dir)) / "checkpoints"

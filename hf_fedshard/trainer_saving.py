"""How a Trainer saves: its own steps and files, with the parts that mix groups replaced on the instance."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from .checkpoint import save_federation
from .checkpoint_folder import Staging, rotate
from .checkpointed_run import CheckpointedRun
from .model_files import gather_adapters
from .outer_checkpoint import take_outer_state
from .seams import Patches
from .shared_errors import together
from .trainer_seams import Method, TrainerSeams


class TrainerSaving(TrainerSeams):
    """
    Group-correct saving of one Trainer, by replacing bound methods on this instance.

    - `_save_checkpoint`: Trainer's own, in a folder aside that gets its name when it is complete; rotation after that.
    - `save_model` inside of it: configuration and tokenizer, but the weights only where they are not stored anyway.
    - `_save_optimizer_and_scheduler`: weights, and each group's optimizer, schedule and scaler.
    - `_push_from_checkpoint`: waits for the final name.

    Random states stay Trainer's own: one file a rank.

    Args:
        run ([`CheckpointedRun`]):
            The run.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    SEAMS = {
        "save_model": ("output_dir", "_internal_call"),
        "_save": ("output_dir", "state_dict"),
        "_save_checkpoint": ("model", "trial"),
        "_get_output_dir": ("trial",),
        "_save_optimizer_and_scheduler": ("output_dir",),
        "_save_scaler": ("output_dir",),
        "_push_from_checkpoint": ("checkpoint_folder",),
    }

    def __init__(self, run: CheckpointedRun) -> None:
        super().__init__(run)
        self._written: dict[str, int] = {}
        self._saving = False

    def install(self) -> None:
        """Replaces the methods. Call once."""
        replace, trainer = self._patches.replace, self.trainer
        replace(trainer, "save_model", self._save_model)
        replace(trainer, "_save_checkpoint", self._save_checkpoint)
        replace(trainer, "_save_optimizer_and_scheduler", lambda original: self._save_state)
        # The scaler is part of the group's state.
        replace(trainer, "_save_scaler", lambda original: lambda output_dir: None)

    def _save_checkpoint(self, original: Method) -> Method:
        def save_checkpoint(model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:
            trainer = self.trainer
            state, arguments = trainer.state, trainer.args
            run_dir = Path(trainer._get_output_dir(trial=trial))
            staging = Staging(run_dir / f"checkpoint-{state.global_step}")
            # Order on every rank, all over the world: the folder, what `_save_checkpoint` does (weights, groups' states,
            # a barrier of Trainer's where there is a best step, which all ranks know), an agreement, the commit, and an
            # agreement after rotation. A rank that fails inside still reaches the agreement after it.
            staging.begin()
            pushes: list[str] = []
            patches = Patches()
            patches.replace(trainer, "_get_output_dir", lambda _: lambda trial=None: str(staging.parent))
            patches.replace(trainer, "_push_from_checkpoint", lambda _: pushes.append)
            limit, arguments.save_total_limit = arguments.save_total_limit, None
            error: Exception | None = None
            self._saving, self._written = True, {}
            try:
                original(model, trial, *args, **kwargs)
                self._name_best(run_dir, staging)
            except Exception as problem:
                error = problem
            finally:
                self._saving = False
                arguments.save_total_limit = limit
                patches.undo()
            together("Saving a checkpoint", error)
            staging.commit(self._written)
            if trainer.is_world_process_zero():
                best = state.best_model_checkpoint
                keep = [staging.final, *([Path(best)] if best else [])]
                try:
                    if pushes:
                        trainer._push_from_checkpoint(str(staging.final))
                    rotate(run_dir, limit, keep)
                except Exception as problem:
                    error = problem
            together("Pushing a checkpoint or deleting old ones", error)

        return save_checkpoint

    def _name_best(self, run_dir: Path, staging: Staging) -> None:
        """Trainer looked for the best checkpoint in the folder aside: puts the names as they will be."""
        trainer = self.trainer
        state = trainer.state
        if state.best_global_step:
            best = run_dir / f"checkpoint-{state.best_global_step}"
            if best.name == staging.final.name or best.exists():
                state.best_model_checkpoint = str(best)
        if trainer.args.should_save:
            state.save_to_json(os.path.join(staging.folder, TRAINER_STATE_NAME))

    def _save_model(self, original: Method) -> Method:
        def save_model(output_dir: str | None = None, _internal_call: bool = False) -> Any:
            if not self._saving:
                return original(output_dir, _internal_call)
            trainer = self.trainer
            pushed = trainer.args.push_to_hub and HubStrategy(trainer.args.hub_strategy) != HubStrategy.END
            plugin = trainer.accelerator.state.fsdp_plugin
            chosen = plugin.state_dict_type
            error: Exception | None = None
            try:
                if trainer.args.save_only_model or pushed:
                    plugin.state_dict_type = type(chosen).FULL_STATE_DICT
                    original(output_dir, _internal_call)
                else:
                    self._save_all_but_weights(Path(str(output_dir)))
            except Exception as problem:
                error = problem
            finally:
                plugin.state_dict_type = chosen
            together("Saving a checkpoint", error)
            return None

        return save_model

    def _save_all_but_weights(self, folder: Path) -> None:
        """Configuration, tokenizer and the like, by Trainer's own `_save`, which subclasses extend."""
        trainer = self.trainer
        adapters = gather_adapters(trainer.model)
        trainer._save(str(folder), state_dict=adapters)
        if trainer.args.should_save and not adapters:
            for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
                (folder / name).unlink(missing_ok=True)
            (folder / ADAPTER_SAFE_WEIGHTS_NAME).unlink(missing_ok=True)

    def _save_state(self, output_dir: str) -> None:
        trainer = self.trainer
        description = {
            "round": self.run.progress.get("round", 0),
            "global_step": trainer.state.global_step,
            "sync_every": self.run.config.sync_every,
            "pending_evaluation": self.run.pending_evaluation,
            "progress": self.run.progress,
        }
        outer = None if self.run.averager is None else take_outer_state(self.run.averager)
        self._written |= save_federation(
            Path(output_dir), trainer.model, self.run.group_state(), self.run.place, description, outer=outer
        )

"""How a Trainer saves and resumes: its own steps and files, with the parts that mix groups replaced on the instance."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from .averaging import ModelAverager
from .checkpoint import load_group_state, load_model, save_federation
from .checkpoint_choice import check_whole, list_checkpoints
from .checkpoint_folder import Staging, check_writable, clean_up, rotate
from .checkpoint_layout import DESCRIPTION_NAME, read_description
from .checkpoint_state import GroupState, Place
from .config import FederationConfig
from .group_checkpoint import load_buffers, load_progress
from .manifest import CheckpointError
from .model_files import gather_adapters
from .outer_checkpoint import take_outer_state
from .parts import IN_PARTS, PART, check_same_run, kind_of, part_name
from .reshape import describe_reshape
from .seams import Patches, check_attribute, check_seam
from .shared_errors import together


logger = logging.getLogger(__name__)

Method = Callable[..., Any]

SEAMS = {
    "train": ("resume_from_checkpoint",),
    "save_model": ("output_dir", "_internal_call"),
    "_save": ("output_dir", "state_dict"),
    "_save_checkpoint": ("model", "trial"),
    "_get_output_dir": ("trial",),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_scaler": ("output_dir",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_load_best_model": (),
    "_load_rng_state": ("checkpoint",),
}


class TrainerCheckpoints:
    """
    Group-correct checkpoints of one Trainer, by replacing bound methods on this instance.

    - `train`: finds the newest checkpoint, and refuses a damaged or a stock one before anything is loaded.
    - `_save_checkpoint`: Trainer's own, in a folder aside that gets its name when it is complete; rotation after that.
    - `save_model` inside of it: configuration and tokenizer, but the weights only where they are not stored anyway.
    - `_save_optimizer_and_scheduler`: weights, and each group's optimizer, schedule and scaler.
    - `_load_from_checkpoint`, `_load_optimizer_and_scheduler`, `_load_best_model`: read those.
    - `_push_from_checkpoint`: waits for the final name.

    Random states and the position in the data stay Trainer's own: one file a rank, and skipped batches.

    Args:
        trainer (`Trainer`):
            The instance.
        place ([`Place`]):
            This rank's place in the federation.
        config ([`FederationConfig`]):
            Its settings.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    def __init__(self, trainer: Trainer, place: Place, config: FederationConfig) -> None:
        for name, parameters in SEAMS.items():
            check_seam(Trainer, name, parameters)
        for attribute in ("lr_scheduler", "hp_search_backend"):
            check_attribute(trainer, attribute)
        self.trainer: Any = trainer
        self.place = place
        self.config = config
        self.progress: dict[str, Any] = {}
        """From [`Rounds.state_dict`]: to be kept up to date by whoever has the rounds, and restored by a resume."""
        self.averager: ModelAverager | None = None
        """What holds the state of the outer loop, while training."""
        self.inside: dict[str, Any] | None = None
        """Where this rank stood, if the run resumes inside a round."""
        self.resumed_from: Path | None = None
        """The checkpoint, or this group's part of one, that training goes on from."""
        self.pending_evaluation = False
        """Whether the checkpoint that is saved next leaves an evaluation out, and later whether it is to be made up for."""
        self._patches = Patches()
        self._written: dict[str, int] = {}
        self._saving = False

    def install(self) -> None:
        """Replaces the methods. Call once."""
        replace, trainer = self._patches.replace, self.trainer
        replace(trainer, "train", self._train)
        replace(trainer, "save_model", self._save_model)
        replace(trainer, "_save_checkpoint", self._save_checkpoint)
        replace(trainer, "_save_optimizer_and_scheduler", lambda original: self._save_state)
        # The scaler is part of the group's state.
        replace(trainer, "_save_scaler", lambda original: lambda output_dir: None)
        replace(trainer, "_load_scaler", lambda original: lambda checkpoint: None)
        replace(trainer, "_load_from_checkpoint", lambda original: self._load_weights)
        replace(trainer, "_load_optimizer_and_scheduler", lambda original: self._load_state)
        replace(trainer, "_load_best_model", self._load_best_model)
        replace(trainer, "_load_rng_state", self._load_rng_state)

    def remove(self) -> None:
        """Puts every method back."""
        self._patches.undo()

    def _train(self, original: Method) -> Method:
        def train(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            run_dir = Path(str(self.trainer.args.output_dir))
            error: Exception | None = None
            if dist.get_rank() == 0:
                try:
                    clean_up(run_dir)
                    if str(getattr(self.trainer.args.save_strategy, "value", self.trainer.args.save_strategy)) != "no":
                        check_writable(run_dir)
                except OSError as problem:
                    error = problem
            together("Preparing the output directory", error)
            self.progress, self.inside, self.pending_evaluation = {}, None, False
            self.resumed_from = None
            if not resume_from_checkpoint:
                return original(None, *args, **kwargs)
            if resume_from_checkpoint is True:
                # Rank 0 chooses: another rank's view of the folder may be older.
                newest: list[Path | None] = [next(iter(list_checkpoints(run_dir)), None)]
                dist.broadcast_object_list(newest, src=0)
                if newest[0] is None:
                    raise ValueError(f"No valid checkpoint found in output directory ({run_dir})")
                resume_from_checkpoint = str(newest[0])
            check_whole(Path(resume_from_checkpoint))
            if kind_of(Path(resume_from_checkpoint)) != IN_PARTS:
                return original(resume_from_checkpoint, *args, **kwargs)
            return self._resume_part(original, Path(resume_from_checkpoint), *args, **kwargs)

        return train

    def _resume_part(self, original: Method, folder: Path, *args: Any, **kwargs: Any) -> Any:
        """Inside a round each group reads a checkpoint of its own: its step, its log, its weights."""
        error: Exception | None = None
        try:
            check_same_run(folder, self.place.layout, self.config)
        except CheckpointError as problem:
            error = problem
        together("Resuming", error)
        arguments = self.trainer.args
        at_start, arguments.eval_on_start = arguments.eval_on_start, False
        if at_start and dist.get_rank() == 0:
            logger.warning(
                "eval_on_start is without effect: the run resumes inside a round, where there is no one model."
            )
        part = folder / part_name(self.place.group_index)
        try:
            return original(str(part), *args, **kwargs)
        finally:
            arguments.eval_on_start = at_start

    def group_state(self) -> GroupState:
        """What belongs to this rank's group alone."""
        trainer = self.trainer
        others: dict[str, Any] = {"schedule": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            others["gradient scaler"] = trainer.accelerator.scaler
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return GroupState([optimizer], others)

    # ---- saving ----

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
            "round": self.progress.get("round", 0),
            "global_step": trainer.state.global_step,
            "sync_every": self.config.sync_every,
            "pending_evaluation": self.pending_evaluation,
            "progress": self.progress,
        }
        outer = None if self.averager is None else take_outer_state(self.averager)
        self._written |= save_federation(
            Path(output_dir), trainer.model, self.group_state(), self.place, description, outer=outer
        )

    # ---- resuming ----

    def _load_weights(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        error: Exception | None = None
        try:
            model = self.trainer.model if model is None else model
            load_model(folder, model, self.place)
            if kind_of(folder) == PART:
                load_buffers(folder, model, self.place.group.rank())
        except CheckpointError as problem:
            error = problem
        together("Resuming", error)

    def _load_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, rule = Path(checkpoint), self.config.optimizer_on_reshape
        error: Exception | None = None
        try:
            if kind_of(folder) == PART:
                # The length of the run is known only here, where the data has been looked at.
                check_same_run(folder, self.place.layout, self.config, self.trainer.state.max_steps)
            load_group_state(folder, self.trainer.model, self.group_state(), self.place, rule)
            saved = read_description(folder)
            self.progress = {"round": saved["round"], **saved.get("progress", {})}
            self.inside = load_progress(folder) if kind_of(folder) == PART else None
            self.pending_evaluation = bool(saved.get("pending_evaluation"))
            self.resumed_from = folder
            sentence = describe_reshape(saved, self.place.layout, rule)
            if sentence and dist.get_rank() == 0:
                logger.warning(sentence)
        except CheckpointError as problem:
            error = problem
        together("Resuming", error)

    def _load_best_model(self, original: Method) -> Method:
        def load_best_model() -> None:
            best = Path(str(self.trainer.state.best_model_checkpoint))
            if not (best / DESCRIPTION_NAME).exists():
                original()
                return
            logger.info("Loading best model from %s (score: %s).", best, self.trainer.state.best_metric)
            self._load_weights(str(best), self.trainer.model)

        return load_best_model

    def _load_rng_state(self, original: Method) -> Method:
        def load_rng_state(checkpoint: str | None) -> None:
            original(checkpoint)
            if not self.pending_evaluation:
                return
            # The run was ended at a border where an evaluation was due. Here, after the random states are restored and
            # before the first step, everything is as it was there. All ranks have read the same description.
            self.pending_evaluation = False
            trainer = self.trainer
            trainer.control.should_evaluate = True
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss, None, trainer.model_wrapped, None, trainer.state.epoch, None, time.time()
            )
            trainer.control.should_evaluate = False

        return load_rng_state

"""How a Trainer resumes: which checkpoint it goes on from, and each group's own state read from it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .checkpoint import load_group_state, load_model
from .checkpoint_choice import check_whole, list_checkpoints
from .checkpoint_folder import check_writable, clean_up
from .checkpoint_layout import DESCRIPTION_NAME, read_description
from .group_checkpoint import load_buffers, load_progress
from .parts import IN_PARTS, PART, check_same_run, kind_of, part_name
from .reshape import describe_reshape
from .scheduled_requests import epoch_is_whole
from .shared_errors import together
from .trainer_seams import Method, TrainerSeams


logger = logging.getLogger(__name__)


class StoppedBeforeStep(Exception):
    """The evaluation that a run made up for has ended its training."""


class TrainerResuming(TrainerSeams):
    """
    Group-correct resuming of one Trainer, by replacing bound methods on this instance.

    - `train`: finds the newest checkpoint, and refuses a damaged or a stock one before anything is loaded.
    - `_load_from_checkpoint`, `_load_optimizer_and_scheduler`, `_load_best_model`: read what [`TrainerSaving`] writes.
    - `_load_rng_state`: makes up for an evaluation that a run left out when it was ended before its time.
    - `_run_epoch`: is left without a step if that evaluation stops the training.

    Random states and the position in the data stay Trainer's own: one file a rank, and skipped batches.

    Args:
        run ([`CheckpointedRun`]):
            The run.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    SEAMS = {
        "train": ("resume_from_checkpoint",),
        "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
        "_load_optimizer_and_scheduler": ("checkpoint",),
        "_load_scaler": ("checkpoint",),
        "_load_best_model": (),
        "_load_rng_state": ("checkpoint",),
        "_run_epoch": ("model", "epoch", "train_dataloader"),
        "_maybe_log_save_evaluate": ("tr_loss", "grad_norm", "model", "trial", "epoch"),
    }

    def install(self) -> None:
        """Replaces the methods. Call once."""
        replace, trainer = self._patches.replace, self.trainer
        replace(trainer, "train", self._train)
        # The scaler is part of the group's state.
        replace(trainer, "_load_scaler", lambda original: lambda checkpoint: None)
        replace(trainer, "_load_from_checkpoint", lambda original: self._load_weights)
        replace(trainer, "_load_optimizer_and_scheduler", lambda original: self._load_state)
        replace(trainer, "_load_best_model", self._load_best_model)
        replace(trainer, "_load_rng_state", self._load_rng_state)
        replace(trainer, "_run_epoch", self._run_epoch)

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
            self.run.progress, self.run.inside, self.run.pending_evaluation = {}, None, False
            self.run.resumed_from = None
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
            check_same_run(folder, self.run.place.layout, self.run.config)
        except Exception as problem:  # whatever it is, the other ranks must not be left waiting
            error = problem
        together("Resuming", error)
        arguments = self.trainer.args
        at_start, arguments.eval_on_start = arguments.eval_on_start, False
        if at_start and dist.get_rank() == 0:
            logger.warning(
                "eval_on_start is without effect: the run resumes inside a round, where there is no one model."
            )
        part = folder / part_name(self.run.place.group_index)
        try:
            return original(str(part), *args, **kwargs)
        finally:
            arguments.eval_on_start = at_start

    def _load_weights(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        error: Exception | None = None
        try:
            model = self.trainer.model if model is None else model
            load_model(folder, model, self.run.place)
            if kind_of(folder) == PART:
                load_buffers(folder, model, self.run.place.group.rank())
        except Exception as problem:  # whatever it is, the other ranks must not be left waiting
            error = problem
        together("Resuming", error)

    def _load_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, rule = Path(checkpoint), self.run.config.optimizer_on_reshape
        error: Exception | None = None
        try:
            if kind_of(folder) == PART:
                # The length of the run is known only here, where the data has been looked at.
                check_same_run(folder, self.run.place.layout, self.run.config, self.trainer.state.max_steps)
            load_group_state(folder, self.trainer.model, self.run.group_state(), self.run.place, rule)
            saved = read_description(folder)
            self.run.progress = {"round": saved["round"], **saved.get("progress", {})}
            self.run.inside = load_progress(folder) if kind_of(folder) == PART else None
            self.run.pending_evaluation = bool(saved.get("pending_evaluation"))
            self.run.resumed_from = folder
            sentence = describe_reshape(saved, self.run.place.layout, rule)
            if sentence and dist.get_rank() == 0:
                logger.warning(sentence)
        except Exception as problem:  # whatever it is, the other ranks must not be left waiting
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
            if not self.run.pending_evaluation:
                return
            # The run was ended at a border where an evaluation was due. Here, after the random states are restored and
            # before the first step, everything is as it was there. All ranks have read the same description.
            self.run.pending_evaluation = False
            trainer = self.trainer
            trainer.control.should_evaluate = True
            self._log_save_evaluate()
            trainer.control.should_evaluate = False
            if trainer.state.best_global_step == trainer.state.global_step:
                # Trainer notes it when it saves, which was done before this evaluation.
                trainer.state.best_model_checkpoint = str(self.run.resumed_from)
            if trainer.control.should_training_stop:
                # On all ranks alike. Trainer looks at it after a step, which an uninterrupted run would not have made.
                raise StoppedBeforeStep

        return load_rng_state

    def _run_epoch(self, original: Method) -> Method:
        def run_epoch(*args: Any, **kwargs: Any) -> None:
            trainer = self.trainer
            try:
                original(*args, **kwargs)
            except StoppedBeforeStep:
                # As where Trainer leaves an epoch by itself; a whole one has had its end before the run was ended.
                if not epoch_is_whole(trainer.state):
                    trainer.control = trainer.callback_handler.on_epoch_end(
                        trainer.args, trainer.state, trainer.control
                    )
                    self._log_save_evaluate()

        return run_epoch

    def _log_save_evaluate(self) -> None:
        """As at the end of a step or an epoch. Collective over the world."""
        trainer = self.trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, trainer.model_wrapped, None, trainer.state.epoch, None, time.time()
        )

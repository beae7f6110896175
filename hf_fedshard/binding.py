"""The one place that reaches into a Trainer instance."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from .checkpoint_state import Place
from .checkpointed_run import CheckpointedRun
from .config import FederationConfig
from .group_ops import ACCELERATOR_SEAMS, BoundAccelerator, GroupOps
from .group_steps import STEP_SEAMS, GroupSteps
from .outer_checkpoint import resume_outer_state
from .parallelism import FederatedParallelismConfig
from .seams import Patches, check_seams
from .session import TrainingSession
from .subclass_logs import SubclassLogs
from .trainer_checkpoint import TrainerCheckpoints


Method = Callable[..., Any]

TRAINER_SEAMS = {
    "train": ("resume_from_checkpoint",),
    "_maybe_log_save_evaluate": ("tr_loss", "grad_norm", "model", "trial", "epoch"),
    "log": ("logs",),
    "evaluate": ("eval_dataset",),
    "predict": ("test_dataset",),
    "save_model": ("output_dir", "_internal_call"),
    "_save_checkpoint": ("model", "trial"),
}
HANDLER_SEAMS = {"call_event": ("event", "args", "state", "control")}
SEAMS = (
    (Trainer, TRAINER_SEAMS),
    (Trainer, STEP_SEAMS),
    (Accelerator, ACCELERATOR_SEAMS),
    (CallbackHandler, HANDLER_SEAMS),
)


def check_bound_methods() -> None:
    """
    Checks all upstream methods that a binding replaces.

    Raises:
        UpstreamChangedError: If one is not as expected.
    """
    for owner, seams in SEAMS:
        check_seams(owner, seams)


class TrainerBinding:
    """
    Keeps what a Trainer does inside the federation groups, by replacing bound methods on this one instance.

    - `train`: puts the federation in force before and takes it back after, also after an exception.
    - what a step draws and counts: see [`GroupSteps`]; checkpoints: see [`TrainerCheckpoints`].
    - `accelerator.gather`, `reduce`, ...: among the group's ranks while a round is running.
    - `callback_handler.call_event`: after all callbacks have spoken, so that whatever any of them asks for inside a
      round waits for the border.
    - `_maybe_log_save_evaluate`: logs, evaluates and saves one after the other, so that what is asked for on some ranks
      meanwhile holds for all before the next.
    - `log`: adds the metrics of a round before the reporting callbacks see the logs; what a subclass adds is averaged.
    - `evaluate`, `predict`, `save_model`, `_save_checkpoint`: called directly inside a round, they close it first.

    Args:
        trainer (`Trainer`):
            The instance.
        parallelism ([`FederatedParallelismConfig`]):
            The federation, its mesh built.
        config ([`FederationConfig`]):
            Its settings.
    """

    def __init__(self, trainer: Trainer, parallelism: FederatedParallelismConfig, config: FederationConfig) -> None:
        self.trainer = trainer
        self.parallelism = parallelism
        self.config = config
        self.session: TrainingSession | None = None
        place = Place(parallelism.federation_layout, parallelism.mesh.group_index, parallelism.mesh.group)
        self.checkpoints = TrainerCheckpoints(CheckpointedRun(trainer, place, config))
        self._patches = Patches()
        self._saving_checkpoint = False
        self._logs = SubclassLogs(trainer)
        self.steps = GroupSteps(trainer, parallelism, self._count_tokens)
        ops = GroupOps(parallelism.mesh.group, parallelism.federation_layout.num_groups)
        self._accelerator = BoundAccelerator(ops, self._inside)

    def install(self, before_train: Callable[[], None], after_train: Callable[[], None]) -> None:
        """
        Replaces the methods. Call once.

        Args:
            before_train (`Callable`):
                Called before each `Trainer.train`.
            after_train (`Callable`):
                Called when `Trainer.train` is left, also by an exception.
        """
        # First, so that what follows wraps it: a border is made, then the checkpoint is saved.
        self.checkpoints.install()
        self.steps.install()
        replace, trainer = self._patches.replace, self.trainer
        replace(trainer, "train", lambda original: self._train(original, before_train, after_train))
        replace(trainer, "_maybe_log_save_evaluate", self._maybe_log_save_evaluate)
        replace(trainer, "log", self._log)
        replace(trainer, "save_model", self._save_model)
        replace(trainer.callback_handler, "call_event", self._call_event)
        for name in ("evaluate", "predict"):
            replace(trainer, name, self._at_border)
        replace(trainer, "_save_checkpoint", self._save_checkpoint)
        self._accelerator.follow(self.trainer.accelerator)

    def remove(self) -> None:
        """Puts every method back."""
        self._accelerator.release()
        self._patches.undo()
        self.steps.remove()
        self.checkpoints.remove()

    def _inside(self) -> bool:
        if self.session is None:
            return self.steps.drawing
        # What is drawn belongs to the step that comes, a synchronous one or one of the group.
        return (self.steps.drawing and not self.session.rounds.synchronous) or self.session.inside_groups

    def _train(self, original: Method, before: Callable[[], None], after: Callable[[], None]) -> Method:
        def train(*args: Any, **kwargs: Any) -> Any:
            before()
            try:
                return original(*args, **kwargs)
            finally:
                self._end_session()
                after()

        return train

    def _begin_session(self) -> None:
        # `auto_find_batch_size` begins again inside one `train()`.
        self._end_session()
        self._accelerator.follow(self.trainer.accelerator)
        run, preemption = self.checkpoints.run, self.checkpoints.preemption
        if preemption is not None:
            preemption.begin()
        self.session = TrainingSession(self.trainer, self.parallelism.mesh, self.config, preemption, run.inside)
        self.session.rounds.unique_share = self.steps.unique_share
        if run.inside is None:
            self.session.resume(run.progress)
        averager = run.averager = self.session.rounds.averager
        if run.resumed_from is not None:
            resume_outer_state(run.resumed_from, averager, run.place)

    def _end_session(self) -> None:
        if self.session is not None:
            self.session.end()
            self.session = self.checkpoints.run.averager = None

    def _count_tokens(self, batches: list[Any]) -> None:
        if self.session is not None:
            self.session.counts.add(batches)

    def _call_event(self, original: Method) -> Method:
        def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if event == "on_log":
                self._logs.average(kwargs["logs"], state.log_history)
            if self.session is not None:
                self.session.before_event(event, control)
            with self._logs.of_callbacks():
                control = original(event, args, state, control, **kwargs)
            if event == "on_train_begin":
                self._begin_session()
            elif self.session is not None:
                self.session.after_event(event, state, control)
                if event == "on_epoch_begin":
                    self.steps.begin_epoch(self.session.epoch - 1)
            return control

        return call_event

    def _maybe_log_save_evaluate(self, original: Method) -> Method:
        def maybe_log_save_evaluate(*args: Any, **kwargs: Any) -> None:
            act = functools.partial(original, *args, **kwargs)
            if self.session is None or self.session.in_round:
                act()  # inside a round nothing is due
                return
            with self._logs.of_all_ranks():
                self.session.act(act)

        return maybe_log_save_evaluate

    def _log(self, original: Method) -> Method:
        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if self.session is not None:
                logs.update(self.session.reports.take_pending_logs())
            with self._logs.added_to(logs):
                return original(logs, *args, **kwargs)

        return log

    def _border(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.session is None else self.session.border_on_demand()

    def _at_border(self, original: Method) -> Method:
        def at_border(*args: Any, **kwargs: Any) -> Any:
            with self._border():
                return original(*args, **kwargs)

        return at_border

    def _save_checkpoint(self, original: Method) -> Method:
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            self._saving_checkpoint = True
            try:
                with self._border():
                    if self.session is not None:
                        self.checkpoints.run.progress = self.session.rounds.state_dict()
                    return original(*args, **kwargs)
            finally:
                self._saving_checkpoint = False

        return save_checkpoint

    def _save_model(self, original: Method) -> Method:
        def save_model(*args: Any, **kwargs: Any) -> Any:
            plugin = self.trainer.accelerator.state.fsdp_plugin
            chosen = plugin.state_dict_type
            if not self._saving_checkpoint:
                # Under SHARDED_STATE_DICT Trainer writes nothing here, without a word. A checkpoint has its own shards.
                plugin.state_dict_type = type(chosen).FULL_STATE_DICT
            try:
                with self._border():
                    return original(*args, **kwargs)
            finally:
                plugin.state_dict_type = chosen

        return save_model

"""A Trainer that is told to end: takes the place of its JIT checkpoint, saves in time, and leaves."""

from __future__ import annotations

import atexit
import logging
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import TrainerControl

from .checkpointed_run import CheckpointedRun
from .jit_checkpoint import take_out_jit_checkpoint
from .preemption import Preemption, TrainingPreempted
from .rounds import Rounds
from .scheduled_requests import epoch_is_whole
from .seams import check_attribute
from .signals import TerminationSignal, shield_workers
from .trainer_part import save_trainer_part
from .trainer_seams import Method, TrainerSeams


logger = logging.getLogger(__name__)

LOADERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")


class TrainerPreemption(TrainerSeams):
    """
    Ends the training of one Trainer on SIGTERM, by replacing bound methods on this instance.

    Trainer's own callback for that is taken out: it saves by itself on per-rank timers. Here the handler sets a number, and
    the ends of steps look at it.

    Args:
        run ([`CheckpointedRun`]):
            What its checkpoints know of the run; its Trainer has `enable_jit_checkpoint=True`.

    Raises:
        UpstreamChangedError: If a method to be replaced is not as expected.
    """

    SEAMS = {
        "train": ("resume_from_checkpoint",),
        "_save_checkpoint": ("model", "trial"),
        "_maybe_log_save_evaluate": ("tr_loss", "grad_norm", "model", "trial", "epoch"),
        "_save_rng_state": ("output_dir",),
        "_get_output_dir": ("trial",),
        "get_train_dataloader": (),
        "get_eval_dataloader": ("eval_dataset",),
        "get_test_dataloader": ("test_dataset",),
    }

    def __init__(self, run: CheckpointedRun) -> None:
        super().__init__(run)
        for attribute in ("current_flos", "hp_search_backend"):
            check_attribute(run.trainer, attribute)
        self.place = run.place
        self.config = run.config
        self.leaving = False
        """Whether everything is saved: nothing may be averaged, evaluated or saved any more."""
        self.due = False
        """Whether all ranks know, at a border, that the run ends there."""
        self._signal = TerminationSignal()
        self._protocol: Preemption | None = None
        self.checkpoint = ""
        """What was saved last before leaving."""
        self._saved_at: tuple[int, int] | None = None
        self._seen_step: int | None = None

    def install(self) -> None:
        """Replaces the methods. Call once, after those of the checkpoints."""
        take_out_jit_checkpoint(self.trainer)
        self._patches.replace(self.trainer, "train", self._train)
        self._patches.replace(self.trainer, "_save_checkpoint", self._save_checkpoint)
        for name in LOADERS:
            self._patches.replace(self.trainer, name, _with_shielded_workers)
        if self.place.layout.num_groups == 1:
            # Every step end is a border.
            self._patches.replace(self.trainer, "_maybe_log_save_evaluate", self._end_of_plain_step)

    @property
    def protocol(self) -> Preemption:
        """The agreement of the groups in the training that is running."""
        assert self._protocol is not None
        return self._protocol

    def begin(self) -> None:
        """Starts afresh, with keys that no training before has written. Collective over the world."""
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        store = dist.PrefixStore(f"hf_fedshard/preemption/{name[0]}", dist.distributed_c10d._get_default_store())
        args = self.trainer.args
        self._protocol = Preemption(
            store,
            self.place.group,
            self.place.layout.num_groups,
            torch.device(args.device),
            lambda: self._signal.received_at,
            self.config.preemption_grace_seconds,
            self.config.timeout_seconds or args.ddp_timeout,
        )

    def after_step(self, rounds: Rounds, steps_left: int, border_seconds: float) -> bool:
        """
        To be called at the end of each step that ends no round. Collective over the group.

        Args:
            rounds ([`Rounds`]):
                What counts the steps.
            steps_left (`int`):
                Steps to the end of the round.
            border_seconds (`float`):
                How long the averaging takes.

        Returns:
            `bool`: Whether the group has to save by itself, here, and leave.
        """
        seconds = steps_left * rounds.seconds_per_step + border_seconds
        started = time.perf_counter()
        alone = self.protocol.after_step(rounds.round, steps_left, seconds)
        if steps_left == 1:
            rounds.note_wait(time.perf_counter() - started)
        return alone

    def end_at_border(self, control: TrainerControl) -> None:
        """
        Has Trainer save and do nothing else at this border. An evaluation that is due is made up for when the run resumes.

        Args:
            control (`TrainerControl`):
                Trainer's, at a border, the same on all ranks.
        """
        self.due = True
        self.run.pending_evaluation = control.should_evaluate
        control.should_save, control.should_evaluate = True, False

    def leave_border(self) -> NoReturn:
        """Leaves at a border, saving first if that was not done there. Collective over the world."""
        trainer = self.trainer
        if self._saved_at != self._now:
            trainer._save_checkpoint(trainer.model_wrapped, None)
        self._leave(Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{trainer.state.global_step}")

    def leave_alone(self, rounds: Rounds, progress: dict[str, Any], untouched: bool = False) -> NoReturn:
        """
        Saves this group inside a round, and leaves. Collective over the group.

        Args:
            rounds ([`Rounds`]):
                What counts the steps.
            progress (`dict[str, Any]`):
                Where this rank stands.
            untouched (`bool`, defaults to `False`):
                Whether no step was made since the run was resumed. Starting the data loader has drawn random numbers, and
                will again.
        """
        self._leave(save_trainer_part(self.run, rounds, progress, untouched))

    def _leave(self, checkpoint: Path) -> NoReturn:
        trainer = self.trainer
        self.leaving, self.checkpoint = True, str(checkpoint)
        trainer.control.should_training_stop = True
        atexit.register(_end_process_groups)
        try:
            # Trackers close their files here.
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        except (Exception, SystemExit):
            # All is saved, and a rank that went now would take those with it that have not: also one whose callback wants
            # to evaluate or save a finished model, which raises `TrainingPreempted`.
            logger.exception("A callback has failed in on_train_end, when the run was ended before its time.")
        finally:
            trainer.is_in_train = False
            self.protocol.leave(self.place.layout.world_size)
        raise TrainingPreempted(self.checkpoint, trainer.state.global_step)

    @property
    def _now(self) -> tuple[int, int]:
        """Where the run is, at a border: an evaluation after the step was saved is not in the checkpoint."""
        state = self.trainer.state
        return state.global_step, len(state.log_history)

    def _train(self, original: Method) -> Method:
        def train(*args: Any, **kwargs: Any) -> Any:
            if self.trainer.hp_search_backend is not None:
                raise ValueError(
                    "enable_jit_checkpoint=True cannot be used in a hyper-parameter search. Set it to False."
                )
            self.leaving = self.due = False
            self._saved_at = self._seen_step = None
            self._signal.install()
            try:
                if self.place.layout.num_groups == 1:
                    self.begin()
                return original(*args, **kwargs)
            finally:
                self._signal.restore()

        return train

    def _save_checkpoint(self, original: Method) -> Method:
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            result = original(*args, **kwargs)
            self.protocol.save_seconds = time.monotonic() - started
            self._saved_at = self._now
            return result

        return save_checkpoint

    def _end_of_plain_step(self, original: Method) -> Method:
        def maybe_log_save_evaluate(*args: Any, **kwargs: Any) -> Any:
            trainer, state = self.trainer, self.trainer.state
            # After the last step of an epoch this is called again, when its callbacks have asked for what is due then.
            comes_again = epoch_is_whole(state) and self._seen_step != state.global_step
            self._seen_step = state.global_step
            # The last step of the training is no place to leave: there is nothing left to resume.
            ends = trainer.control.should_training_stop or state.global_step >= state.max_steps
            if self.protocol.requested_in_group() and not ends and not comes_again:
                self.end_at_border(trainer.control)
            original(*args, **kwargs)
            if self.due:
                self.leave_border()

        return maybe_log_save_evaluate


def _with_shielded_workers(original: Method) -> Method:
    def get_dataloader(*args: Any, **kwargs: Any) -> Any:
        dataloader = original(*args, **kwargs)
        shield_workers(dataloader)
        return dataloader

    return get_dataloader


def _end_process_groups() -> None:
    """A process that leaves with gloo groups open ends in SIGABRT now and then, and its exit code says something else."""
    if dist.is_initialized():
        dist.destroy_process_group()

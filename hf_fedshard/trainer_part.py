"""How a Trainer saves inside a round: the part of its group alone, as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from .checkpointed_run import CheckpointedRun
from .group_checkpoint import save_part
from .model_files import gather_adapters, write_model_files
from .outer_checkpoint import take_outer_state
from .parts import describe_course
from .rounds import Rounds


def save_trainer_part(run: CheckpointedRun, rounds: Rounds, progress: dict[str, Any], untouched: bool = False) -> Path:
    """
    Saves this rank's group. Collective over the group.

    Args:
        run ([`CheckpointedRun`]):
            The run.
        rounds ([`Rounds`]):
            What counts the steps.
        progress (`dict[str, Any]`):
            Where this rank stands, from [`SessionProgress.state`].
        untouched (`bool`, defaults to `False`):
            Whether no step was made since the run was resumed. Starting the data loader has drawn random numbers, and
            will again.

    Returns:
        `Path`: The checkpoint, whole when all groups have saved their parts.

    Raises:
        CheckpointError: On every rank of the group, if any cannot write.
    """
    trainer, state, place = run.trainer, run.trainer.state, run.place
    if untouched:
        trainer._load_rng_state(str(run.resumed_from))
    # All groups know the step of the last border, and no checkpoint of a border has the number after it.
    name = f"checkpoint-{state.global_step - rounds.steps + 1}"
    final = Path(trainer._get_output_dir(trial=None)) / name
    description = {
        "round": rounds.round,
        "global_step": state.global_step,
        **describe_course(run.config, state.max_steps),
    }
    adapters = gather_adapters(trainer.model)
    leads = place.group.rank() == 0

    def write_more(folder: Path) -> None:
        trainer._save_rng_state(str(folder))
        if leads:
            write_model_files(trainer.model, folder, adapters)
            if trainer.processing_class is not None:
                trainer.processing_class.save_pretrained(str(folder))
            _note_callbacks(trainer)
            state.save_to_json(str(folder / TRAINER_STATE_NAME))

    state_of_group = run.group_state()
    outer = take_outer_state(rounds.averager, inside=True)
    save_part(final, trainer.model, state_of_group, place, description, progress, write_more, outer)
    return final


def _note_callbacks(trainer: Any) -> None:
    """The states of callbacks, where `_save_checkpoint` keeps them."""
    stored = trainer.state.stateful_callbacks
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            if isinstance(stored.get(name), list):
                stored[name].append(callback.state())
            else:
                stored[name] = callback.state()

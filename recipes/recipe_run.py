"""What the recipes with a Trainer share: a quiet console, the callback, saving, and the run from start to end."""

import warnings
from typing import Any

import datasets
import transformers
from accelerate import PartialState
from transformers import Trainer, TrainerCallback

from hf_fedshard import FedAvgCallback
from recipe_arguments import FederationArguments


def quiet_console() -> None:
    """Leaves progress bars to one process a node, and drops a warning that no user can act on."""
    if not PartialState().is_local_main_process:
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    # Accelerate slices its own mesh in a way that PyTorch is about to change.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")


def make_callbacks(args: FederationArguments) -> list[TrainerCallback]:
    """
    The one thing in which a federated run differs from a synchronous one.

    Args:
        args (`FederationArguments`):
            How the run is federated.

    Returns:
        `list[TrainerCallback]`: For a Trainer's `callbacks`.
    """
    return [FedAvgCallback(num_groups=args.num_groups, sync_every=args.sync_every)] if args.federated else []


def save_full_model(trainer: Trainer) -> None:
    """
    Saves the model in one piece, and its tokenizer, whatever kind of state dict the checkpoints of the run have.

    Args:
        trainer (`Trainer`):
            Trainer at the end of training.
    """
    # Trainer writes nothing, and says nothing, if the state dict type is a sharded one.
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()


def checkpoint_to_resume(argument: str | bool | None) -> str | bool | None:
    """
    What `--resume_from_checkpoint` asks for: the command line makes a text of `True`, and Trainer a folder of a text.

    Args:
        argument (`str` or `bool`, *optional*):
            A folder, or whether to go on from the newest one in the output folder.

    Returns:
        `str`, `bool` or `None`: For [`Trainer.train`].
    """
    words = {"true": True, "false": None}
    return words.get(argument.lower(), argument) if isinstance(argument, str) else argument


def run(trainer: Trainer, evaluate_first: bool = False) -> dict[str, Any]:
    """
    Trains, saves and evaluates, and leaves all figures in `all_results.json`.

    Args:
        trainer (`Trainer`):
            Trainer that is ready to train.
        evaluate_first (`bool`, *optional*, defaults to `False`):
            Evaluate the model before its first step too, as `start_...`.

    Returns:
        `dict[str, Any]`: Metrics of the evaluations; empty without a set to evaluate on.
    """
    args = trainer.args
    # Trainer's own way: FSDP2 shards a model together with its optimizer, when training begins.
    resume = checkpoint_to_resume(args.resume_from_checkpoint)
    args.eval_on_start = evaluate_first and trainer.eval_dataset is not None and not resume
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    save_full_model(trainer)
    if trainer.eval_dataset is None:
        return {}
    metrics = trainer.evaluate()
    if args.eval_on_start:
        first: dict[str, Any] = {}
        for logs in trainer.state.log_history:
            if logs["step"] == 0:
                first |= logs
        metrics |= {f"start_{name.removeprefix('eval_')}": first[name] for name in list(metrics) if name in first}
    trainer.save_metrics("eval", metrics)
    return metrics

"""The command line of `pretrain_clm_no_trainer.py`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clm_arguments import DataArguments, ModelArguments
from recipe_arguments import FederationArguments, parse_groups


USAGE = (
    "accelerate launch --config_file LAUNCH_FILE recipes/pretrain_clm_no_trainer.py [--args_file FILE] [option ...]"
)


@dataclass
class LoopArguments:
    """
    The loop.

    Args:
        output_dir (`str`):
            Folder of checkpoints, model and results.
        per_device_train_batch_size (`int`, *optional*, defaults to 8):
            Blocks in a micro-batch of a rank; evaluation takes four times as many.
        gradient_accumulation_steps (`int`, *optional*, defaults to 1):
            Micro-batches in an optimizer step.
        max_train_steps (`int`, *optional*, defaults to 100):
            Optimizer steps.
        learning_rate (`float`, *optional*, defaults to 5e-5):
            Peak of the schedule.
        weight_decay (`float`, *optional*, defaults to 0.0):
            Of AdamW.
        lr_scheduler_type (`str`, *optional*, defaults to `"cosine"`):
            Schedule.
        num_warmup_steps (`int`, *optional*, defaults to 0):
            Optimizer steps of warm-up.
        max_grad_norm (`float`, *optional*, defaults to 1.0):
            Clips the gradient of a group.
        checkpointing_rounds (`int`, *optional*, defaults to 0):
            Save at the end of every so many rounds; `0` saves none, nor does a synchronous run, which has no rounds.
        resume_from_checkpoint (`str`, *optional*):
            Checkpoint to go on from: a folder `checkpoint_<number>`.
        seed (`int`, *optional*, defaults to 42):
            Seed.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Train on CPU.
    """

    output_dir: str = field(metadata={"help": "Folder of checkpoints, model and results."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Blocks in a micro-batch of a rank."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-batches in an optimizer step."})
    max_train_steps: int = field(default=100, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak of the schedule."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule, such as linear or cosine."})
    num_warmup_steps: int = field(default=0, metadata={"help": "Optimizer steps of warm-up."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clips the gradient of a group."})
    checkpointing_rounds: int = field(default=0, metadata={"help": "Save every so many rounds; 0 saves none."})
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "Checkpoint to go on from."})
    seed: int = field(default=42, metadata={"help": "Seed of weights and data."})
    use_cpu: bool = field(default=False, metadata={"help": "Train on CPU."})

    def __post_init__(self) -> None:
        folder = self.resume_from_checkpoint
        # The number is that of the checkpoint from which the next one is counted.
        if folder is not None and re.fullmatch(r"checkpoint_\d+", Path(str(folder)).name) is None:
            raise ValueError(
                "--resume_from_checkpoint is a folder that this script has saved, such as "
                f"{Path(self.output_dir) / 'checkpoints' / 'checkpoint_1'}, got {folder!r}."
            )


def parse_arguments(
    args: Sequence[str] | None = None,
) -> tuple[ModelArguments, DataArguments, FederationArguments, LoopArguments]:
    """
    Parses the command line.

    Args:
        args (`Sequence[str]`, *optional*):
            Arguments in place of those of the process.

    Returns:
        `tuple`: The argument groups.
    """
    groups = (ModelArguments, DataArguments, FederationArguments, LoopArguments)
    model, data, federation, loop = parse_groups(groups, USAGE, "Pre-trains a language model without Trainer.", args)
    if data.streaming or data.part_column is not None:
        raise ValueError("--streaming and --part_column are options of pretrain_clm.py.")
    if not federation.federated and (loop.checkpointing_rounds or loop.resume_from_checkpoint is not None):
        raise ValueError(
            "--no_federated trains without rounds, at whose ends this loop saves. Give --checkpointing_rounds 0 and no "
            "--resume_from_checkpoint."
        )
    return model, data, federation, loop

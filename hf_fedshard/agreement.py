"""What all ranks of a Trainer run must agree on before its first step."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import has_length

from .config import FederationConfig
from .group_data import GroupData, wrong_number
from .handshake import agree
from .launch import FSDP1_ERROR, check_launch, check_synchronous_steps, check_wrapping, layout_for, stated_sizes
from .overlap_limits import refuse_preemption
from .parallelism import FederatedParallelismConfig
from .upstream_limits import check_upstream_limits
from .versions import versions


# Settings that change no result, and `num_groups`, which may be left to the launch.
_OF_THE_MACHINE = (
    "num_groups",
    "bucket_size_bytes",
    "log_every_rounds",
    "timeout_seconds",
    "optimizer_on_reshape",
    "preemption_grace_seconds",
)


def agree_on_launch(
    trainer: Trainer, callback_type: type, config: FederationConfig, wrong: ValueError | None = None
) -> None:
    """
    Checks that a Trainer can be federated, on all ranks alike. Collective over the world.

    Args:
        trainer (`Trainer`):
            The Trainer.
        callback_type (`type`):
            Class of the callback, to find a second one.
        config ([`FederationConfig`]):
            The settings.
        wrong (`ValueError`, *optional*):
            What is wrong with those of this rank, in place of which `config` has defaults.

    Raises:
        ValueError: On every rank, if it cannot.
        FederationMismatchError: On every rank, if the ranks were set up differently.
    """
    state = trainer.accelerator.state
    error = None
    try:
        if wrong is not None:
            raise wrong
        _check_trainer(trainer, callback_type)
        _check_given_federation(state.parallelism_config, config)
        layout = layout_for(config, state.num_processes, stated_sizes(state.parallelism_config))
        check_synchronous_steps(config, layout, state.mixed_precision)
        if trainer.args.enable_jit_checkpoint and layout.num_groups > 1:
            refuse_preemption(config)
        data = trainer.train_dataset
        if isinstance(data, GroupData) and layout.num_groups not in (1, data.num_groups):
            raise ValueError(wrong_number(data, layout.num_groups))
        if isinstance(data, GroupData) and layout.num_groups == 1:
            data.all_parts()
    except Exception as problem:  # whatever it is, the other ranks must not be left waiting
        if state.num_processes == 1:
            raise
        error = str(problem)
    jit = trainer.args.enable_jit_checkpoint
    agree("the federation", {**config.comparable(), **versions(), "enable_jit_checkpoint": jit}, error)


def agree_on_training(trainer: Trainer, at_border: bool = True) -> None:
    """
    Compares the schedule of a Trainer over all ranks. Collective over the world.

    Args:
        trainer (`Trainer`):
            The Trainer, prepared, with the callback handler's references set.
        at_border (`bool`, defaults to `True`):
            Whether all groups stand at one step. If not, their schedules give them other learning rates.

    Raises:
        FederationMismatchError: On every rank, if the ranks plan different schedules.
    """
    args, state = trainer.args, trainer.state
    dataloader = trainer.callback_handler.train_dataloader
    error = None
    if has_length(dataloader) and len(dataloader) == 0:
        error = (
            "There is no batch to train on: the samples are fewer than one batch of all ranks, "
            "and dataloader_drop_last=True drops them. Give more samples, a smaller batch, or dataloader_drop_last=False."
        )
    agree(
        "the training schedule",
        {
            "max_steps": state.max_steps,
            "num_train_epochs": state.num_train_epochs,
            "batches in an epoch": len(dataloader) if has_length(dataloader) else None,
            "train batch size": args.train_batch_size,
            "dataloader_drop_last": args.dataloader_drop_last,
            "train_sampling_strategy": str(getattr(args, "train_sampling_strategy", None)),
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "optimizer": _describe_optimizer(trainer.optimizer) if at_border else type(trainer.optimizer).__name__,
            "logging_steps": (str(args.logging_strategy), state.logging_steps),
            "eval_steps": (str(args.eval_strategy), state.eval_steps),
            "save_steps": (str(args.save_strategy), state.save_steps),
            "max_grad_norm": args.max_grad_norm,
            "data_seed": args.data_seed,
            "average_tokens_across_devices": args.average_tokens_across_devices,
        },
        error,
    )


def _describe_optimizer(optimizer: Any) -> list[Any]:
    """Its class, and the numbers of each parameter group: learning rate, betas, weight decay and the like."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    plain = (bool, int, float, str, tuple, type(None))
    groups = [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


def _check_given_federation(parallelism_config: Any, config: FederationConfig) -> None:
    """A federation that is in force already, from a plugin or from a callback beside this one, must be this one."""
    if not isinstance(parallelism_config, FederatedParallelismConfig):
        return
    given, layout = parallelism_config.federation_config.comparable(), parallelism_config.federation_layout
    mine = config.comparable()
    pairs = [] if config.num_groups is None else [("num_groups", config.num_groups, layout.num_groups)]
    if not parallelism_config.stock:
        # A plugin's: it would say one period or outer optimizer and the callback another.
        pairs += [(name, mine[name], given[name]) for name in mine if name not in _OF_THE_MACHINE]
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ValueError(
                f"The callback has {name}={ours}, but the federation that is in force already has {name}={theirs}. Give "
                "both the same value."
            )


def _check_trainer(trainer: Trainer, callback_type: type) -> None:
    args: Any = trainer.args
    plugin_args = getattr(args, "fsdp_plugin_args", None) or {}
    if plugin_args.get("fsdp_version", 2) == 1:
        raise ValueError(FSDP1_ERROR.format(version=1))
    check_launch(trainer.accelerator.state)
    if isinstance(trainer.model, nn.Module):  # else hyper-parameter search makes it later
        check_wrapping(trainer.model, trainer.accelerator.state.fsdp_plugin)
    given = sum(isinstance(callback, callback_type) for callback in trainer.callback_handler.callbacks)
    if given > 1:
        raise ValueError(
            f"{callback_type.__name__} was given {given} times to one Trainer. Give it once; hf_fedshard.run gives it to a "
            "script that does not."
        )
    if trainer.accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True lets rank 0 read for all ranks and send every batch across the federation groups. "
            "Set accelerator_config={'dispatch_batches': False}: each rank then reads its own part."
        )
    if str(getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"):
        raise ValueError(
            f"optim={args.optim} updates parameters inside the backward pass, before FSDP2 has reduced their gradients. "
            "Use another optimizer, such as adamw_torch."
        )
    if args.enable_jit_checkpoint and args.save_only_model:
        raise ValueError(
            "save_only_model=True leaves nothing to resume from, which is what enable_jit_checkpoint=True saves for. Set "
            "one of them to False."
        )
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True writes every checkpoint once on each node, but all ranks write one together. Set it "
            "to False, with output_dir on a file system that all nodes share."
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "The model was sharded when it was loaded (distributed_config), so FSDP2 does not shard it inside "
            "federation groups. Load it without distributed_config."
        )
    check_upstream_limits(trainer.accelerator.state, str(getattr(args.optim, "value", args.optim)), trainer.model)
    if trainer.train_dataset is not None and has_length(trainer.train_dataset) and len(trainer.train_dataset) == 0:
        raise ValueError("The train_dataset is empty. Give it at least one sample.")

"""Runs of Trainer that record what a rank was trained on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_fedshard import Rounds, cpu

from .data import IGNORED_LABEL, Batch, ListDataset, collate, feature_samples, token_samples
from .models import add_lora, full_state, tiny_batchnorm, tiny_llama
from .reference_groups import State
from .tiny_trainer import tiny_arguments


LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 0.2
NUM_STEPS = 20
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": NUM_STEPS,
    "learning_rate": LEARNING_RATE,
    "weight_decay": WEIGHT_DECAY,
    "max_grad_norm": MAX_GRAD_NORM,
    "optim": "adamw_torch",
}


def make_model(kind: str) -> nn.Module:
    """
    Args:
        kind (`str`):
            `llama`, `tied`, `frozen`, `lora`, `batchnorm` (takes no token count), or `double`.

    Returns:
        `torch.nn.Module`: The model, always with the same weights.
    """
    if kind == "batchnorm":
        return tiny_batchnorm()
    if kind == "double":
        return _in_double_throughout(tiny_llama(dtype=torch.float64))
    model = tiny_llama(tied=kind == "tied")
    if kind == "frozen":
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    return add_lora(model) if kind == "lora" else model


def _in_double_throughout(model: nn.Module) -> nn.Module:
    # Llama's own norm computes in fp32: a difference of 1e-16 ahead of it may come out as one of 1e-7.
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.numel(), child.variance_epsilon, dtype=torch.float64)
                setattr(module, name, norm)
    return model


def native_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """
    A `compute_loss_func` in the precision of the logits, where Transformers' own goes through fp32.

    Args:
        outputs (`dict`):
            `logits`.
        labels (`torch.Tensor`):
            Labels.
        num_items_in_batch (`Any`, *optional*):
            Label tokens of the group.

    Returns:
        `torch.Tensor`: This micro-batch's share of the group's loss.
    """
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / num_items_in_batch


class RecordingTrainer(Trainer):
    """Keeps each batch that it trains on, the token count that reaches the model, and the model at each border."""

    def record(self) -> None:
        """Starts recording."""
        self.batches: list[Batch] = []
        self.counts: list[Any] = []
        self.borders: list[State] = []
        trainer, closed = self, []
        close = Rounds.close

        def noting_close(rounds: Rounds, *args: Any, **kwargs: Any) -> Any:
            closed.append(trainer.state.global_step)
            return close(rounds, *args, **kwargs)

        mock.patch.object(Rounds, "close", noting_close).start()

        class Borders(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                # The step ahead of this one ended a round: the model must be the average by now.
                if closed and closed[-1] == state.global_step:
                    trainer.borders.append(full_state(trainer.model))

        self.add_callback(Borders())
        self.model.register_forward_pre_hook(self._note_count, with_kwargs=True)

    def train_recorded(self) -> dict[str, Any]:
        """Trains; `state`, `borders`, `batches`, `counts` and `log`."""
        self.record()
        try:
            self.train()
        finally:
            mock.patch.stopall()
        return {
            "state": full_state(self.model),
            "borders": self.borders,
            "batches": self.batches,
            "counts": self.counts,
            "log": self.state.log_history,
        }

    def _note_count(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training:
            self.counts.append(kwargs.get("num_items_in_batch"))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.batches.append({key: value.clone() for key, value in inputs.items()})
        return super().training_step(model, inputs, num_items_in_batch)


def train(
    folder: str,
    kind: str = "llama",
    num_groups: int | None = 2,
    sync_every: int | str | None = 3,
    federated: bool = True,
    length: int = 12,
    uneven: bool = True,
    native: bool = False,
    pooled: bool = True,
    settings: dict[str, Any] | None = None,
    data: Any = None,
    **changes: Any,
) -> dict[str, Any]:
    """
    Trains in this process, one of several.

    Args:
        folder (`str`):
            Output folder.
        kind (`str`, *optional*, defaults to `"llama"`):
            For [`make_model`].
        num_groups (`int`, *optional*, defaults to 2):
            Federation groups, `None` to leave it to the launch.
        sync_every (`int` or `str`, *optional*, defaults to 3):
            Steps in a round.
        federated (`bool`, *optional*, defaults to `True`):
            Whether to give the callback.
        length (`int`, *optional*, defaults to 12):
            Tokens in a sample.
        uneven (`bool`, *optional*, defaults to `True`):
            Whether samples have unequal numbers of labels.
        native (`bool`, *optional*, defaults to `False`):
            Whether to give [`native_loss`].
        pooled (`bool`, *optional*, defaults to `True`):
            Whether this is a pool's process. In a launched one the callback is given as a class, and all settings come
            from the environment.
        settings (`dict`, *optional*):
            More settings of the federation.
        data (`Any`, *optional*):
            In place of the samples that go with the kind.
        changes (`Any`):
            Arguments of `TrainingArguments`.

    Returns:
        `dict[str, Any]`: Of [`~RecordingTrainer.train_recorded`].
    """
    from hf_fedshard import FedAvgCallback

    callback: Any = FedAvgCallback
    if pooled:
        cpu.install()  # the plain run too needs FSDP2 on CPU
        callback = FedAvgCallback(num_groups=num_groups, sync_every=sync_every, **(settings or {}))
    samples = feature_samples(400) if kind == "batchnorm" else token_samples(700, length, uneven)
    trainer = RecordingTrainer(
        model=make_model(kind),
        args=tiny_arguments(folder, **{**ARGUMENTS, **changes}),
        train_dataset=ListDataset(samples) if data is None else data,
        data_collator=collate,
        compute_loss_func=native_loss if native else None,
        callbacks=[callback] if federated else [],
    )
    return trainer.train_recorded()

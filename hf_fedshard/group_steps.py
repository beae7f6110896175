"""What a training step of a Trainer draws and counts: of the group, where Trainer takes the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from .data import (
    draw_in_one_order,
    endless_if_sharded_by_files,
    keep_generators_in_step,
    one_seed,
    refuse_dispatched_batches,
    shared_seed,
)
from .group_data import GroupData
from .own_data import OwnData, own_data, share_inside_group
from .parallelism import FederatedParallelismConfig
from .seams import Patches


Method = Callable[..., Any]

STEP_SEAMS = {
    "get_train_dataloader": (),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "_get_num_items_in_batch": ("batch_samples", "device"),
    "num_examples": ("dataloader",),
}


class GroupSteps:
    """
    Keeps the data and the token counts of a Trainer's steps inside the federation group, by replacing bound methods on this
    one instance.

    - `get_train_dataloader`: each rank reads its own data, or its part of the group's own.
    - `get_batch_samples`, `_get_num_items_in_batch`: a training step counts the tokens of the group, an evaluation those
      of the world as ever.
    - `num_examples`: of all groups, where each has data of its own.
    - `label_smoother`: shifts the labels of a causal language model, as it does without FSDP2, which renames the model's
      class so that Trainer no longer knows it.

    Args:
        trainer (`Trainer`):
            The instance.
        parallelism ([`FederatedParallelismConfig`]):
            The federation, its mesh built.
        count_tokens (`Callable[[list], None]`):
            Told of the batches of each step.
    """

    def __init__(
        self, trainer: Trainer, parallelism: FederatedParallelismConfig, count_tokens: Callable[[list[Any]], None]
    ) -> None:
        self.trainer = trainer
        self.parallelism = parallelism
        self.count_tokens = count_tokens
        self.drawing = False
        """Whether the batches of a training step are being drawn and counted: the accelerator stays in the group then."""
        self.unique_share = 1.0
        """How many of the group's samples in an epoch are no repetitions, see [`OwnData`]."""
        self._own_loader: Any = None
        self._patches = Patches()
        self._seed = 0
        self._generator: torch.Generator | None = None

    def begin_epoch(self, epoch: int) -> None:
        """
        To be called before the batches of an epoch are drawn.

        Args:
            epoch (`int`):
                Its number, counted from 0.
        """
        if self._generator is not None:
            self._generator.manual_seed(self._seed + epoch)

    def install(self) -> None:
        """Replaces the methods. Call once."""
        replace, trainer = self._patches.replace, self.trainer
        replace(trainer, "get_train_dataloader", self._get_train_dataloader)
        replace(trainer, "get_batch_samples", self._get_batch_samples)
        replace(trainer, "_get_num_items_in_batch", self._get_num_items_in_batch)
        replace(trainer, "num_examples", self._num_examples)
        if trainer.label_smoother is not None:
            replace(trainer, "label_smoother", self._label_smoother)

    def remove(self) -> None:
        """Puts every method back."""
        self._patches.undo()
        self._own_loader = None

    def _get_train_dataloader(self, original: Method) -> Method:
        def get_train_dataloader() -> Any:
            trainer = self.trainer
            config, dataset = trainer.accelerator.dataloader_config, trainer.train_dataset
            # Accelerate's default for streams is that rank 0 reads for everybody.
            dispatch, config.dispatch_batches = config.dispatch_batches, False
            size = self.parallelism.data_parallel_size
            rank = trainer.accelerator.process_index // self.parallelism.non_data_parallel_size
            seed = shared_seed(trainer.accelerator.device)
            own = self._own_data(dataset, size, rank)
            try:
                if own is None:
                    trainer.train_dataset = endless_if_sharded_by_files(dataset, size, rank)
                else:
                    trainer.train_dataset = own.dataset
                with one_seed(seed):
                    dataloader = original()
            finally:
                config.dispatch_batches, trainer.train_dataset = dispatch, dataset
            refuse_dispatched_batches(dataloader)
            if own is not None:
                share_inside_group(dataloader, own)
            self._own_loader = None if own is None else dataloader
            self.unique_share = 1.0 if own is None else own.unique_share
            keep_generators_in_step(dataloader)
            self._seed = trainer.args.data_seed if trainer.args.data_seed is not None else seed
            self._generator = draw_in_one_order(dataloader, self._seed)
            return dataloader

        return get_train_dataloader

    def _own_data(self, dataset: Any, size: int, rank: int) -> OwnData | None:
        if not isinstance(dataset, GroupData):
            return None
        mesh = self.parallelism.mesh
        num_ranks = size // mesh.layout.num_groups
        return own_data(dataset, mesh.group_index, mesh.layout.num_groups, num_ranks, rank % num_ranks)

    def _num_examples(self, original: Method) -> Method:
        def num_examples(dataloader: Any) -> int:
            count: int = original(dataloader)
            # The loader knows the data of its own group; every group draws as many.
            is_own = dataloader is not None and dataloader is self._own_loader
            return count * self.parallelism.mesh.layout.num_groups if is_own else count

        return num_examples

    def _get_batch_samples(self, original: Method) -> Method:
        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            self.drawing = True
            try:
                batch_samples, num_items_in_batch = original(*args, **kwargs)
            finally:
                self.drawing = False
            self.count_tokens(batch_samples)
            return batch_samples, num_items_in_batch

        return get_batch_samples

    def _get_num_items_in_batch(self, original: Method) -> Method:
        def get_num_items_in_batch(batch_samples: list[Any], device: torch.device) -> Any:
            count = original(batch_samples, device)
            if not self.drawing or count is None or not self.trainer.args.average_tokens_across_devices:
                return count
            # In the group the count comes out as if all groups had as many tokens as this one, see [`GroupOps`]. Trainer
            # multiplies the loss by the ranks of the world and FSDP2 averages over those of the group, and so gradients
            # are divided by the group's tokens. An integer: FSDP2's mixed precision would round a floating-point
            # argument of the model (1,029 to 1,032).
            return torch.as_tensor(count, device=device).double().round().to(torch.int64)

        return get_num_items_in_batch

    def _label_smoother(self, original: Method) -> Method:
        def label_smoother(outputs: Any, labels: Any, shift_labels: bool = False, **kwargs: Any) -> Any:
            model = unwrap_peft_model(self.trainer.accelerator.unwrap_model(self.trainer.model))
            causal = any(cls.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for cls in type(model).__mro__)
            return original(outputs, labels, shift_labels=shift_labels or causal, **kwargs)

        return label_smoother

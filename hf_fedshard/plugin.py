"""`FederatedFSDPPlugin`: FSDP2 inside federation groups for Accelerate loops."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

from . import environment
from .accelerate_checkpoint import AcceleratorCheckpoints
from .checkpoint_state import Place
from .config import FederationConfig
from .data import draw_in_one_order, keep_generators_in_step, refuse_dispatched_batches, shared_seed
from .group_data import GroupData
from .group_ops import GroupOps, keep_in_group
from .handshake import agree
from .launch import FSDP1_ERROR, check_launch, check_synchronous_steps, check_wrapping, layout_for
from .loop_models import LoopModels
from .loop_seams import tie_to_rounds
from .own_data import OwnData, own_data, share_inside_group
from .parallelism import FederatedParallelismConfig
from .rounds import Rounds
from .settings import PluginSettings
from .shards import reshard
from .versions import versions


class FederatedFSDPPlugin(FullyShardedDataParallelPlugin):
    """
    A `FullyShardedDataParallelPlugin` for FSDP2 that shards inside federation groups.

    Takes every argument of its base class, and fills the unset ones from the launch config as that does; unset
    `fsdp_version` is 2 and unset `auto_wrap_policy` is `transformer_based_wrap`.

    Args:
        num_groups (`int`, *optional*):
            G, the number of federation groups. See [`FederationConfig`] for all settings, their defaults and the
            `FEDSHARD_*` variables.
        sync_every (`int` or `str`, *optional*):
            H, optimizer steps between two averagings; or a list of periods, `"drift"` or `"auto"`.
        settings (`Any`):
            Every other setting of [`FederationConfig`] and every argument of the base class, by name.

    Raises:
        TypeError: If there is no such setting.
        ValueError: If a setting is out of its range, or FSDP version 1 is asked for.

    Example:

    ```python
    plugin = FederatedFSDPPlugin(num_groups=2, sync_every=8)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=plugin.parallelism_config)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    fedavg = plugin.federate(accelerator, model, optimizer)
    for batch in dataloader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fedavg.step(loss)
    fedavg.finish()
    ```
    """

    def __init__(
        self, num_groups: int | None = None, sync_every: int | str | None = None, **settings: Unpack[PluginSettings]
    ) -> None:
        inherited = {item.name for item in dataclasses.fields(FullyShardedDataParallelPlugin)}
        own: dict[str, Any] = {name: value for name, value in settings.items() if name not in inherited}
        self.federation_config = FederationConfig.from_arguments(num_groups=num_groups, sync_every=sync_every, **own)
        self._parallelism_config: FederatedParallelismConfig | None = None
        self._own_data: list[OwnData] = []
        self._models: LoopModels | None = None
        others: dict[str, Any] = {name: value for name, value in settings.items() if name in inherited}
        super().__init__(**others)

    def __post_init__(self) -> None:
        stated = vars(self)
        version = stated["fsdp_version"] or environment.launched_fsdp_version() or 2
        if version != 2:
            raise ValueError(FSDP1_ERROR.format(version=version))
        self.fsdp_version = version
        if stated["auto_wrap_policy"] is None and environment.launched_auto_wrap_policy() is None:
            self.auto_wrap_policy = "transformer_based_wrap"
        super().__post_init__()

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """
        Accelerate's, called by `prepare`. Refuses layers that cannot be sharded one by one, before the first of them is.

        Args:
            model (`nn.Module`):
                The model, not yet prepared.

        Raises:
            ValueError: See [`check_wrapping`].
        """
        check_wrapping(model, self)
        super().set_auto_wrap_policy(model)

    @property
    def parallelism_config(self) -> FederatedParallelismConfig:
        """The `ParallelismConfig` to hand to `Accelerator` beside this plugin; made at the first call."""
        if self._parallelism_config is None:
            world_size = dist.get_world_size() if dist.is_initialized() else environment.launched_world_size()
            layout = layout_for(self.federation_config, world_size, environment.launched_parallelism())
            self._parallelism_config = FederatedParallelismConfig(self.federation_config, layout, plugin=self)
        return self._parallelism_config

    def group_data(self, data: GroupData) -> Any:
        """
        The dataset of this process's group, for a `DataLoader` that is prepared as ever: the ranks of the group share it.
        Collective over the world; call it when the `Accelerator` is made.

        Args:
            data ([`GroupData`]):
                All groups' data.

        Returns:
            `Dataset` or `IterableDataset`: As long in all groups, repeated where the group has less. With one group all of
            the data.

        Raises:
            ValueError: On every rank, if the data does not fit the federation.
        """
        mesh = self.parallelism_config.mesh
        if mesh.layout.num_groups == 1:
            data.all_parts()
            return data
        num_ranks = self.parallelism_config.data_parallel_size // mesh.layout.num_groups
        rank = mesh.group.rank() // self.parallelism_config.non_data_parallel_size
        own = own_data(data, mesh.group_index, mesh.layout.num_groups, num_ranks, rank)
        self._own_data.append(own)
        return own.dataset

    def federate(
        self, accelerator: Accelerator, model: nn.Module, *optimizers: Any, num_training_steps: int | None = None
    ) -> Rounds:
        """
        Starts the federation of a prepared model. Collective over the world; call it after `prepare` and before the
        first step. Several models have a federation each, with the same settings: of a generator and a critic, say.

        Args:
            accelerator (`Accelerator`):
                The one that was made with this plugin and its `parallelism_config`.
            model (`nn.Module`):
                The prepared model.
            optimizers (`torch.optim.Optimizer` or `AcceleratedOptimizer`):
                Its optimizers. Defaults to all that the accelerator has prepared and that step parameters of the model.
            num_training_steps (`int`, *optional*):
                Optimizer steps of the whole run. Needed with `sync_steps_at_end`.

        Returns:
            [`Rounds`]: Call its `step()` after each optimizer step and `finish()` at the end.

        Raises:
            ValueError: On every rank, if the launch cannot be federated.
            FederationMismatchError: On every rank, if the ranks were set up differently.
        """
        error = None
        try:
            self._check(accelerator)
        except Exception as problem:  # whatever it is, the other ranks must not be left waiting
            error = str(problem)
            if accelerator.num_processes == 1:
                raise
        accumulation = accelerator.gradient_accumulation_steps
        schedule = {"gradient_accumulation_steps": accumulation, "num_training_steps": num_training_steps}
        agree("the launch", {**versions(), **schedule}, error)
        seed = shared_seed(accelerator.device)
        shares: set[float] = set()
        for dataloader in accelerator._dataloaders:
            keep_generators_in_step(dataloader)
            draw_in_one_order(dataloader, accelerator.dataloader_config.data_seed or seed)
            for own in self._own_data:
                if own.dataset is _read_by(dataloader):
                    share_inside_group(dataloader, own)
                    shares.add(own.unique_share)
        self._own_data.clear()  # shared out; loaders of a later federation are compared with what is asked for then
        mesh = self.parallelism_config.mesh
        inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers or accelerator._optimizers]
        if not optimizers:
            reshard(model)  # what is gathered still are other tensors
            held = {id(param) for param in model.parameters()}
            inner = [
                each for each in inner if any(id(p) in held for group in each.param_groups for p in group["params"])
            ]
        rounds = Rounds(model, mesh, self.federation_config, inner, num_training_steps=num_training_steps)
        if len(shares) == 1:  # of several sets, who hands counts over knows which is meant
            rounds.unique_share = shares.pop()
        if self._models is None or self._models.accelerator is not accelerator:
            place = Place(mesh.layout, mesh.group_index, mesh.group)
            self._models = LoopModels(accelerator, place, self.federation_config.optimizer_on_reshape)
            AcceleratorCheckpoints(accelerator, self._models)
        self._models.add(rounds)
        if mesh.layout.num_groups > 1:
            ops = GroupOps(mesh.group, mesh.layout.num_groups)

            def inside() -> bool:
                # At a border an evaluation is for the world; the step that comes next is the group's.
                return not rounds.synchronous and (not rounds.at_border or model.training)

            def waits_inside() -> bool:
                # At a border everyone is waited for where all are to see what one of them has written, in either mode. Not once
                # a step has begun, which a gradient scaler may skip in one group and not in another.
                return inside() and (not rounds.at_border or rounds.clock_is_set)

            in_group = keep_in_group(accelerator, ops, inside, waits_inside=waits_inside)
            rounds.when_finished(in_group.undo)
            rounds.when_finished(tie_to_rounds(accelerator, rounds).undo)
        return rounds

    def _check(self, accelerator: Accelerator) -> None:
        check_launch(accelerator.state)
        if accelerator.parallelism_config is not self._parallelism_config or self._parallelism_config is None:
            raise ValueError(
                "The Accelerator was not made with this plugin's parallelism_config. Write "
                "`Accelerator(fsdp_plugin=plugin, parallelism_config=plugin.parallelism_config)`."
            )
        layout = self.parallelism_config.mesh.layout
        check_synchronous_steps(self.federation_config, layout, accelerator.state.mixed_precision)
        for dataloader in accelerator._dataloaders:
            refuse_dispatched_batches(dataloader)
            if isinstance(_read_by(dataloader), GroupData) and layout.num_groups > 1:
                raise ValueError(
                    "A data loader reads the data of all groups. Write `DataLoader(plugin.group_data(data), ...)`: the dataset "
                    "of this process's group."
                )
        for own in self._own_data:
            if not any(own.dataset is _read_by(dataloader) for dataloader in accelerator._dataloaders):
                raise ValueError(
                    "No prepared data loader reads the dataset that plugin.group_data returned, so all groups would share "
                    "it out. Change the data before, not after: `DataLoader(plugin.group_data(data.map(tokenize)), ...)`, and "
                    "give that loader to accelerator.prepare before plugin.federate."
                )


def _read_by(dataloader: Any) -> Any:
    """The dataset of a prepared data loader, without Accelerate's wrapper for streams."""
    dataset = dataloader.dataset
    return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset

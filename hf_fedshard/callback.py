"""`FedAvgCallback`: sets a federation up for a Trainer and takes it back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from . import cpu, environment
from .agreement import agree_on_launch
from .binding import TrainerBinding, check_bound_methods
from .checkpoint_state import Place
from .checkpointed_run import CheckpointedRun
from .config import FederationConfig
from .launch import FSDP1_ERROR, layout_for, stated_sizes
from .measured_periods import describe
from .mesh import add_slow_tier
from .metrics import RoundMetrics
from .overlap import describe as describe_overlap
from .parallelism import FederatedParallelismConfig
from .seams import Patches, check_seam
from .settings import FederationSettings
from .trainer_checkpoint import TrainerCheckpoints


logger = logging.get_logger(__name__)


class FedAvgCallback(TrainerCallback):
    """
    Trains a Trainer's model with FL+FSDP or FL+HSDP (arXiv 2609.20359): FSDP2 inside federation groups, parameters
    averaged between the groups every `sync_every` optimizer steps.

    Give it as `callbacks=[FedAvgCallback(num_groups=4, sync_every=8)]` or as the bare class
    `callbacks=[FedAvgCallback]`, in a launch with FSDP version 2. Logging, evaluation, saving and stopping wait for
    the end of the round in which anybody asks for them, when all groups hold the averaged model. See
    [`FederationConfig`] for the arguments, their defaults and the `FEDSHARD_*` variables.

    Args:
        num_groups (`int`, *optional*):
            G, the number of federation groups. Defaults to the replicas of the launch config's `parallelism_config`,
            without one to the nodes. With `1` plain FSDP or HSDP trains as it is,
            and only the checkpoints are this package's.
        sync_every (`int` or `str`, *optional*, defaults to `8`):
            H, optimizer steps (`global_step`) between two averagings; or a list of periods, `"drift"` or `"auto"`.
        settings (`Any`):
            Every other setting of [`FederationConfig`], by name.

    Raises:
        TypeError: If there is no such setting.
        ValueError: If a setting, or the environment, is out of its range; of several processes on all of them, when the
            Trainer is made. If the launch is one of FSDP version 1.

    Example:

    ```python
    trainer = Trainer(
        model=model, args=args, train_dataset=dataset, callbacks=[FedAvgCallback(num_groups=2, sync_every=8)]
    )
    trainer.train()
    ```
    """

    def __init__(
        self,
        num_groups: int | None = None,
        sync_every: int | str | None = None,
        **settings: Unpack[FederationSettings],
    ) -> None:
        self._wrong: ValueError | None = None
        try:
            self.config = FederationConfig.from_arguments(num_groups=num_groups, sync_every=sync_every, **settings)
        except ValueError as error:
            if environment.launched_world_size() == 1:
                raise
            # It may come from the environment of this node alone, and the others would wait: `bind` tells them.
            self.config, self._wrong = FederationConfig(), error
        if environment.launch_asks_for_fsdp() and environment.launched_fsdp_version() == 1:
            # Here, since on CPU Accelerate would stop at FSDP1 with a message about missing devices.
            raise ValueError(FSDP1_ERROR.format(version=1))
        if environment.launched_world_size() > 1 and not torch.accelerator.is_available():
            cpu.install()
        self._bound_to: Trainer | None = None
        self._binding: TrainerBinding | None = None
        self._parallelism: FederatedParallelismConfig | None = None
        self._stock: dict[str, Any] = {}
        self._checkpoints: TrainerCheckpoints | None = None
        self._patches = Patches()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Binds to the Trainer whose constructor is running."""
        trainer = _trainer_under_construction()
        if trainer is None:
            raise RuntimeError(
                "FedAvgCallback found no Trainer constructor on the stack; call `callback.bind(trainer)`."
            )
        self.bind(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuses to train a Trainer that it is not bound to."""
        if self._bound_to is None:
            raise RuntimeError(
                "FedAvgCallback was added after its Trainer was made. Pass it as Trainer(callbacks=[...]), or call "
                "`callback.bind(trainer)` before `trainer.train()`."
            )
        if self._bound_to.state is not state:
            raise RuntimeError(
                "This FedAvgCallback is bound to another Trainer, the last one that it was given to or bound to, and this "
                "one would train without it. Make one callback for each Trainer, or call `callback.bind(trainer)` before "
                "each `trainer.train()`."
            )

    def bind(self, trainer: Trainer) -> None:
        """
        Sets the federation up for a Trainer. Called by itself when the callback is given to the constructor; call it
        yourself after `trainer.add_callback(callback)`. Collective over the world.

        Args:
            trainer (`Trainer`):
                The Trainer, not yet training.

        Raises:
            ValueError: On every rank, if the run cannot be federated.
            FederationMismatchError: On every rank, if the ranks were set up differently.
        """
        self._release()
        state = trainer.accelerator.state
        agree_on_launch(trainer, FedAvgCallback, self.config, self._wrong)
        layout = layout_for(self.config, state.num_processes, stated_sizes(state.parallelism_config))
        self._bound_to = trainer
        check_seam(Trainer, "_load_callback_state", ())
        self._patches.replace(trainer, "_load_callback_state", self._load_callback_state)
        if layout.num_groups == 1:
            if state.is_main_process:
                logger.warning("num_groups=1: training with plain FSDP or HSDP, there is nothing to average.")
            # In the same format, so that a run can go from groups to none and back.
            world: Any = dist.group.WORLD
            self._checkpoints = TrainerCheckpoints(CheckpointedRun(trainer, Place(layout, 0, world), self.config))
            self._checkpoints.install()
            return
        check_bound_methods()
        stock = {"parallelism_config": state.parallelism_config, "device_mesh": state.device_mesh}
        if isinstance(state.parallelism_config, FederatedParallelismConfig):
            # The user's own, or that of another callback whose Trainer shares Accelerate's state and has not trained.
            self._parallelism = state.parallelism_config
            if self.config.overlap_steps or self.config.slow_backend:
                # It may have been built for a callback that averages otherwise.
                self._parallelism.federation = add_slow_tier(self._parallelism.mesh, self.config.slow_backend)
        else:
            self._parallelism = FederatedParallelismConfig(self.config, layout, base=state.parallelism_config)
            self._parallelism.stock = stock
        self._stock = self._parallelism.stock or stock
        self._put_in_force()
        self._parallelism.mesh.set_timeout(self.config.timeout_seconds or trainer.args.ddp_timeout)
        self._binding = TrainerBinding(trainer, self._parallelism, self.config)
        self._binding.install(before_train=self._put_in_force, after_train=self._take_back)
        logger.info("Federated training, %s, %s%s", layout, describe(self.config), describe_overlap(self.config))

    @property
    def last_round(self) -> RoundMetrics | None:
        """Metrics of the last round of the training that is running; `None` before its first border and after it."""
        session = None if self._binding is None else self._binding.session
        return None if session is None else session.reports.last_round

    def _load_callback_state(self, original: Callable[[], None]) -> Callable[[], None]:
        """A callback that keeps state of its own (`ExportableState`) is built anew by Trainer, and would be bound to nothing."""

        def load_callback_state() -> None:
            original()
            assert self._bound_to is not None
            for callback in self._bound_to.callback_handler.callbacks:
                if isinstance(callback, FedAvgCallback) and callback._bound_to is None:
                    callback._take_over(self)

        return load_callback_state

    def _take_over(self, other: FedAvgCallback) -> None:
        """Stands in for another callback. Its settings hold, with which the mesh was made, whatever the checkpoint says."""
        if self.config != other.config:
            logger.warning(
                "The checkpoint holds other settings of %s (%s) than this run (%s); those of this run hold.",
                type(self).__name__,
                self.config,
                other.config,
            )
        self.config = other.config
        self._bound_to, self._binding, self._parallelism = other._bound_to, other._binding, other._parallelism
        self._checkpoints, self._stock, self._patches = other._checkpoints, other._stock, other._patches

    def _put_in_force(self) -> None:
        """Puts the federated mesh into Accelerate's shared state, before a model is prepared on it."""
        assert self._bound_to is not None and self._parallelism is not None
        state = self._bound_to.accelerator.state
        state.parallelism_config = self._parallelism
        state.device_mesh = self._parallelism.get_device_mesh(state.device.type)

    def _take_back(self) -> None:
        """Puts Accelerate's state back: it outlives this Trainer, and another one would train groups unaveraged."""
        if self._bound_to is not None:
            for name, value in self._stock.items():
                setattr(self._bound_to.accelerator.state, name, value)

    def _release(self) -> None:
        if self._binding is not None:
            if self._binding.session is not None:
                raise RuntimeError(
                    "This FedAvgCallback is training another Trainer. Make one callback for each Trainer."
                )
            self._take_back()
            self._binding.remove()
        self._patches.undo()
        if self._checkpoints is not None:
            self._checkpoints.remove()
        self._bound_to = self._binding = self._parallelism = self._checkpoints = None
        self._stock = {}


def _trainer_under_construction() -> Trainer | None:
    """The innermost Trainer whose constructor is running: `on_init_end` tells a callback everything but its Trainer."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and frame.f_code.co_name == "__init__":
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None

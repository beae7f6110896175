"""Which parameters and buffers of a model take part in an averaging: what trains, and whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from .mesh import Peers
from .selection import Selection
from .shards import all_finite, local_shards, persistent_buffers, unmanaged_parameters


class TrainedParameters:
    """
    Keeps account of the parameters that train, or have trained since the last border, and divides them into those that the
    groups average and those of which each group has its own. Without communication.

    Args:
        model (`nn.Module`):
            The prepared model.
        mesh ([`Peers`]):
            The federation, or its [`SlowTier`].
        selection ([`Selection`]):
            Which names are averaged, and which are local.
    """

    def __init__(self, model: nn.Module, mesh: Peers, selection: Selection) -> None:
        self.model = model
        self.mesh = mesh
        self.selection = selection
        self._trained: set[str] = set()
        # A constant such as a causal mask of -inf is no sign of trouble.
        self.checked_buffers = [name for name, buffer in persistent_buffers(model).items() if all_finite([buffer])]

    @property
    def names(self) -> list[str]:
        """Names of the parameters that train, or have since the last border."""
        return sorted(self._trained)

    def note_trainable(self, before: Iterable[str] = ()) -> None:
        """
        Remembers what trains: a layer that is frozen inside a round differs between the groups all the same, and is averaged
        once more.

        Args:
            before (`Iterable[str]`, *optional*):
                What has trained earlier in a round that is resumed.
        """
        self._trained |= {name for name, param in self.model.named_parameters() if param.requires_grad}
        self._trained |= set(before)

    def drop_frozen(self) -> None:
        """Forgets at a border what has been frozen: it is one model in all groups now. Local layers remain each group's own."""
        training = {name for name, param in self.model.named_parameters() if param.requires_grad}
        self._trained &= training | {name for name in self._trained if self.selection.is_local(name)}

    def has_frozen(self) -> bool:
        """Whether something that is averaged has been frozen since the last border."""
        training = {name for name, param in self.model.named_parameters() if param.requires_grad}
        return any(not self.selection.is_local(name) for name in self._trained - training)

    def local_names(self) -> set[str]:
        """Names of the parameters and persistent buffers of which each group has its own."""
        names = {*self._trained, *persistent_buffers(self.model)}
        return {name for name in names if self.selection.is_local(name)}

    def averaged_shards(self) -> dict[str, torch.Tensor]:
        """This rank's shards of what is averaged, aliasing the parameters, in the model's order. Reshard first."""
        return {
            name: shard
            for name, shard in self._shards().items()
            if name in self._trained and self.selection.is_averaged(name)
        }

    def checked_besides(
        self, shards: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """
        What must be finite besides the averaged parameters: the group's own, and buffers that were when training began.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                From [`~TrainedParameters.averaged_shards`].
            buffers (`Mapping[str, torch.Tensor]`):
                The persistent buffers.
        """
        local = [shard for name, shard in self._shards().items() if name in self._trained and name not in shards]
        return [*local, *(buffers[name] for name in self.checked_buffers)]

    def strays(self) -> list[str]:
        """What has come to train after the start and cannot be averaged, in words."""
        unmanaged = [] if self.mesh.in_process else unmanaged_parameters(self.model)
        problems = [
            "Trainable parameters were added after training began, and FSDP2 does not manage them, so their gradients "
            f"are reduced nowhere: {', '.join(unmanaged)}. Add them before `prepare`."
        ]
        stray = [n for n in self._trained if not self.selection.is_averaged(n) and not self.selection.is_local(n)]
        return (problems if unmanaged else []) + [
            f"{name} was unfrozen, but is neither averaged nor local: see include_parameters and local_parameters."
            for name in sorted(stray)[:1]
        ]

    def _shards(self) -> dict[str, torch.Tensor]:
        return local_shards(self.model, plain=self.mesh.in_process)

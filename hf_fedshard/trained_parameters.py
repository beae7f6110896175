"""Which parameters and buffers of a model take part in an averaging: what trains, and whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .peers import Peers
from .selection import Selection
from .shards import persistent_buffers, shards_of
from .tensors import all_finite


@dataclass(frozen=True)
class Survey:
    """
    What a walk over a model's parameters has found, of those that train or have trained since the last border.

    Args:
        averaged (`dict[str, torch.Tensor]`):
            Parameters that the groups average, by name, in the model's order.
        others (`dict[str, torch.Tensor]`):
            The group's own. They are not averaged, and must be finite.
        strays (`list[str]`):
            What has come to train after the start and cannot be averaged, in words.
        has_frozen (`bool`):
            Whether something that is averaged trains no more.
    """

    averaged: dict[str, torch.Tensor]
    others: dict[str, torch.Tensor]
    strays: list[str]
    has_frozen: bool


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

    def local_names(self) -> set[str]:
        """Names of the parameters and persistent buffers of which each group has its own."""
        names = {*self._trained, *persistent_buffers(self.model)}
        return {name for name in names if self.selection.is_local(name)}

    def averaged_shards(self) -> dict[str, torch.Tensor]:
        """This rank's shards of what is averaged, aliasing the parameters, in the model's order. Reshard first."""
        return shards_of(
            {
                name: param
                for name, param in self.model.named_parameters()
                if name in self._trained and self.selection.is_averaged(name) and self._is_managed(param)
            }
        )

    def survey(self) -> Survey:
        """
        [`~TrainedParameters.note_trainable`], and all else that an averaging has to know of the parameters, in one walk over the
        model. Reshard first.
        """
        training: set[str] = set()
        averaged: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        unmanaged = []
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                training.add(name)
            elif name not in self._trained:
                continue
            if self._is_managed(param):
                (averaged if self.selection.is_averaged(name) else others)[name] = param
            elif param.requires_grad:
                unmanaged.append(name)
        self._trained |= training
        has_frozen = any(not self.selection.is_local(name) for name in self._trained - training)
        return Survey(averaged, others, self._strays(unmanaged), has_frozen)

    def _is_managed(self, param: torch.Tensor) -> bool:
        """By FSDP2. Groups that one process holds have plain parameters."""
        return self.mesh.in_process or isinstance(param, DTensor)

    def _strays(self, unmanaged: Sequence[str]) -> list[str]:
        problems = [
            "Trainable parameters were added after training began, and FSDP2 does not manage them, so their gradients "
            f"are reduced nowhere: {', '.join(unmanaged)}. Add them before `prepare`."
        ]
        stray = [n for n in self._trained if not self.selection.is_averaged(n) and not self.selection.is_local(n)]
        return (problems if unmanaged else []) + [
            f"{name} was unfrozen, but is neither averaged nor local: see include_parameters and local_parameters."
            for name in sorted(stray)[:1]
        ]

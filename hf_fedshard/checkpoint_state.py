"""What is handed to a federated checkpoint: a rank's place, its group's state, and the outer loop's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .layout import FederationLayout


@dataclass(frozen=True)
class Place:
    """
    Where this rank stands in the federation that saves or resumes.

    Args:
        layout ([`FederationLayout`]):
            Its sizes.
        group_index (`int`):
            g, this rank's group.
        group (`ProcessGroup`):
            The ranks of the group.
    """

    layout: FederationLayout
    group_index: int
    group: dist.ProcessGroup


@dataclass
class GroupState:
    """
    What belongs to one group alone.

    Args:
        optimizers (`Sequence[torch.optim.Optimizer]`):
            The inner optimizers.
        others (`Mapping[str, Any]`):
            Objects with `state_dict` and `load_state_dict`, by name: schedules, the gradient scaler.
    """

    optimizers: Sequence[torch.optim.Optimizer] = ()
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class OuterState:
    """
    What belongs to the outer loop, which all groups hold alike, and what each group keeps of the model.

    Args:
        tensors (`Mapping[str, torch.Tensor]`):
            Moments of the outer optimizer, and anchors that are not the weights themselves (inside a round all of them);
            sharded as the parameters.
        description (`Mapping[str, Any]`):
            Its settings and where it stands, for JSON.
        local (`frozenset[str]`):
            Names of the tensors of the model of which each group has its own.
        residuals (`Mapping[str, torch.Tensor]`):
            What this group still owes the others under a lossy wire format, sharded as the parameters.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    description: Mapping[str, Any] = field(default_factory=dict)
    local: frozenset[str] = frozenset()
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)

"""
Federated sharded data parallelism for Hugging Face Trainer and Accelerate: FSDP2 or HSDP inside federation groups,
averaging between them (FL+FSDP and FL+HSDP, arXiv 2609.20359).

Importing this package imports nothing heavy and changes nothing, with one documented exception: in a process that
`accelerate launch` started with an FSDP config on a machine without accelerators, it makes Accelerate honour FSDP2 on
CPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import environment


if TYPE_CHECKING:
    from .border import Border
    from .callback import FedAvgCallback
    from .config import FederationConfig
    from .export import export_checkpoint
    from .group_data import GroupData, group_dataset
    from .handshake import FederationMismatchError
    from .layout import FederationLayout
    from .lifecycle import shutdown
    from .manifest import CheckpointError
    from .metrics import RoundMetrics
    from .parallelism import FederatedParallelismConfig
    from .plugin import FederatedFSDPPlugin
    from .preemption import TrainingPreempted
    from .rounds import Rounds
    from .seams import UpstreamChangedError
    from .simulation import Simulation
    from .splits import split_by_column, split_dirichlet
    from .weights import GroupCounts

__version__ = "0.1.0"

_MODULES = {
    "Border": "border",
    "CheckpointError": "manifest",
    "FedAvgCallback": "callback",
    "FederatedFSDPPlugin": "plugin",
    "FederatedParallelismConfig": "parallelism",
    "FederationConfig": "config",
    "FederationLayout": "layout",
    "FederationMismatchError": "handshake",
    "GroupCounts": "weights",
    "GroupData": "group_data",
    "RoundMetrics": "metrics",
    "Rounds": "rounds",
    "Simulation": "simulation",
    "TrainingPreempted": "preemption",
    "UpstreamChangedError": "seams",
    "export_checkpoint": "export",
    "group_dataset": "group_data",
    "shutdown": "lifecycle",
    "split_by_column": "splits",
    "split_dirichlet": "splits",
}

__all__ = [
    "Border",
    "CheckpointError",
    "FedAvgCallback",
    "FederatedFSDPPlugin",
    "FederatedParallelismConfig",
    "FederationConfig",
    "FederationLayout",
    "FederationMismatchError",
    "GroupCounts",
    "GroupData",
    "RoundMetrics",
    "Rounds",
    "Simulation",
    "TrainingPreempted",
    "UpstreamChangedError",
    "export_checkpoint",
    "group_dataset",
    "shutdown",
    "split_by_column",
    "split_dirichlet",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if environment.launch_asks_for_fsdp() and environment.launched_fsdp_version() == 2:
    import torch

    if environment.launch_forces_cpu() or not torch.accelerator.is_available():
        from .cpu import install

        install()

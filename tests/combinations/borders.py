"""Borders of a run: what is kept of them, and the exchange of weights between two stock launches through files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback

from hf_fedshard.optimizer_state import plain_name
from hf_fedshard.shards import reshard
from tests.harness.trainer_runs import State

from .cell import Cell


WAIT_SECONDS = 100.0


class Borders(TrainerCallback):
    """Keeps the weights at each border but the last, and for a launch of its own exchanges them there."""

    def __init__(self, cell: Cell, exchange: Path | None = None, group: int = 0) -> None:
        self.cell = cell
        self.exchange = exchange
        self.group = group
        self.trainer: Any = None
        self.states: list[State] = []
        self.drift = 0.0
        self.number = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step and state.global_step % self.cell.sync_every == 0:
            self.states.append(trained_state(self.trainer.model))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = state.global_step % self.cell.sync_every == 0 or state.global_step >= state.max_steps
        if self.exchange is not None and due:
            self._average()

    def _average(self) -> None:
        assert self.exchange is not None
        self.number += 1
        mine = trained_state(self.trainer.model)
        if dist.get_rank() == 0:
            own = self.exchange / f"{self.number}-{self.group}.pt"
            torch.save(mine, f"{own}.part")
            os.rename(f"{own}.part", own)
        theirs = self.exchange / f"{self.number}-{1 - self.group}.pt"
        deadline = time.monotonic() + WAIT_SECONDS
        while not theirs.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{theirs} does not come")
            time.sleep(0.01)
        other = torch.load(theirs)
        for name, parameter in self.trainer.model.named_parameters():
            if parameter.requires_grad:
                a, b = mine[plain_name(name)], other[plain_name(name)]
                self.drift = max(self.drift, float((a - b).abs().max()))
                wide = torch.promote_types(a.dtype, torch.float32)
                _assign(parameter, (0.5 * (a.to(wide) + b.to(wide))).to(a.dtype))


@torch.no_grad()
def _assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        value = value.to(parameter.device_mesh.device_type)
        sharded = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(sharded.to_local())
    else:
        parameter.copy_(value)


def trained_state(model: Any) -> State:
    """
    Args:
        model (`torch.nn.Module`):
            A sharded model.

    Returns:
        `dict[str, torch.Tensor]`: What trains, whole, by plain name.
    """
    reshard(model)
    return {
        plain_name(name): (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in (
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        )
    }

"""What a rank brings to a border."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from .exchange_plan import ExchangePlan


@dataclass(frozen=True)
class Held:
    """
    What this rank brings to a border.

    Args:
        shards (`dict[str, torch.Tensor]`):
            Its local shards of the parameters to be averaged, aliasing them or a snapshot.
        dtypes (`dict[str, torch.dtype]`):
            In what these parameters are stored: a snapshot of them may have more bits.
        means (`dict[str, torch.Tensor]`):
            Where their averages are formed, see [`OuterLoop.means`].
        moments (`dict[str, torch.Tensor]`):
            Its shards of the inner optimizers' moments, if they are averaged.
        buffers (`dict[str, torch.Tensor]`):
            Its persistent buffers.
        plans (`dict[str, ExchangePlan]`):
            How `"parameters"`, `"moments"`, the tables of `"adapters"`, and, under a lossy wire format, `"newcomers"`
            are exchanged: parameters that began to train in the round and have no anchor yet.
        finite (`bool`):
            Whether all of it is, buffers left aside that were not when training began.
        problems (`list[str]`):
            What has come to train after the start and cannot be averaged.
        copies (`dict[str, int]`):
            See [`AveragedTensors.copies`].
    """

    shards: dict[str, torch.Tensor]
    dtypes: dict[str, torch.dtype]
    means: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    plans: dict[str, ExchangePlan]
    finite: bool
    problems: list[str]
    copies: dict[str, int]

    def slow_bytes(self, part: str) -> int:
        """
        Bytes that this rank sends to other groups.

        Args:
            part (`str`):
                A key of `plans`.
        """
        return self.plans[part].slow_bytes() if part in self.plans else 0

    def parameter_bytes(self) -> int:
        """Bytes that this rank sends to other groups for the parameters."""
        return sum(self.slow_bytes(part) for part in self.plans if part != "moments")

    def digest(self) -> int:
        """A number that is the same in all groups if they average the same parameters."""
        return zlib.crc32(repr(list(self.shards)).encode())

    def moments_digest(self) -> int:
        """The same for the moments."""
        return zlib.crc32(repr([(name, tensor.dtype) for name, tensor in self.moments.items()]).encode())

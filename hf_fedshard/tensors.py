"""Single tensors: their dtypes, whether they are finite, how they cross a collective, and who reads their memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def note_reader(tensors: Iterable[torch.Tensor]) -> None:
    """
    To be called before tensors are let go that the current stream reads, and that another may have made: a device's allocator
    returns memory to the stream that it was made on, and would hand it out there while it is still read here.

    Args:
        tensors (`Iterable[torch.Tensor]`):
            On any device; on the CPU there is nothing to do.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.accelerator.current_stream())

"""Single tensors: their dtypes, whether they are finite, how they cross a collective, and who reads their memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """
    Whether no element is NaN or infinite.

    Args:
        tensors (`Iterable[torch.Tensor]`):
            Tensors of any dtype on any device; integers are finite.
    """
    # The largest magnitude: NaN and infinity show in it, and unlike a sum of squares it cannot overflow. The results are
    # brought together before one of them is read, which is when a device is waited for.
    largest = [largest_magnitude(tensor).double() for tensor in tensors if holds_floats(tensor)]
    device = largest[0].device if largest else None
    return not largest or bool(torch.isfinite(torch.stack([value.to(device) for value in largest])).all())


def holds_floats(tensor: torch.Tensor) -> bool:
    """
    Whether a tensor has elements that could be infinite or no numbers.

    Args:
        tensor (`torch.Tensor`):
            Of any dtype; integers and constants in complex numbers are finite.
    """
    return tensor.numel() > 0 and tensor.is_floating_point()


def largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """
    The largest magnitude of a tensor's elements, left on its device. NaN and infinity show in it.

    Args:
        tensor (`torch.Tensor`):
            Floating-point numbers, at least one.
    """
    # Torch has no norm of numbers in 8 bits.
    return torch.linalg.vector_norm(tensor if tensor.element_size() > 1 else tensor.float(), ord=math.inf)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """
    The dtype in which values of `dtype` are averaged: fp32 or more, and integers as they are.

    Args:
        dtype (`torch.dtype`):
            The storage dtype.
    """
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype


# What gloo and NCCL both carry. A model's buffers may be anything: int16, float8, complex.
_CARRIED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


def to_wire(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
    """
    A contiguous stand-in for a collective that hands values on; in bytes, which every backend carries, where not all carry
    its dtype.

    Args:
        tensor (`torch.Tensor`):
            What is to be sent. The stand-in is the tensor itself, or its memory, where it is fit for it.
        device (`torch.device`):
            Where the collective runs.
        non_blocking (`bool`, defaults to `False`):
            Whether a copy from pinned host memory to a device is not waited for.

    Returns:
        `torch.Tensor`: Of the tensor's shape; in bytes its last dim is longer by the bytes of an element.
    """
    # What comes from a device is waited for in any case: host memory may be read at once.
    wire = tensor.to(device, non_blocking=non_blocking and tensor.device.type == "cpu").contiguous()
    if wire.dtype in _CARRIED:
        return wire
    return (wire if wire.ndim else wire.reshape(1)).view(torch.uint8)


def from_wire(tensor: torch.Tensor, wire: torch.Tensor) -> None:
    """
    Copies what a stand-in has received back, unless it is the tensor's own memory.

    Args:
        tensor (`torch.Tensor`):
            Where it belongs, written in place.
        wire (`torch.Tensor`):
            From [`to_wire`].
    """
    if wire.data_ptr() != tensor.data_ptr() or wire.device != tensor.device:
        tensor.copy_(wire.view(tensor.dtype).view(tensor.shape))


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

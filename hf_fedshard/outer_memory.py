"""Where the outer state lives between borders: beside the parameters, or in host memory (`offload_outer_state`)."""

from __future__ import annotations

from typing import Any

import torch


class OuterMemory:
    """
    Makes room for what lives from border to border.

    In host memory it is pinned where the device is no CPU, so that copies run at the full rate of the bus. Torch rounds
    pinned tensors up to powers of two, so host memory may be taken up to twice. Where the device is the CPU, an outer step
    makes working copies all the same, so that it is the same code as on a GPU.

    Args:
        offload (`bool`):
            Whether that is host memory.
    """

    def __init__(self, offload: bool) -> None:
        self.offload = offload

    def copy(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
        """
        A copy to be held.

        Args:
            tensor (`torch.Tensor`):
                Anything, anywhere.
            device (`torch.device`):
                What it is worked on with, and where it is held without offload.
            dtype (`torch.dtype`, *optional*):
                That of the copy; by default the tensor's.
        """
        if not self.offload:
            return tensor.detach().to(device, dtype or tensor.dtype, copy=True)
        held = empty_on_host(tensor, dtype or tensor.dtype, pinned=device.type != "cpu")
        return held.copy_(tensor.detach())

    def adopt_state(self, optimizer: torch.optim.Optimizer, anchor: torch.Tensor, device: torch.device) -> None:
        """
        Brings the state that an optimizer has made for a parameter to where it is to be held.

        Args:
            optimizer (`torch.optim.Optimizer`):
                The outer optimizer.
            anchor (`torch.Tensor`):
                The parameter.
            device (`torch.device`):
                What it is worked on with.
        """
        if self.offload and anchor in optimizer.state:
            state = optimizer.state[anchor]
            state.update({key: self.copy(value, device) for key, value in state.items() if _is_large(value, anchor)})

    def step(self, optimizer: torch.optim.Optimizer, anchor: torch.Tensor, gradient: torch.Tensor) -> None:
        """
        Steps one parameter of an optimizer, on the device of its gradient: where they are in host memory it brings the
        parameter and its state there, and back again. The arithmetic is that of a step of all at once, bit for bit.

        Args:
            optimizer (`torch.optim.Optimizer`):
                The outer optimizer, with one group of parameters, which it steps one by one.
            anchor (`torch.Tensor`):
                The parameter, where it is held.
            gradient (`torch.Tensor`):
                Its gradient.
        """
        if not self.offload:
            _step_alone(optimizer, anchor, gradient)
            return
        device = gradient.device
        held: dict[str, Any] = optimizer.state.pop(anchor, {})
        working = anchor.detach().to(device, copy=True)
        if held:
            optimizer.state[working] = {
                key: value.to(device, copy=True) if _is_large(value, anchor) else value for key, value in held.items()
            }
        _step_alone(optimizer, working, gradient)
        anchor.copy_(working)
        for key, value in optimizer.state.pop(working, {}).items():
            if not _is_large(value, anchor):
                held[key] = value
            elif key in held:
                held[key].copy_(value)
            else:
                held[key] = self.copy(value, device)
        optimizer.state[anchor] = held


def _step_alone(optimizer: torch.optim.Optimizer, param: torch.Tensor, gradient: torch.Tensor) -> None:
    (group,) = optimizer.param_groups
    everything, group["params"] = group["params"], [param]
    param.grad = gradient
    try:
        optimizer.step()
    finally:
        group["params"] = everything
        param.grad = None


def empty_on_host(like: torch.Tensor, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """
    Host memory for a tensor.

    Args:
        like (`torch.Tensor`):
            Gives the shape.
        dtype (`torch.dtype`):
            Its type.
        pinned (`bool`):
            Whether a device copies from and to it.
    """
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=pinned)


def _is_large(value: Any, anchor: torch.Tensor) -> bool:
    """Whether a state is a tensor like its parameter: counters stay where the optimizer wants them."""
    return isinstance(value, torch.Tensor) and value.shape == anchor.shape

"""Reading and writing the local shards of an FSDP2 model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def reshard(model: nn.Module) -> dict[str, nn.Module]:
    """
    Puts every FSDP2 module back to its sharded parameters.

    A forward without backward (evaluation, generation) leaves modules with `reshard_after_forward=False` gathered:
    `parameters()` then yields plain full tensors, and what is written there, or to DTensors collected earlier, is
    lost.

    Args:
        model (`nn.Module`):
            A model with FSDP2 modules. No collective.

    Returns:
        `dict[str, nn.Module]`: All of its modules by name, for [`reshard_modules`] and [`find_parameters`].
    """
    modules = dict(model.named_modules())
    reshard_modules(modules.values())
    return modules


def reshard_modules(modules: Iterable[nn.Module]) -> None:
    """
    [`reshard`] without a walk over the model.

    Args:
        modules (`Iterable[nn.Module]`):
            Those among which the FSDP2 modules are.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def find_parameters(
    model: nn.Module, modules: Mapping[str, nn.Module], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """
    Parameters as they are registered now, without a walk over the model.

    Args:
        model (`nn.Module`):
            The model, resharded.
        modules (`Mapping[str, nn.Module]`):
            Its modules by name. `get_parameter` goes to each from the root, which takes several times as long.
        names (`Iterable[str]`):
            From `named_parameters()`.
    """
    found = {}
    for name in names:
        path, _, own = name.rpartition(".")
        # A wrapper around the whole model may leave its name out of those of parameters.
        module = modules[path] if path in modules else model.get_submodule(path)
        found[name] = getattr(module, own)
    return found


def check_trainable_parameters(model: nn.Module) -> None:
    """
    Refuses trainable parameters that FSDP2 does not manage: their gradients are reduced by nobody, not even in a
    group.

    Args:
        model (`nn.Module`):
            The prepared model, resharded.

    Raises:
        ValueError: If there is no FSDP2 module, nothing to train, or a trainable parameter that is no `DTensor`.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "The model has no FSDP2 module. Prepare it first: `accelerator.prepare(model, optimizer)` in a launch with "
            "FSDP version 2."
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("The model has no trainable parameter, so there is nothing to train or to average.")
    plain = unmanaged_parameters(model)
    if plain:
        shown = ", ".join(plain[:5]) + (f" and {len(plain) - 5} more" if len(plain) > 5 else "")
        raise ValueError(
            f"{len(plain)} trainable parameters are not managed by FSDP2 (ignored_modules, or added after the model was "
            f"prepared), so their gradients would be reduced nowhere: {shown}. Freeze them, take them out of "
            "ignored_modules, or add them before preparing the model."
        )


def unmanaged_parameters(model: nn.Module) -> list[str]:
    """
    Names of the trainable parameters that FSDP2 does not manage.

    Args:
        model (`nn.Module`):
            The prepared model, resharded.
    """
    return [n for n, param in model.named_parameters() if param.requires_grad and not isinstance(param, DTensor)]


def drop_stale_state(optimizer: torch.optim.Optimizer) -> None:
    """
    Frees what an optimizer keeps of parameters that it no longer steps: Adagrad makes its state when it is constructed,
    for whole parameters, before FSDP2 exchanges them for sharded ones.

    Args:
        optimizer (`torch.optim.Optimizer`):
            A prepared optimizer.
    """
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for param in [param for param in optimizer.state if id(param) not in stepped]:
        del optimizer.state[param]


def local_shards(model: nn.Module, plain: bool = False) -> dict[str, torch.Tensor]:
    """
    The tensors in which this rank holds its share of the parameters. Call [`reshard`] first.

    Args:
        model (`nn.Module`):
            The prepared model.
        plain (`bool`, defaults to `False`):
            Whether the model is held whole, its parameters plain tensors.

    Returns:
        `dict[str, torch.Tensor]`: By name, in the model's order, the same on all ranks. Each aliases the parameter's
        storage; a shard may be empty. A tensor that several modules share appears once.
    """
    return shards_of({name: param for name, param in model.named_parameters() if plain or isinstance(param, DTensor)})


@torch.no_grad()
def shards_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    The tensors in which this rank holds its share of some parameters.

    Args:
        parameters (`Mapping[str, torch.Tensor]`):
            By name, of a resharded model. One that is no `DTensor` is held whole.

    Returns:
        `dict[str, torch.Tensor]`: In their order. Each aliases the parameter's storage.
    """
    # In this order: detaching a DTensor goes through its dispatcher, which takes longer than all the rest of a walk.
    return {
        name: (param.to_local() if isinstance(param, DTensor) else param).detach()
        for name, param in parameters.items()
    }


def as_sharded(shard: torch.Tensor, param: torch.Tensor) -> DTensor:
    """
    A tensor that is sharded as a parameter is.

    Args:
        shard (`torch.Tensor`):
            This rank's shard, on any device. The result aliases it.
        param (`torch.Tensor`):
            The parameter, a `DTensor`.
    """
    assert isinstance(param, DTensor)
    if shard.device.type != param.device_mesh.device_type:
        # `from_local` would move it to the device of the mesh, and what is read into that copy would be lost. There is no
        # public way to a DTensor in host memory; FSDP2 makes those of its CPU offload in this one.
        meta = TensorMeta(param.shape, param.stride(), shard.dtype)
        return DTensor(shard, DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta), requires_grad=False)
    return DTensor.from_local(
        shard, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def replicated_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """
    What every rank holds whole: buffers, and frozen parameters outside of FSDP2.

    Args:
        model (`nn.Module`):
            The prepared model.

    Returns:
        `dict[str, torch.Tensor]`: By name, in the model's order, on all ranks the same names and shapes.
    """
    plain = {name: param.detach() for name, param in model.named_parameters() if not isinstance(param, DTensor)}
    return {**plain, **{name: buffer.detach() for name, buffer in model.named_buffers()}}


def persistent_buffers(model: nn.Module, modules: Mapping[str, nn.Module] | None = None) -> dict[str, torch.Tensor]:
    """
    The buffers that belong to the model's state, such as BatchNorm statistics; constants rebuilt at construction
    (non-persistent buffers) are left out.

    Args:
        model (`nn.Module`):
            The prepared model.
        modules (`Mapping[str, nn.Module]`, *optional*):
            All of its modules by name, from [`reshard`], which spares a walk over the model.

    Returns:
        `dict[str, torch.Tensor]`: By name, in the model's order.
    """
    found = {}
    for prefix, module in (dict(model.named_modules()) if modules is None else modules).items():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer.detach()
    return found


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

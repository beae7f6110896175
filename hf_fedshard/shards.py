"""Reading and writing the local shards of an FSDP2 model."""

from __future__ import annotations

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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """
    What this rank holds of a tensor, aliasing it, without its history.

    Args:
        tensor (`torch.Tensor`):
            One that is no `DTensor` is held whole.
    """
    # In this order: detaching a DTensor goes through its dispatcher, which takes longer than all the rest of a walk.
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


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
    return {name: local_part(param) for name, param in parameters.items()}


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

"""
FSDP2 on CPU. Accelerate 1.15 drops FSDP there without a word: its state stays `MULTI_CPU` and loses the plugin,
although all below it works on gloo. This is the one module that sets Accelerate's state, and the only one that wraps a
class.
"""

from __future__ import annotations

import functools
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from .launch import check_not_alone


_original_init: Any = None


def enable_fsdp_on_cpu(state: AcceleratorState, plugin: FullyShardedDataParallelPlugin) -> bool:
    """
    Puts an FSDP2 plugin in force in a state of several CPU processes, as Accelerate does by itself on accelerators.

    Args:
        state (`AcceleratorState`):
            Accelerate's state. Untouched unless its type is `MULTI_CPU`.
        plugin (`FullyShardedDataParallelPlugin`):
            The plugin that Accelerate was given. FSDP1 is left alone, to be refused by name later.

    Returns:
        `bool`: Whether it was needed and done.
    """
    if state.distributed_type != DistributedType.MULTI_CPU or plugin.fsdp_version != 2:
        return False
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    # `AcceleratorState` copies the partial state's type each time it is looked up.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return True


def install() -> None:
    """
    Makes every later `Accelerator` of several CPU processes honour the FSDP2 plugin it is given.

    Trainer reads whether FSDP is on in its constructor, before any callback can act, so for a launch with FSDP on CPU
    this has to be in place earlier. Importing `hf_fedshard` does it in such a launch and in no other; making a
    [`FedAvgCallback`] does it where there is no accelerator. Without effect on accelerators.
    """
    global _original_init
    if _original_init is not None:
        return
    _original_init = original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Before Accelerate finds that the sizes of the launch file do not fit one process, which is not the fault.
        check_not_alone(self)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None:
            enable_fsdp_on_cpu(self, plugin)

    AcceleratorState.__init__ = init


def uninstall() -> None:
    """Takes [`install`] back."""
    global _original_init
    if _original_init is not None:
        AcceleratorState.__init__ = _original_init
        _original_init = None

"""
Federates a standard Trainer script without a changed line.

    accelerate launch --config_file FILE -m hf_fedshard.run --num_groups 2 --sync_every 8 script.py [its own arguments]

Each `Trainer` that the script builds, or subclass of it, starts with a [`FedAvgCallback`] of these settings.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import HfArgumentParser, Trainer
from transformers import trainer as trainer_module

from . import environment
from .callback import FedAvgCallback
from .config import FederationConfig
from .lifecycle import shutdown
from .seams import UpstreamChangedError
from .versions import TESTED_VERSIONS


def describe_arguments(owner: type) -> dict[str, str]:
    """
    What the docstring of a class says about its arguments.

    Args:
        owner (`type`):
            A class with a docstring in the Hugging Face format.

    Returns:
        `dict[str, str]`: Description in one line, by argument.
    """
    section = re.search(r"^Args:\n((?: .*\n|\n)+)", inspect.getdoc(owner) or "", re.M)
    found = re.findall(r"^ {4}(\w+) \(.*\):\n((?: {8}.*\n?)+)", section[1] if section else "", re.M)
    # argparse fills in what follows a percent sign.
    return {name: " ".join(text.split()).replace("%", "%%") for name, text in found}


def make_parser() -> HfArgumentParser:
    """
    The parser of the command line: each setting of [`FederationConfig`] is an option.

    Returns:
        `HfArgumentParser`: Its dataclass has `None` for what is not given.
    """
    hints, helps = typing.get_type_hints(FederationConfig), describe_arguments(FederationConfig)
    options = []
    for item in dataclasses.fields(FederationConfig):
        default = "" if item.default is None else f", else {item.default}"
        text = f"{helps.get(item.name, '')} Default: {environment.PREFIX}{item.name.upper()}{default}."
        # What can be a text is one on a command line; the configuration reads it.
        kind = str if str in typing.get_args(hints[item.name]) else hints[item.name]
        # `None` unless given: else a default of this parser would beat the environment.
        options.append((item.name, kind | None, dataclasses.field(default=None, metadata={"help": text.strip()})))
    parser = HfArgumentParser(
        dataclasses.make_dataclass("FederationOptions", options),  # type: ignore[arg-type]
        prog="python -m hf_fedshard.run",
        usage="accelerate launch --config_file FILE -m hf_fedshard.run [option ...] script.py [argument ...]",
        description="Federate a script that builds a Trainer, as it is. Start it with an FSDP version 2 launch file.",
        formatter_class=argparse.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="The Python script.")
    # All that follows is the script's, whatever it looks like.
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="Its own arguments.")
    return parser


@contextlib.contextmanager
def federate_trainers(settings: dict[str, Any]) -> Iterator[list[str]]:
    """
    While the context lasts, each Trainer that is made starts with a callback of its own.

    Args:
        settings (`dict[str, Any]`):
            Arguments of [`FedAvgCallback`].

    Returns:
        `list[str]`: Grows by a class name with each Trainer that is federated.
    """
    callbacks = getattr(trainer_module, "DEFAULT_CALLBACKS", None)
    if not isinstance(callbacks, list):
        raise UpstreamChangedError(
            "transformers.trainer.DEFAULT_CALLBACKS is no list any more, but hf_fedshard.run builds on it. It was tested "
            f"with {TESTED_VERSIONS}: install these, or pass FedAvgCallback to the Trainer yourself."
        )
    federated: list[str] = []

    class ScriptCallback(FedAvgCallback):
        """Made by each Trainer for itself, without arguments."""

        def __init__(self) -> None:
            super().__init__(**settings)

        def bind(self, trainer: Trainer) -> None:
            super().bind(trainer)
            federated.append(type(trainer).__name__)

    callbacks.append(ScriptCallback)
    try:
        yield federated
    finally:
        callbacks.remove(ScriptCallback)


def run_script(script: str, arguments: Sequence[str]) -> None:
    """
    Runs a file as `python script arguments` does: as `__main__`, with its own `sys.argv` and `sys.path[0]`.

    Args:
        script (`str`):
            Path of the file.
        arguments (`Sequence[str]`):
            Its arguments.

    Raises:
        SystemExit: With code 1 if the script fails, after its traceback has been printed.
    """
    path = os.path.abspath(script)
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    # Not restored, which `runpy` would do: what the script leaves for the end of the process still finds its module.
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, main.__dict__)
    except Exception as error:
        # As by itself: without the frames of this module, through whatever hook the script or torch has set.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """
    The command line.

    Args:
        arguments (`Sequence[str]`, *optional*):
            Defaults to those of the process.
    """
    parser = make_parser()
    options, rest = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    settings = {name: value for name, value in vars(options).items() if value is not None}
    try:
        # Of several processes the environment, which completes the settings, may be another one on each node: the callback
        # reads it, and fails on all ranks.
        if environment.launched_world_size() == 1:
            FederationConfig.from_arguments(**settings)
    except ValueError as error:
        parser.error(str(error))
    if not os.path.isfile(rest.script):
        parser.error(f"there is no script {rest.script!r}; options of hf_fedshard.run go before it, its own behind it")
    if environment.launch_asks_for_fsdp() and not torch.accelerator.is_available():
        # The launcher hands `use_cpu` on to a single process only, and each rank would believe that it is alone.
        environment.force_cpu()
    with federate_trainers(settings) as federated:
        try:
            run_script(rest.script, rest.script_args)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    shutdown()
    if not federated:
        sys.exit(
            f"error: {rest.script} built no Trainer, so nothing was federated. A loop of its own needs "
            "FederatedFSDPPlugin, see 'Accelerate loops' in the README."
        )


if __name__ == "__main__":
    main()

"""Recipes in the processes of a pool: as `accelerate launch` starts them, without the time that it takes."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from .tiny_trainer import forget_meshes


def run_recipe(name: str, words: list[str], folder: str, record: bool = False) -> Any:
    """
    Runs the `main` of a recipe. To be called on every rank, with the variables of a launch.

    Args:
        name (`str`):
            Module in `recipes`.
        words (`list[str]`):
            Its command line.
        folder (`str`):
            Working directory.
        record (`bool`, *optional*, defaults to `False`):
            Whether to record the collectives of its Trainer's training.

    Returns:
        `list[str]` or `None`: Collectives that crossed a group border inside a round, if recorded.
    """
    from accelerate.state import AcceleratorState

    from hf_fedshard import cpu

    from .timeline import Timeline

    forget_meshes()
    AcceleratorState._reset_state(reset_partial_state=True)
    cpu.install()
    here, argv = os.getcwd(), sys.argv
    os.chdir(folder)
    sys.argv = [f"{name}.py", *words]
    recipes = os.path.join(os.path.dirname(__file__), "..", "..", "recipes")
    if recipes not in sys.path:
        sys.path.insert(0, recipes)
    try:
        module = importlib.import_module(name)
        if not record:
            return module.main()
        make = module.make_trainer
        timelines = []

        def make_recorded(*args: Any) -> Any:
            trainer = make(*args)
            train, timeline = trainer.train, Timeline(num_groups=2)

            def recorded(*args: Any, **kwargs: Any) -> Any:
                with timeline.of(trainer):
                    return train(*args, **kwargs)

            trainer.train = recorded
            timelines.append(timeline)
            return trainer

        module.make_trainer = make_recorded
        try:
            module.main()
        finally:
            module.make_trainer = make
        assert timelines[0].inside_rounds()
        return timelines[0].crossing_inside_rounds()
    finally:
        os.chdir(here)
        sys.argv = argv

"""Replacing bound methods on one instance: checked before, undone after."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .versions import TESTED_VERSIONS


_MARK = "_hf_fedshard_replacement"


class UpstreamChangedError(RuntimeError):
    """A method of Trainer or Accelerate that this package stands on is missing or takes other arguments."""


def check_seam(owner: type, name: str, parameters: Sequence[str]) -> None:
    """
    Checks that a class still has the method that is about to be replaced on one of its instances.

    Args:
        owner (`type`):
            The upstream class.
        name (`str`):
            The method.
        parameters (`Sequence[str]`):
            Parameters that it must take, in this order, after `self`.

    Raises:
        UpstreamChangedError: If it does not; the message names the tested versions.
    """
    method = getattr(owner, name, None)
    found = None if method is None else [p for p in inspect.signature(method).parameters if p != "self"]
    if found is None or [p for p in found if p in parameters] != list(parameters):
        now = "is missing" if found is None else f"takes ({', '.join(found)})"
        raise UpstreamChangedError(
            f"{owner.__module__}.{owner.__qualname__}.{name} {now}, but hf_fedshard builds on {name}"
            f"({', '.join(parameters)}). It was tested with {TESTED_VERSIONS}: install these, or a release of "
            "hf_fedshard for your versions."
        )


def check_seams(owner: type, seams: Mapping[str, Sequence[str]]) -> None:
    """
    Checks several methods of a class, see [`check_seam`].

    Args:
        owner (`type`):
            The upstream class.
        seams (`Mapping[str, Sequence[str]]`):
            Parameters by the name of the method.

    Raises:
        UpstreamChangedError: If one is not as expected.
    """
    for name, parameters in seams.items():
        check_seam(owner, name, parameters)


def check_attribute(instance: Any, name: str) -> None:
    """
    Checks that an object still has an attribute that this package reads.

    Args:
        instance (`Any`):
            The upstream object.
        name (`str`):
            The attribute.

    Raises:
        UpstreamChangedError: If it has not.
    """
    if not hasattr(instance, name):
        raise UpstreamChangedError(
            f"{type(instance).__qualname__}.{name} is missing, but hf_fedshard reads it. It was tested with "
            f"{TESTED_VERSIONS}: install these, or a release of hf_fedshard for your versions."
        )


class _Replacement:
    """One method of one instance, replaced; several may lie on top of each other."""

    def __init__(self, instance: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.instance = instance
        self.name = name
        self.below = vars(instance).get(name)
        original = getattr(instance, name)
        replacement = make(original)

        # Upstream looks at signatures, for `use_gather_object` for example.
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (original if self.is_over else replacement)(*args, **kwargs)

        self.is_over = False
        self.call = call
        call.__dict__[_MARK] = self
        setattr(instance, name, call)

    def end(self) -> None:
        """
        Takes it off. What was laid on top of it stays, and calls what lies below: of two federations on one accelerator
        either may end first.
        """
        self.is_over = True
        while (top := _on_top(self.instance, self.name)) is not None and top.is_over:
            if top.below is None:
                delattr(self.instance, self.name)
            else:
                setattr(self.instance, self.name, top.below)


def _on_top(instance: Any, name: str) -> _Replacement | None:
    """The replacement that a call of the method meets first, unless that is somebody else's."""
    held = vars(instance).get(name)
    found: _Replacement | None = getattr(held, _MARK, None)
    # What somebody has laid on top with `functools.wraps` has the mark too.
    return found if found is not None and found.call is held else None


class Patches:
    """Replacements of bound methods on instances, to be undone together. Classes are never touched."""

    def __init__(self) -> None:
        self._replacements: list[_Replacement] = []

    def replace(self, instance: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """
        Replaces a method on one instance.

        Args:
            instance (`Any`):
                The object.
            name (`str`):
                The method's name.
            make (`Callable`):
                Called with the method as it is now, returns what takes its place.
        """
        self._replacements.append(_Replacement(instance, name, make))

    def undo(self) -> None:
        """Takes everything off, last first. What others have laid on top stays, and calls what lies below."""
        while self._replacements:
            self._replacements.pop().end()

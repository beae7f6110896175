"""Which parameters and buffers are averaged, and which every group keeps for itself."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn


if TYPE_CHECKING:
    from .config import FederationConfig

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_REGEX = "re:"


def plain_name(name: str) -> str:
    """
    A parameter's name without the wrappers of activation checkpointing and compilation.

    Args:
        name (`str`):
            From `named_parameters()`.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parse_patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """
    Takes patterns apart.

    Args:
        patterns (`str` or `Sequence[str]`):
            Several, or a text with commas between them.

    Raises:
        ValueError: If one is no text or no valid regular expression.
    """
    found = patterns.split(",") if isinstance(patterns, str) else list(patterns)
    if not all(isinstance(pattern, str) for pattern in found):
        raise ValueError(f"patterns must be texts, but got {patterns!r}.")
    found = [pattern.strip() for pattern in found if pattern.strip()]
    for pattern in found:
        if pattern.startswith(_REGEX):
            try:
                re.compile(pattern.removeprefix(_REGEX))
            except re.error as error:
                raise ValueError(f"the regular expression {pattern!r} is not valid: {error}.") from error
    return tuple(found)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """
    Whether a name matches a pattern.

    Args:
        name (`str`):
            Of a parameter or buffer.
        patterns (`Iterable[str]`):
            Shell patterns (`*`, `?`, `[...]`) of the whole name; after `re:` a regular expression that occurs in it.
    """
    return any(
        re.search(pattern.removeprefix(_REGEX), name) is not None
        if pattern.startswith(_REGEX)
        else fnmatch.fnmatchcase(name, pattern)
        for pattern in patterns
    )


class Selection:
    """
    Divides what trains into what is averaged and what is local to its group.

    Args:
        config ([`FederationConfig`]):
            The settings.
    """

    def __init__(self, config: FederationConfig) -> None:
        self.included = parse_patterns(config.include_parameters)
        self.excluded = parse_patterns(config.exclude_parameters) + parse_patterns(config.local_parameters)
        self.local = parse_patterns(config.local_parameters)
        self._roles: dict[str, tuple[bool, bool]] = {}
        """Whether a name is averaged, and local: asked for every parameter in each averaging."""

    def is_local(self, name: str) -> bool:
        """
        Whether each group has its own.

        Args:
            name (`str`):
                Of a parameter that trains, or of a buffer.
        """
        return self._role(name)[1]

    def is_averaged(self, name: str) -> bool:
        """
        Whether the groups average it.

        Args:
            name (`str`):
                Of a parameter that trains.
        """
        return self._role(name)[0]

    def _role(self, name: str) -> tuple[bool, bool]:
        if name not in self._roles:
            plain = plain_name(name)
            averaged = matches(plain, self.included) and not matches(plain, self.excluded)
            self._roles[name] = averaged, matches(plain, self.local)
        return self._roles[name]

    def check(self, model: nn.Module) -> None:
        """
        Refuses patterns that name nothing, and parameters that would train and be neither averaged nor local.

        Args:
            model (`nn.Module`):
                The prepared model.

        Raises:
            ValueError: With the pattern, or the parameters.
        """
        parameters = {plain_name(name): param.requires_grad for name, param in model.named_parameters()}
        names = [*parameters, *(plain_name(name) for name, _ in model.named_buffers())]
        for field, patterns in (
            ("include_parameters", self.included),
            ("exclude_parameters", [pattern for pattern in self.excluded if pattern not in self.local]),
            ("local_parameters", self.local),
        ):
            for pattern in patterns:
                if not any(matches(name, [pattern]) for name in names):
                    raise ValueError(
                        f"{field} has {pattern!r}, which names no parameter or buffer of the model. Its names are like "
                        f"{', '.join(names[:3])}."
                    )
        trained = [name for name, trains in parameters.items() if trains]
        stray = [name for name in trained if not self.is_averaged(name) and not self.is_local(name)]
        if stray:
            shown = ", ".join(stray[:3]) + (f" and {len(stray) - 3} more" if len(stray) > 3 else "")
            raise ValueError(
                f"{len(stray)} parameters train, but include_parameters and exclude_parameters leave them out of the "
                f"average: {shown}. The groups would come apart in them. Freeze them, or name them in local_parameters "
                "if each group is to have its own."
            )
        if trained and not any(self.is_averaged(name) for name in trained):
            raise ValueError("No parameter that trains is averaged: the groups would have nothing in common.")

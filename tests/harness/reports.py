"""What a rank tells the test process about one body, and the exceptions made from it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RankError:
    """
    An exception of one rank, in a form that can always be sent: exception objects themselves often cannot be pickled.

    Args:
        rank (`int`):
            Rank that raised.
        type_name (`str`):
            Name of the exception's class, without its module.
        message (`str`):
            `str()` of the exception.
        traceback (`str`):
            Formatted traceback with the local variables of each frame.
        bases (`tuple[str, ...]`):
            Names of all classes the exception is an instance of.
    """

    rank: int
    type_name: str
    message: str
    traceback: str = field(repr=False, default="")
    bases: tuple[str, ...] = field(repr=False, default=())

    def is_a(self, kind: type[BaseException] | str) -> bool:
        """
        Whether the exception is an instance of `kind`.

        Args:
            kind (`type[BaseException]` or `str`):
                Exception class, or its name.

        Returns:
            `bool`: `True` for the class itself and every subclass.
        """
        return (kind if isinstance(kind, str) else kind.__name__) in self.bases

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> RankError:
        """
        Describes `error`, which is being handled on `rank`.

        Args:
            rank (`int`):
                Rank that raised.
            error (`BaseException`):
                The exception.

        Returns:
            `RankError`: The record to send.
        """
        # Plain `assert a == b` has no message in a worker (only pytest rewrites assertions): the locals say what a
        # and b were.
        formatted = traceback.TracebackException.from_exception(error, compact=True)
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        for summary, frame in zip(formatted.stack, frames, strict=False):
            foreign = "site-packages" in summary.filename or summary.filename.endswith("harness/worker.py")
            if not foreign:
                summary.locals = {name: _shorten(_represent(value)) for name, value in frame.f_locals.items()}
        bases = tuple(base.__name__ for base in type(error).__mro__ if base is not object)
        return cls(rank, type(error).__name__, str(error), "".join(formatted.format()), bases)


def _represent(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<no repr: {error}>"


def _shorten(value: str, limit: int = 200) -> str:
    return value if len(value) <= limit else value[: limit - 4] + " ..."


@dataclass(frozen=True)
class RankReport:
    """
    The outcome of one body on one rank.

    Args:
        rank (`int`):
            Rank of the worker.
        value (`Any`, *optional*):
            What the body returned.
        error (`RankError`, *optional*):
            What the body raised.
        output (`str`, *optional*, defaults to `""`):
            End of what the body wrote to stdout and stderr.
        seconds (`float`, *optional*, defaults to 0.0):
            Time the body took on this rank.
    """

    rank: int
    value: Any = None
    error: RankError | None = None
    output: str = ""
    seconds: float = 0.0


class WorldError(AssertionError):
    """
    Raised in the test when a body failed. The text names every rank that raised and shows its traceback.

    Args:
        title (`str`):
            First line.
        errors (`list[RankError]`):
            Errors of the ranks that raised, in the order in which they arrived: the first one is usually the cause.
        details (`str`, *optional*, defaults to `""`):
            Stacks of hanging ranks, output.
    """

    def __init__(self, title: str, errors: list[RankError], details: str = "") -> None:
        self.errors = errors
        parts = [title]
        shown: dict[tuple[str, str], list[int]] = {}
        for error in errors:
            shown.setdefault((error.type_name, error.message), []).append(error.rank)
        for (type_name, message), ranks in shown.items():
            first = next(error for error in errors if error.rank == ranks[0])
            parts.append(f"--- rank {', '.join(map(str, ranks))}: {type_name}: {message}\n{first.traceback}")
        if details:
            parts.append(details)
        super().__init__("\n".join(parts))


class WorldTimeoutError(WorldError):
    """Raised in the test when a body did not end in time on every rank. The text shows what each rank was doing."""

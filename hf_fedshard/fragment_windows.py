"""What a rank has counted for each fragment of a model since that was last averaged: the weights go by it."""

from __future__ import annotations

import dataclasses
from typing import Any

from .flights import Count, Span
from .metrics import Tally


class FragmentWindows:
    """
    The windows between two exchanges of a fragment. They begin at different steps, so a window reaches over a round's end;
    for the last fragment, and for a whole model, it is the round.

    Args:
        num_fragments (`int`):
            Fragments of the model.
    """

    def __init__(self, num_fragments: int) -> None:
        self.num_fragments = num_fragments
        self._before: tuple[Any, ...] = (0.0,) * 4
        self._counted: dict[int, tuple[Any, ...]] = {}

    def begin_anew(self) -> None:
        """Told of a border: all fragments begin with it."""
        self._before = (0.0,) * 4
        self._counted.clear()

    def close(self, fragment: int, span: Span) -> tuple[Tally, Count]:
        """
        Ends a fragment's window where its exchange starts, and begins the next one.

        Args:
            fragment (`int`):
                Its number.
            span ([`Span`]):
                What was counted in the round so far.

        Returns:
            `tuple[Tally, Count]`: What was counted since the last exchange of the fragment, a copy, and the steps that an
            optimizer made, not read: they may be on the device.
        """
        tally = span.tally
        counts: tuple[Any, ...] = (tally.tokens, tally.labels, tally.samples, span.updates)
        now = tuple(before + count for before, count in zip(self._before, counts, strict=True))
        if fragment == self.num_fragments - 1:
            self._before = now
            return dataclasses.replace(tally), span.updates
        counted, self._counted[fragment] = self._counted.get(fragment, (0.0,) * 4), now
        tokens, labels, samples, updates = (total - before for total, before in zip(now, counted, strict=True))
        return dataclasses.replace(tally, tokens=tokens, labels=labels, samples=samples), updates

"""Which cases of a parametrised test are quick."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_and_slow(cases: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Cases for `parametrize`: those that are not named as quick are marked slow. A name that is no case is an error."""
    cases = list(cases)
    unknown = set(quick) - set(cases)
    if unknown:
        raise ValueError(f"no such cases: {', '.join(sorted(unknown))}")
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]

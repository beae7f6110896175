"""However a run ends, its last round is averaged, once, and no collective crosses groups before that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.data import StreamDataset, token_samples
from tests.harness.pool import WorkerPool
from tests.test_isolation import run_isolated


class Once(StreamDataset):
    """A stream that cannot be read a second time."""

    def __iter__(self) -> Any:
        rest, self.samples = self.samples, []
        return iter(rest)


ENDINGS = {
    "max_steps": ({"max_steps": 6}, [4, 6]),
    "epochs": ({"max_steps": -1, "num_train_epochs": 1}, [4, 6]),
    "part of an epoch": ({"max_steps": -1, "num_train_epochs": 1.5}, [4, 8, 9]),
    "less than a round": ({"max_steps": -1, "num_train_epochs": 1, "sync_every": 50}, [6]),
    "remainder": ({"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4}, [4]),
    "remainder in a round": ({"max_steps": 5, "gradient_accumulation_steps": 4}, [4, 5]),
    "stream ends": ({"max_steps": 20, "train_dataset": Once(token_samples(20))}, [4, 5]),
    "stream ends at a border": ({"max_steps": 20, "train_dataset": Once(token_samples(16))}, [4]),
    "stream ends in a window": (
        {"max_steps": 20, "train_dataset": Once(token_samples(20)), "gradient_accumulation_steps": 2, "sync_every": 2},
        [2],
    ),
}


@pytest.mark.parametrize("name", list(ENDINGS))
def test_endings(world4: WorkerPool, tmp_path: Path, name: str) -> None:
    options, borders = ENDINGS[name]
    data = options.get("train_dataset", "map")
    rest = {key: value for key, value in options.items() if key != "train_dataset"}
    result = run_isolated(world4, str(tmp_path), data, **rest)
    assert result["borders"] == borders

"""Results on disk: one JSON object a line, so that a run that is broken off goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .workload import Workload


EVALUATED = "mean of the groups' models at that step, in a copy"
"""What a loss is that of, where the groups hold models of their own. A record that does not say so is not read."""


@dataclass(frozen=True)
class Records:
    """
    The files of one output folder.

    Args:
        folder (`Path`):
            The folder.
    """

    folder: Path

    def append(self, part: str, record: dict[str, Any]) -> None:
        """
        Adds a record.

        Args:
            part (`str`):
                `"turns"`, `"learning"`, `"memory"`, `"own_time"` or `"saving"`.
            record (`dict[str, Any]`):
                Fit for JSON.
        """
        with (self.folder / f"{part}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self, part: str) -> list[dict[str, Any]]:
        """
        Reads all records of a part.

        Args:
            part (`str`):
                See [`~Records.append`].

        Returns:
            `list[dict[str, Any]]`: In the order in which they were made. A line that was cut off by a crash is left out.
        """
        path = self.folder / f"{part}.jsonl"
        if not path.exists():
            return []
        records = []
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return records

    def learning_runs(self) -> list[dict[str, Any]]:
        """
        Reads the runs of the learning part that were evaluated as this version does it; others are named and left out.

        Returns:
            `list[dict[str, Any]]`: In the order in which they were made.
        """
        runs = self.read("learning")
        others = sorted({run["variant"] for run in runs if run.get("evaluated") != EVALUATED})
        if others:
            print(f"learning.jsonl: left out, since evaluated in another way: {', '.join(others)}", flush=True)
        return [run for run in runs if run.get("evaluated") == EVALUATED]

    def check_workload(self, workload: Workload) -> None:
        """
        Notes what is trained, so that figures of two workloads do not meet in one folder.

        Args:
            workload ([`Workload`]):
                What is trained.

        Raises:
            ValueError: If the folder holds figures of another one.
        """
        path = self.folder / "workload.json"
        now = asdict(workload)
        if not path.exists():
            path.write_text(json.dumps(now, indent=2))
            return
        before = json.loads(path.read_text())
        changed = [f"{name} {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value]
        if changed:
            raise ValueError(
                f"{self.folder} holds figures of another workload ({', '.join(changed)}). Take another --output_dir."
            )


def rounds_done(turns: Iterable[Mapping[str, Any]]) -> int:
    """
    How many rounds were measured.

    Args:
        turns (`Iterable[Mapping[str, Any]]`):
            Records of turns, of one variant perhaps: see [`select`].
    """
    return sum(len(turn["tokens_per_second"]) for turn in turns)

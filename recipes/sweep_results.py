"""What came of the runs of a study, kept as JSON lines."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sweep_settings import Setting


@dataclass
class Result:
    """
    What came of a run.

    Args:
        setting ([`Setting`]):
            The run.
        eval_loss (`float`, *optional*):
            Mean loss on the held-out blocks in nats a token; `None` if it was not finite.
        train_loss (`float`, *optional*):
            Mean over the last 20 steps and all groups.
        slow_bytes (`int`):
            What a group has sent to the others in the whole run, on a ring and in fp32.
        synchronous_slow_bytes (`int`):
            What a group would have sent in a synchronous run of the same length: a gradient in each step.
        seconds (`float`):
            How long it took.
        num_parameters (`int`):
            Of the model.
        date (`str`):
            Day of the run.
        torch (`str`):
            Version of PyTorch.
    """

    setting: Setting
    eval_loss: float | None
    train_loss: float | None
    slow_bytes: int
    synchronous_slow_bytes: int
    seconds: float
    num_parameters: int
    date: str
    torch: str

    @property
    def share(self) -> float:
        """Slow-tier bytes relative to those of a synchronous run of the same length."""
        return self.slow_bytes / self.synchronous_slow_bytes


def append_result(path: Path, result: Result) -> None:
    """
    Adds a line to a file of results, and sees it to the disk.

    Args:
        path (`Path`):
            File of JSON lines, made if it is missing.
        result ([`Result`]):
            What to add.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result), sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(paths: Iterable[Path]) -> dict[str, Result]:
    """
    Reads files of results; of several with the same setting the last one holds.

    Args:
        paths (`Iterable[Path]`):
            Files of JSON lines.

    Returns:
        `dict[str, Result]`: By [`Setting.key`].

    Raises:
        ValueError: If a line is no result; the message says which. One that was cut off by an interruption, at the end of
            a file, is to be removed by hand.
    """
    found: dict[str, Result] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                values = json.loads(line)
                result = Result(**{**values, "setting": Setting(**values["setting"])})
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number} is no result of a run: {error}") from error
            found[result.setting.key] = result
    return found

"""Records of the benchmark with round figures, and a workload for worlds that last seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.commands import COMMAND
from benchmarks.records import EVALUATED, Records
from benchmarks.variants import CEILING
from benchmarks.workload import Workload


TINY = Workload(
    hidden_size=32,
    num_layers=2,
    intermediate_size=64,
    num_heads=4,
    vocab_size=512,
    block_size=32,
    sync_every=2,
    num_eval_blocks=16,
)


def turn(variant: str, cycle: int, *speeds: float, session: str = "a", rate: int = 50, **more: Any) -> dict[str, Any]:
    record = {
        "shape": "2x2",
        "rate": rate,
        "variant": variant,
        "session": session,
        "cycle": cycle,
        "num_steps": 8,
        "tokens_per_second": list(speeds),
        "border_seconds": [0.0] * len(speeds),
        "link_bytes": 0,
        "num_link_rounds": len(speeds),
        "load": 1.0,
        "when": 0.0,
    }
    return record | more


def learned(variant: str, seed: int, steps: list[int], losses: list[float], **more: Any) -> dict[str, Any]:
    record = {
        "variant": variant,
        "seed": seed,
        "session": "a",
        "evaluated": EVALUATED,
        "steps": steps,
        "step_tokens": 1024,
        "losses": losses,
        "num_averagings": None if variant == "fsdp" else steps[-1] // 8,
        "seconds": 1,
    }
    return record | more


def folder_of_results(folder: Path) -> Path:
    """An output folder with round figures: the ceiling trains 1024 tokens a second, a round of 8 steps takes it 8 s."""
    records = Records(folder)
    records.check_workload(Workload())
    (folder / "model.json").write_text(json.dumps({"num_parameters": 5_000_000}))
    versions = {"torch": "2.13.0"}
    about = {"machine": "Linux", "num_cores": 2, "versions": versions, "plain": False, "command": COMMAND}
    session = {"session": "2026-01-02T03:04:05"} | about
    records.append("sessions", session)
    for cycle in range(3):
        records.append("turns", turn(CEILING, cycle, 1024.0, 1024.0))
        records.append("turns", turn("fsdp", cycle, 32.0, 32.0, num_steps=1, link_bytes=10**8))
        blocking = {"link_bytes": 2 * 20_200_000, "border_seconds": [3.4, 3.5]}
        records.append("turns", turn("fp32", cycle, 512.0, 512.0, **blocking))
    records.append("turns", turn(CEILING, 3, 1024.0, 1024.0))
    for name, losses, steps in (("fsdp", [7.0, 6.0], [0, 64]), ("fp32", [7.0, 6.0, 5.0], [0, 64, 128])):
        records.append("learning", learned(name, 0, steps, losses))
    records.append("memory", {"variant": "fp32", "shape": "2x2", "session": "a", "peak_bytes": 123_000_000})
    records.append("own_time", {"way": "Trainer", "session": "a", "shares": [0.001, 0.002, 0.003]})
    saves = {"stock": [[1.0, 300_000_000]] * 3, "ours": [[2.0, 500_000_000]] * 3}
    records.append("saving", {"session": "a"} | saves)
    records.append("unavailable", {"variant": "int8", "reason": "no setting wire_format"})
    return folder

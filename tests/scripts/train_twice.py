"""
Trains a tiny Llama under Trainer and a launch config: once in fp32, once in float64. Each rank leaves what it was trained
on and what came out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hf_fedshard import shutdown
from tests.harness.trainer_runs import train


def main(folder: Path) -> None:
    for kind in ("llama", "double"):
        result = train(str(folder / kind), kind, native=kind == "double", pooled=False)
        torch.save(result, folder / f"{kind}-{os.environ['RANK']}.pt")
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

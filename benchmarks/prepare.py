"""Tokenises the corpus for an output folder and sizes the model: `python -m benchmarks.prepare OUTPUT_FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .workload import Workload, make_model, prepare_blocks


def main() -> None:
    """Makes `blocks.pt`, unless it is there, and `model.json`."""
    folder = Path(sys.argv[1])
    workload = Workload(**json.loads((folder / "workload.json").read_text()))
    prepare_blocks(workload, folder / "blocks.pt")
    num_parameters = sum(param.numel() for param in make_model(workload).parameters())
    (folder / "model.json").write_text(json.dumps({"num_parameters": num_parameters}))


if __name__ == "__main__":
    main()

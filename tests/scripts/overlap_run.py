"""A run that averages beside its steps, ended in several ways."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_fedshard import shutdown
from tests.harness.overlap_runs import OverlapRun, make_mesh


def main(ending: str) -> None:
    """
    Args:
        ending (`str`):
            `"finish"`; `"in flight"`, where a loop forgets to finish; `"error"`, where one rank fails while an averaging is
            in flight that waits for a rank which sleeps.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = OverlapRun(make_mesh(), sync_every=3, overlap_steps=2)
    try:
        for step in range(4):
            if ending == "error" and step == 2 and dist.get_rank() == 3:
                time.sleep(60)
            run.train(step)
            run.rounds.step()
            if ending == "error" and step == 3 and dist.get_rank() == 0:
                raise KeyError("an error of the script")
        if ending == "finish":
            run.rounds.finish()
    finally:
        shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

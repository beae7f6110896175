"""On 4 GPUs: averaging beside the steps is what the reference says, with NCCL and through host memory. See test_overlap_devices.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_fedshard import shutdown
from tests.harness.overlap_devices import check_buffers, check_cases


def main(slow_backend: str) -> None:
    """
    Args:
        slow_backend (`str`):
            `"nccl"` or `"gloo"`.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise SystemExit("CUDA_LAUNCH_BLOCKING is set: every launch waits, and no wait that is missing can show.")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    errors = check_cases("cuda", slow_backend)
    check_buffers("cuda", slow_backend)
    print(f"rank {dist.get_rank()}, {slow_backend}: {errors}")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

"""On 4 GPUs: averaging beside the steps is what the reference says, with NCCL and through host memory. See test_overlap_faults.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_fedshard import shutdown
from tests.harness.overlap_runs import make_mesh, refer, run_case


CASES = (
    ({"sync_every": 3, "overlap_steps": 2}, (7,), {"periods": [3], "delay": 2}),
    (
        {"sync_every": 3, "overlap_steps": 1, "outer_optimizer": "nesterov"},
        (),
        {
            "periods": [3],
            "delay": 1,
            "outer": lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
        },
    ),
)


def main(slow_backend: str) -> None:
    """
    Args:
        slow_backend (`str`):
            `"nccl"` or `"gloo"`.
    """
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    mesh = make_mesh(slow_backend=slow_backend, device="cuda")
    for settings, borders, told in CASES:
        found = run_case(mesh, {"dtype": torch.float64, "slow_backend": slow_backend, **settings}, borders)
        for state, expected in zip(found["borders"], refer(4, borders=borders, **told), strict=True):
            for name, tensor in expected.items():
                torch.testing.assert_close(state[name].cpu(), tensor, rtol=0, atol=1e-10)
    print(f"rank {dist.get_rank()}: {slow_backend} is the reference")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

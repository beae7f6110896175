"""Environment variables of every process of the suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.environment import RANK_ENV


# Read when torch, tokenizers and huggingface_hub are imported, hence set before the fork server starts.
SERVER_ENV = {
    **RANK_ENV,
    # The collective recorder reads torch's flight recorder, whose size is fixed when it is first used.
    "TORCH_FR_BUFFER_SIZE": "8192",
    # `torch.cuda.is_available()` in the fork server must not create a CUDA context: it would not survive a fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
if sys.platform.startswith("linux"):
    # Otherwise gloo asks the resolver for the address of the host name, which may be slow or wrong.
    SERVER_ENV["GLOO_SOCKET_IFNAME"] = "lo"


@contextmanager
def patched_environment(values: dict[str, str], drop_prefixes: tuple[str, ...] = ()) -> Iterator[None]:
    """
    Changes the environment and restores it, whatever happened to it in between.

    Args:
        values (`dict[str, str]`):
            Variables to set.
        drop_prefixes (`tuple[str, ...]`, *optional*):
            Variables whose names begin so are removed.
    """
    before = dict(os.environ)
    try:
        for name in before:
            if drop_prefixes and name.startswith(drop_prefixes):
                del os.environ[name]
        os.environ.update(values)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

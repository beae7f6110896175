"""Versions this package runs with and was tested on."""

from __future__ import annotations

from importlib.metadata import version


TESTED_VERSIONS = "torch 2.13, accelerate 1.15 and transformers 5.24"


def versions() -> dict[str, str]:
    """
    Versions that must be the same on all ranks.

    Returns:
        `dict[str, str]`: By package.
    """
    return {package: version(package) for package in ("torch", "accelerate", "transformers")}

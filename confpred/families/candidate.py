"""A *candidate*: one way to compute a problem."""

from __future__ import annotations

from collections.abc import Mapping

#: The provider of rows that time PyTorch's own operator instead of a kernel of ours.
PYTORCH = "pytorch"


def config_text(config: Mapping[str, int]) -> str:
    """A config as the ``config`` column of measurements holds it."""
    return " ".join(f"{name}={value}" for name, value in config.items())

"""Servers of these tests answer by a small model, which loads in a third of the time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def small_model(model_folder: Path) -> Iterator[Path]:
    """Have all servers of a module use the small model, unless their options name another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONFPRED_SERVE_MODEL", str(model_folder))
        yield model_folder

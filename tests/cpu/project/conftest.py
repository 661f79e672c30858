"""Copies of the repository."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def sources(repository: Path, tmp_path: Path) -> Path:
    """Return a copy to build from, as setuptools leaves files of its own beside the sources."""
    return copy_sources(repository, tmp_path)


def copy_sources(repository: Path, folder: Path) -> Path:
    """Copy what a wheel is built from."""
    for name in ("confpred", "service", "kernels", "models", "datasets/suites"):
        shutil.copytree(repository / name, folder / name)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repository / name, folder)
    return folder

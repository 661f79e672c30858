"""Settings shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# Examples are timed on machines that other work shares, so no example has a deadline of its own;
# a fixed seed keeps a failure reproducible and a pass meaningful from one run to the next.
settings.register_profile("project", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("project")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).parents[1]

"""The scripts that make the suites, which are no part of the package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner


@pytest.fixture(scope="module")
def script(repository: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Yield a function that imports a script of ``datasets/`` by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository / "datasets")
        yield importlib.import_module


@pytest.fixture
def made_again(repository: Path, tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """Return a function that makes a folder of suites by a command with some words, asserts that
    the files are those that ship, and returns them by name."""

    def make(command: click.Command, suites: str, *words: str) -> dict[str, bytes]:
        result = CliRunner().invoke(command, [*words, "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        folders = (tmp_path, repository / "datasets" / "suites" / suites)
        made, kept = ({p.name: p.read_bytes() for p in at.iterdir()} for at in folders)
        assert made == kept
        return made

    return make

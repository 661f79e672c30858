"""Tests in this folder open pages in Chromium, or start nginx, and skip where there is none.

With ``CONFPRED_TEST_BROWSER=required``, as in CI, they fail there instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic
from chromium import FLAGS
from pages import inputs_of
from shared import once_a_run

from confpred.report.page import write_page
from confpred.training.dataset import read_dataset
from confpred.training.train import train

Browse = Callable[..., str]


def program(*names: str) -> str:
    """Return the path of a program by one of its names; skip where it is not installed."""
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    told = f"left out: none of {', '.join(names)} is here (apt install {names[0]})"
    if os.environ.get("CONFPRED_TEST_BROWSER") == "required":
        pytest.fail(told)
    pytest.skip(told)


@pytest.fixture(scope="session")
def chromium() -> str:
    return program("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def nginx() -> str:
    return program("nginx")


@pytest.fixture(scope="session")
def openssl() -> str:
    return program("openssl")


@pytest.fixture(scope="session")
def report(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page of made-up measurements."""

    def write(folder: Path) -> None:
        data = synthetic.write(folder / "made-up.parquet", networks=3, configs=40)
        train(read_dataset([data]), folder / "made-up", hyper=synthetic.SMALL)
        write_page(inputs_of(data, folder / "made-up"), folder / "report.html")

    return once_a_run(tmp_path_factory, "page", write) / "report.html"


@pytest.fixture
def browse(chromium: str, tmp_path: Path) -> Browse:
    """Opens a page, runs a script in it, and returns what the script returns, as text."""

    def run(page: Path, script: str, *flags: str) -> str:
        probe = tmp_path / "probe.html"
        tail = (
            "<script>addEventListener('load', () => {"
            f"const found = (() => {{{script}}})();"
            "document.documentElement.replaceChildren();"
            "document.documentElement.textContent = 'found:' + found + ':end';"
            "})</script>"
        )
        probe.write_text(page.read_text().replace("</body>", f"{tail}</body>"))
        done = subprocess.run(
            [
                chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags,
                "--dump-dom", probe.as_uri(),
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.partition("found:")[2].partition(":end")[0]

    return run

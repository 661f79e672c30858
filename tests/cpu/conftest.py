"""No test in this folder may skip: every machine can run all of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import synthetic
from shared import once_a_run

from confpred.training.dataset import read_dataset
from confpred.training.train import train

if TYPE_CHECKING:
    from served import Server


@pytest.fixture(scope="session")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Parquet file of made-up measurements."""

    def write(folder: Path) -> None:
        synthetic.write(folder / "made-up.parquet", networks=8)

    return once_a_run(tmp_path_factory, "measurements", write) / "made-up.parquet"


@pytest.fixture(scope="session")
def few_measurements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same of fewer networks and configs, for whole commands that take their time."""

    def write(folder: Path) -> None:
        synthetic.write(folder / "few.parquet", networks=3, configs=40)

    return once_a_run(tmp_path_factory, "few-measurements", write) / "few.parquet"


@pytest.fixture(scope="session")
def model_folder(measurements: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model trained on them, all but the network ``net0``."""

    def fit(folder: Path) -> None:
        data = read_dataset([measurements])
        train(data, folder / "made-up-1", exclude=["net0"], hyper=synthetic.SMALL)

    return once_a_run(tmp_path_factory, "model", fit) / "made-up-1"


@pytest.fixture(scope="session")
def plain_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of the small model, which many tests ask, and which counts and logs for
    all."""
    from served import running

    with running(tmp_path_factory.mktemp("plain-server"), "--model", str(model_folder)) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _no_skip((yield))


def _no_skip(report):
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a test in tests/cpu skipped: {report.longrepr}"
    return report

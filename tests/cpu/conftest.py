"""No test in this folder may skip: every machine can run all of them."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import synthetic

from confpred.training.dataset import read_dataset
from confpred.training.train import train


@pytest.fixture(scope="session")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file of made-up measurements."""
    return synthetic.write(tmp_path_factory.mktemp("data") / "made-up.parquet", networks=8)


@pytest.fixture(scope="session")
def few_measurements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of fewer networks and configs, for whole commands that take their time."""
    path = tmp_path_factory.mktemp("data") / "few.parquet"
    return synthetic.write(path, networks=3, configs=40)


@pytest.fixture(scope="session")
def model_folder(measurements: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model trained on them, all but the network ``net0``."""
    folder = tmp_path_factory.mktemp("models") / "made-up-1"
    train(read_dataset([measurements]), folder, exclude=["net0"], hyper=synthetic.SMALL)
    return folder


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

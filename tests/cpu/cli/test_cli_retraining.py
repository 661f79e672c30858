"""`confpred retrain` and `confpred drift` where nothing can be measured."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from click.testing import CliRunner
from command_line import confpred, named

from confpred.cli.update import drift
from confpred.data.parquet import schema
from confpred.errors import DataError
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import get_device


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("retrain", "--budget", "soon"),
            "budget='soon' is not allowed; allowed: a number above 0",
        ),
        (("retrain", "--device", "h100"), "device='h100' is not allowed; allowed: a GPU of this"),
        (("retrain", "--suite", "none.json"), "none.json"),
        (("retrain", "--from", "none"), "from='none' is not allowed; allowed: a folder or its URL"),
        (("drift", "--device", "cuda:x"), "device='cuda:x' is not allowed"),
        (("drift", "--count", "2"), "'--count'"),
    ],
)
def test_a_wrong_option_is_named(arguments: tuple[str, ...], said: str) -> None:
    named(confpred(*arguments), said, 2)


@pytest.mark.slow(reason="a model is trained")
def test_measurements_that_are_there_need_no_gpu(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CONFPRED_MODELS_DIR", str(tmp_path / "models"))
    rows = [{**row, "device": "a100"} for row in synthetic.rows(networks=20, configs=40)]
    (tmp_path / "rows").mkdir()
    table = pa.Table.from_pylist(rows, schema(CONVOLUTION))
    pq.write_table(table, tmp_path / "rows" / "part-a.parquet")
    done = confpred("retrain", "--from", tmp_path / "rows", "--device", "a100")
    assert done.returncode == 0, done.stderr
    assert "published: against PyTorch's operator" in done.stdout
    (made,) = (tmp_path / "models").iterdir()
    assert str(made) in done.stdout
    again = confpred("retrain", "--from", tmp_path / "rows")
    assert again.returncode == 3, again.stderr
    assert f"model {made.name} stays in use" in again.stdout


@pytest.mark.parametrize("name", ["retrain", "drift"])
def test_without_a_gpu_that_is_said(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = confpred(name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs an NVIDIA GPU" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*"))


def test_ctrl_c_ends_a_check_of_drift_before_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, interrupts: Callable[[], int], **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        assert interrupts() == 1
        raise DataError("only 3 configs could be timed")

    # There is no GPU to find, to have a model of, or to time configs on.
    monkeypatch.setattr("confpred.cli.update.find_gpu", lambda name: ({}, get_device("h100")))
    monkeypatch.setattr("confpred.cli.update._model_in_use", lambda *_: None)
    monkeypatch.setattr("confpred.cli.update.check_pytorch", lambda wanted: None)
    monkeypatch.setattr("confpred.retraining.drift.time_again", interrupted)
    assert CliRunner().invoke(drift, ["--no-pytorch"]).exit_code == 128 + signal.SIGINT

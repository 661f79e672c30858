"""`confpred retrain` and `confpred drift` where nothing can be measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import confpred, named


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("retrain", "--budget", "soon"),
            "budget='soon' is not allowed; allowed: a number above 0",
        ),
        (("retrain", "--device", "h100"), "device='h100' is not allowed; allowed: a GPU of this"),
        (("retrain", "--suite", "none.json"), "none.json"),
        (("drift", "--device", "cuda:x"), "device='cuda:x' is not allowed"),
        (("drift", "--count", "2"), "'--count'"),
    ],
)
def test_a_wrong_option_is_named(arguments: tuple[str, ...], said: str) -> None:
    named(confpred(*arguments), said, 2)


@pytest.mark.parametrize("name", ["retrain", "drift"])
def test_without_a_gpu_that_is_said(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = confpred(name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs an NVIDIA GPU" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*"))

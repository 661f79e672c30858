"""The demo from its first line to its last, on few and made-up measurements."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def test_the_demo_runs_on_a_machine_without_a_gpu(
    repository: Path,
    few_measurements: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = repository / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    assert (repository / demo.DATA).exists()
    monkeypatch.setattr(demo, "DATA", few_measurements)
    monkeypatch.setattr(demo, "NETWORK", "net0")
    monkeypatch.setattr(demo, "device_count", lambda: 0)
    monkeypatch.chdir(repository)
    demo.main()
    said = capfd.readouterr().out
    assert "regret on held-out networks" in said
    assert "time of the choice / time of the best config" in said
    assert "in the geometric mean" in said
    assert "200 OK" in said
    assert "No CUDA device here" in said

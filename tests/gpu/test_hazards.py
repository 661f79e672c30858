"""Every program of ``tests/hazards`` computes with an optimized model what it does without."""

from __future__ import annotations

from typing import Any

import pytest
from hazards import HAZARDS, compare
from hazards.base import failed_passes
from layers_on_gpu import ours_first

from confpred.pytorch import backend
from confpred.pytorch.rewrite import normalising
from confpred.pytorch.run import choosing
from confpred.pytorch.run.graphs import Graphed

HOW: dict[str, dict[str, Any]] = {
    "default": {}, "graphs": {"inductor": False}, "no graphs": {"inductor": False, "graphs": False},
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, make = HAZARDS[name], backend.make_replayable
    passes: list[Any] = []

    def graphed(*given: Any, **named: Any) -> Any:
        passes.append(make(*given, **named))
        return passes[-1]

    monkeypatch.setattr(backend, "make_replayable", graphed)
    monkeypatch.setattr(normalising, "_gain_ms", lambda *_: 1.0)  # every norm that a kernel takes
    with ours_first() as ours, failed_passes() as failures:
        for operation in ("batch_norm", "norm", "conv"):
            monkeypatch.setitem(choosing._predictors, operation, ours)
        compare(found, "cuda", **HOW[how])
    assert all(not found.by_inductor and "as Inductor failed" in it for it in failures), failures
    assert sum(name is not None for name in ours.chosen) >= (found.kernels and 1)
    replays = sum(run.replays for run in passes if isinstance(run, Graphed))
    assert replays >= (found.replays if HOW[how].get("graphs", True) else 0)

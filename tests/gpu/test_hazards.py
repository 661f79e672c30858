"""Every program of ``tests/hazards`` computes with an optimized model what it does without."""

from __future__ import annotations

from typing import Any

import pytest
from hazards import HAZARDS, compare
from layers_on_gpu import ours_first

HOW: dict[str, dict[str, Any]] = {
    "graphs": {}, "no graphs": {"graphs": False}, "inductor": {"inductor": True},
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard(name: str, how: str) -> None:
    with ours_first() as ours:
        compare(HAZARDS[name], "cuda", **HOW[how])
    assert any(ours.chosen) or not HAZARDS[name].kernels

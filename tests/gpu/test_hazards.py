"""Every program of ``tests/hazards`` computes with an optimized model what it does without."""

from __future__ import annotations

import pytest
from hazards import HAZARDS, compare
from layers_on_gpu import ours_first


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard(name: str, graphs: bool) -> None:
    with ours_first() as ours:
        compare(HAZARDS[name], "cuda", graphs=graphs)
    assert any(ours.chosen) or not HAZARDS[name].kernels

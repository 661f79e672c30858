"""Programs of `tests/hazards`, whose mechanism shows on the CPU, too: an optimized model computes
what its eager twin does. `test_hazards.py` has single causes."""

from __future__ import annotations

import pytest
from hazards import HAZARDS, compare

pytestmark = pytest.mark.slow(reason="it captures a hundred programs")


@pytest.mark.parametrize("name", [name for name, h in HAZARDS.items() if not h.needs_gpu])
def test_a_program_computes_the_same(captured, name: str) -> None:
    compare(HAZARDS[name], "cpu")
    ran = [target for done in captured.passes for target in done.targets()]
    found = HAZARDS[name]
    assert any(t.startswith("confpred.") for t in ran) or found.refused or not found.kernels

"""Hazards of lines and volumes, whose layers are launched."""

from __future__ import annotations

import pytest
from hazards import HAZARDS, compare, ranks

PROGRAMS = [
    name for name, found in HAZARDS.items()
    if found.program.__module__ == ranks.__name__ and not found.needs_gpu
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_the_same(captured, launches, name: str) -> None:
    found = HAZARDS[name]
    compare(found, "cpu")
    ran = [target for done in captured.passes for target in done.targets()]
    print(sum(target.startswith("confpred.conv") for target in ran), len(launches))
    assert sum(target.startswith("confpred.conv") for target in ran) >= found.layers
    assert len(launches) >= found.layers

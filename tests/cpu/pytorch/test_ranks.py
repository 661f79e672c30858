"""Hazards of lines and volumes, whose layers are launched: PyTorch's operators are in the place of
kernels, on tensors as kernels read them."""

from __future__ import annotations

import pytest
from hazards import HAZARDS, compare, ranks
from slow import slow_but

PROGRAMS = [
    name for name, found in HAZARDS.items()
    if found.program.__module__ == ranks.__name__ and not found.needs_gpu
]  # fmt: skip
FAST = ("causal_lines", "lines_of_both_layouts", "nearly_causal_lines", "ranks_in_one_network")


@pytest.mark.parametrize("name", slow_but(FAST, PROGRAMS, "it captures many programs"))
def test_a_program_computes_the_same(captured, launches, name: str) -> None:
    found = HAZARDS[name]
    compare(found, "cpu")
    ran = [target for done in captured.passes for target in done.targets()]
    assert sum(target.startswith("confpred.conv") for target in ran) >= found.layers
    assert len(launches) >= found.layers

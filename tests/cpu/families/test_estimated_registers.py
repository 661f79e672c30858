"""Legality trusts the estimated registers; a kernel that spills much would be a wrong estimate."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from layers import CONVOLUTIONS, H100
from ptxas import ARCHS, resources

from confpred.families.batch import ProblemBatch
from confpred.families.common import MAX_REGISTERS
from confpred.families.depthwise import depthwise_banded, depthwise_large
from confpred.families.table import config_columns
from confpred.problem.conv2d import Problem

#: Group width, window and stride of layers that differ in what a kernel keeps in registers.
_ROWS = (
    (1, 3, 3, 1), (1, 5, 5, 2), (1, 7, 7, 1), (2, 1, 7, 1), (4, 3, 3, 2), (8, 3, 3, 1),
    (8, 5, 5, 1), (16, 3, 3, 2), (16, 4, 2, 1), (32, 3, 3, 1), (64, 3, 3, 1),
    (32, 1, 1, 2), (64, 3, 3, 2),
)  # fmt: skip
_WINDOWS = ((3, 3, 1), (5, 5, 2), (7, 7, 1), (1, 7, 1), (2, 4, 2), (1, 1, 1))
_WGRAD = tuple((width, *window) for width, window in product((1, 4, 8, 16, 64), _WINDOWS))
_BANDED = tuple((1, r, s, 1) for r, s in ((3, 3), (5, 5), (7, 7), (7, 7), (11, 9), (3, 1)))
_LARGE = tuple(
    (1, r, s, 1) for r, s in ((13, 13), (31, 31), (27, 27), (51, 5), (5, 51), (51, 51), (1, 51))
)
#: Families: layers, the most bytes of stack, and the least and largest ratio of registers to their
#: estimate.
KINDS = {
    ("grouped_fprop", "grouped_dgrad"): (_ROWS, 192, 0.5, 1.6),
    ("grouped_wgrad",): (_WGRAD, 48, 0.5, 1.6),
    tuple(f"depthwise_banded_{d}" for d in ("fprop", "dgrad", "wgrad")): (_BANDED, 192, 0.75, 1.25),
    tuple(f"depthwise_large_{d}" for d in ("fprop", "dgrad", "wgrad")): (_LARGE, 64, 0.7, 1.25),
}


@pytest.mark.slow(reason="18 to 30 compiles a target")
@pytest.mark.parametrize(("names", "arch"), list(product(KINDS, ARCHS)))
def test_registers_are_near_the_estimate_and_hardly_spill(
    names: tuple[str, ...], arch: str
) -> None:
    rng = np.random.default_rng(0)
    kinds, most_stack, least, largest = KINDS[names]
    ratios, stacks = [], []
    for name, (number, (width, r, s, stride)) in product(names, enumerate(kinds)):
        family, more = CONVOLUTIONS[name], ""
        if family.direction == "fprop":
            more = f"activation=silu residual={number % 2}"
        if family.direction == "wgrad":
            more = f"bias={int(number % 3 == 0)}"
        problem = Problem.parse(
            f"n=32 c=192 h=56 w=56 k=192 r={r} s={s} stride={stride} padding={r // 2}x{s // 2} "
            f"groups={192 // width} direction={family.direction} {more} "
            f"dtype={('float16', 'bfloat16')[number % 2]}"
        )
        row = int(rng.choice(np.flatnonzero(family.legal(problem, H100))))
        registers, stack = resources(family.launch(problem, row).steps[0].kernel, arch)
        rows = np.array([row])
        workings = family._workings(ProblemBatch([problem]), family.whole, rows)
        bound = MAX_REGISTERS
        if "min_blocks" in family.configs.dtype.names:
            module = depthwise_large if "large" in name else depthwise_banded
            bound = module.most_registers(config_columns(family.configs, rows))[0]
        ratios.append(registers / min(workings.registers[0], bound))
        stacks.append(stack)
    assert max(stacks) <= most_stack
    assert np.median(stacks) == 0
    assert least < min(ratios)
    assert max(ratios) < largest
    assert 0.85 < np.median(ratios) < 1.15

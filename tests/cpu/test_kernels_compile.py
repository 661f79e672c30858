"""Every family's kernels compile, for real, for the oldest, our and the newest architecture."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from cuda.core import Program, ProgramOptions

from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import compile_kernel, source_text, supported_archs
from confpred.device import get_device
from confpred.errors import CompileError
from confpred.families import Family, KernelSource, all_families
from confpred.families.grouped_fprop import _shape
from confpred.problem import ACTIVATIONS, DTYPES, Problem

ARCHS = ("sm_80", "sm_90a", supported_archs()[-1])
FAMILIES = all_families()
WINDOWS = ((1, 1), (3, 3), (1, 7), (7, 1), (5, 5), (2, 4), (7, 7))


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers of a thread, and its spilled bytes."""

    registers: int
    stack_bytes: int


def ptxas_report(source: KernelSource, arch: str) -> Resources:
    log = io.StringIO()
    options = ProgramOptions(arch=arch, std="c++17", ptxas_options=["-v"])
    Program(source_text(source), "c++", options).compile("cubin", logs=log)
    found = [
        re.search(pattern, log.getvalue())
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack frame")
    ]
    return Resources(*(int(match[1]) for match in found if match))


def sample(family: Family) -> list[tuple[Problem, int]]:
    """Configs of layers that go through all windows, group widths, dtypes and epilogues."""
    rng = np.random.default_rng(0)
    dtypes, activations, biases = cycle(DTYPES), cycle(ACTIVATIONS), cycle((True, False, False))
    chosen = []
    for width in (8, 16, 32):
        for r, s in WINDOWS:
            problem = Problem(
                *(32, 256, 56, 56, 256, r, s),
                padding=(r // 2, s // 2),
                groups=256 // width,
                dtype=next(dtypes),
                bias=next(biases),
                activation=next(activations),
            )
            rows = np.flatnonzero(family.legal(problem, get_device("h100")))
            chosen += [(problem, int(row)) for row in rng.permutation(rows)[:1]]
    return chosen


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_samples_compile(family: Family, arch: str, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    for problem, row in sample(family)[::3]:
        compiled = compile_kernel(family.source(problem, row), arch, cache)
        assert compiled.cubin.startswith(b"\x7fELF")
        assert compiled.entry.encode() in compiled.cubin
        assert not compiled.cached


@pytest.mark.parametrize("arch", ARCHS)
def test_registers_are_near_the_estimate_and_hardly_spill(arch: str) -> None:
    """Legality trusts the estimate; a kernel that spills much would be a wrong estimate.

    The bounds have a margin over what the compiler gives today: 0.59 to 1.51 times the estimate,
    at most 144 bytes of stack.
    """
    family = FAMILIES["grouped_fprop"]
    ratios = []
    for problem, row in sample(family):
        estimate = _shape(problem.group_width, problem.r, problem.s).registers[row]
        report = ptxas_report(family.source(problem, row), arch)
        assert report.stack_bytes <= 192, (str(problem), row)
        ratios.append(report.registers / estimate)
    assert min(ratios) > 0.5
    assert max(ratios) < 1.6
    assert 0.9 < np.median(ratios) < 1.15


def test_a_broken_kernel_raises_with_the_compilers_log(tmp_path: Path) -> None:
    family = FAMILIES["grouped_fprop"]
    problem, row = sample(family)[0]
    source = family.source(problem, row)
    broken = replace(source, defines=(*source.defines, ("threadIdx", "no_such_name")))
    with pytest.raises(CompileError) as caught:
        compile_kernel(broken, "sm_90a", KernelCache(tmp_path))
    assert "no_such_name" in caught.value.log
    assert "grouped_fprop.cu" in str(caught.value)
    assert not list(tmp_path.rglob("*.cubin"))


def test_an_unknown_target_is_a_compile_error(tmp_path: Path) -> None:
    problem, row = sample(FAMILIES["grouped_fprop"])[0]
    source = FAMILIES["grouped_fprop"].source(problem, row)
    with pytest.raises(CompileError, match="sm_12345"):
        compile_kernel(source, "sm_12345", KernelCache(tmp_path))

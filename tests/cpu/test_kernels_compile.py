"""Every family's kernels compile, for real, for the oldest, our and the newest architecture."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import compile_kernel, supported_archs
from confpred.device import get_device
from confpred.errors import CompileError
from confpred.families import Family, all_families
from confpred.problem import ACTIVATIONS, DTYPES, Problem

ARCHS = ("sm_80", "sm_90a", supported_archs()[-1])
FAMILIES = all_families()
WINDOWS = ((1, 1), (3, 3), (1, 7), (7, 1), (5, 5), (2, 4), (7, 7))


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
        compiled = compile_kernel(family.launch(problem, row).steps[0].source, arch, cache)
        assert compiled.cubin.startswith(b"\x7fELF")
        assert compiled.entry.encode() in compiled.cubin
        assert not compiled.cached


def test_a_broken_kernel_raises_with_the_compilers_log(tmp_path: Path) -> None:
    family = FAMILIES["grouped_fprop"]
    problem, row = sample(family)[0]
    source = family.launch(problem, row).steps[0].source
    broken = replace(source, defines=(*source.defines, ("threadIdx", "no_such_name")))
    with pytest.raises(CompileError) as caught:
        compile_kernel(broken, "sm_90a", KernelCache(tmp_path))
    assert "no_such_name" in caught.value.log
    assert "grouped_rows.cu" in str(caught.value)
    assert not list(tmp_path.rglob("*.cubin"))


def test_an_unknown_target_is_a_compile_error(tmp_path: Path) -> None:
    problem, row = sample(FAMILIES["grouped_fprop"])[0]
    source = FAMILIES["grouped_fprop"].launch(problem, row).steps[0].source
    with pytest.raises(CompileError, match="sm_12345"):
        compile_kernel(source, "sm_12345", KernelCache(tmp_path))

"""A few kernels of every family compile, for real, for every target; `make kernels` does all."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layers import ARCHITECTURES, CONVOLUTIONS, H100, first_kernel, representative
from ptxas import ARCHS, resources

from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import compile_kernel
from confpred.errors import CompileError
from confpred.families.protocol import Family
from confpred.problem.operation import KernelSpec

FAMILIES = CONVOLUTIONS
KERNELS = 5  # a family and target
MOST_STACK_BYTES = 640  # 544 in the worst of all kernels today


def sample(family: Family, seed: int) -> list[KernelSpec]:
    """Kernels of as many layers, drawn from all that the family knows."""
    rng = random.Random(seed)
    layers = representative(family)
    found = []
    for problem in rng.sample(layers, min(KERNELS, len(layers))):
        row = rng.choice(np.flatnonzero(family.legal(problem, H100)).tolist())
        found += [step.kernel for step in family.launch(problem, row).steps]
    return list(dict.fromkeys(found))


@pytest.mark.slow(reason="more than fifty compiles a target")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_samples_compile_and_hardly_spill(family: Family, arch: str) -> None:
    """Legality trusts an estimate of registers, made for the target that was measured; a kernel
    that spills much there shows a wrong one."""
    for source in sample(family, seed=ARCHS.index(arch)):
        registers, stack_bytes = resources(source, arch)
        assert 8 <= registers <= 255
        assert stack_bytes <= MOST_STACK_BYTES or arch != H100.arch, source


@pytest.mark.slow(reason="it looks at all layers and configs for each target")
@pytest.mark.parametrize("arch", sorted(ARCHITECTURES.keys() - set(ARCHS)))
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_is_legal_on_a_board_compiles_for_it(family: Family, arch: str) -> None:
    """One launch each, of the config that needs the most shared memory: it fits, also as often as
    the kernel asks for, and no kernel has instructions of another target."""
    device, rng = ARCHITECTURES[arch], random.Random(arch)
    legal = {p: np.flatnonzero(family.legal(p, device)).tolist() for p in representative(family)}
    problem, rows = rng.choice([(p, rows) for p, rows in legal.items() if rows])
    launches = [family.launch(problem, row) for row in rng.sample(rows, min(50, len(rows)))]
    steps = max(launches, key=lambda launch: launch.steps[0].smem_bytes).steps
    for step in steps:
        blocks = int(dict(step.kernel.defines).get("MIN_BLOCKS", 1))
        assert step.smem_bytes <= device.smem_per_block
        assert blocks * np.prod(step.block) <= 32 * device.warps_per_sm
        registers, _ = resources(step.kernel, arch)
        assert np.prod(step.block) * registers <= device.regs_per_sm


def test_a_broken_kernel_raises_with_the_compilers_log(tmp_path: Path) -> None:
    source = first_kernel(FAMILIES["grouped_fprop"])
    broken = replace(source, defines=(*source.defines, ("threadIdx", "no_such_name")))
    with pytest.raises(CompileError) as caught:
        compile_kernel(broken, "sm_90a", KernelCache(tmp_path))
    assert "no_such_name" in caught.value.log
    assert source.file in str(caught.value)
    assert not list(tmp_path.rglob("*.cubin"))


def test_an_unknown_target_is_a_compile_error(tmp_path: Path) -> None:
    source = first_kernel(FAMILIES["grouped_fprop"])
    with pytest.raises(CompileError, match="sm_12345"):
        compile_kernel(source, "sm_12345", KernelCache(tmp_path))

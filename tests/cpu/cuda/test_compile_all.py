"""Kernels compiled side by side are those compiled one by one, and one that fails fails alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from shared import python_says

from confpred.cuda import compiler
from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import compile_all, compile_kernel
from confpred.cuda.epilogue import epilogue_kernel
from confpred.errors import CompileError
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.operation import KernelSpec

ARCH = "sm_90a"
SMALL = [
    epilogue_kernel(64, "float16", bias=True, residual=False, activation=name)
    for name in ACTIVATIONS
]


def broken(spec: KernelSpec) -> KernelSpec:
    return replace(spec, defines=(*spec.defines, ("threadIdx", "no_such_name")))


def test_the_same_kernels_as_one_by_one(tmp_path: Path) -> None:
    specs = SMALL[:4]
    together = compile_all(specs, ARCH, KernelCache(tmp_path / "together"), threads=4)
    assert list(together) == specs
    for spec, compiled in together.items():
        assert not compiled.cached
        alone = compile_kernel(spec, ARCH, KernelCache(tmp_path / "alone"))
        assert compiled == alone
    again = compile_all(specs, ARCH, KernelCache(tmp_path / "together"))
    assert all(compiled.cached for compiled in again.values())


def test_the_threads_of_a_fresh_process_find_the_compiler_whole(tmp_path: Path) -> None:
    program = (
        "from confpred.cuda.compiler import compile_all\n"
        "from confpred.problem.operation import KernelSpec\n"
        f"print(len(compile_all({SMALL!r}, '{ARCH}', threads=6)))\n"
    )
    assert python_says("-c", program, CONFPRED_CACHE_DIR=str(tmp_path)) == f"{len(SMALL)}\n"


def test_a_kernel_given_twice_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, lock = [], threading.Lock()

    def counting(spec, *rest):
        with lock:
            compiled.append(spec)
        return compile_kernel(spec, *rest)

    monkeypatch.setattr(compiler, "compile_kernel", counting)
    assert list(compile_all(SMALL[:2] * 3, ARCH, KernelCache(tmp_path))) == SMALL[:2]
    assert sorted(compiled, key=SMALL.index) == SMALL[:2]
    assert compile_all([], ARCH) == {}


def test_the_others_are_compiled_before_a_failure_is_raised(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    with pytest.raises(CompileError, match="no_such_name"):
        compile_all([broken(SMALL[0]), *SMALL[1:]], ARCH, cache, threads=2)
    assert all(compile_kernel(spec, ARCH, cache).cached for spec in SMALL[1:])

"""The compiled-kernel cache: shared by processes, and never the source of a damaged kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from confpred.cuda.cache import KernelCache, default_folder
from confpred.cuda.compiler import CompiledKernel, compile_kernel
from confpred.cuda.epilogue import epilogue_kernel
from confpred.problem.operation import KernelSpec

ARCH = "sm_90a"


def some_source() -> KernelSpec:
    """Return a kernel that is compiled at once."""
    return epilogue_kernel(64, "float16", bias=True, residual=False, activation="relu")


def compile_into(folder: Path) -> CompiledKernel:
    return compile_kernel(some_source(), ARCH, KernelCache(folder))


def entry(folder: Path) -> Path:
    (path,) = folder.rglob("*.cubin")
    return path


def test_a_second_process_does_not_compile(tmp_path: Path) -> None:
    first = compile_into(tmp_path)
    assert not first.cached
    program = (
        "import sys\n"
        "from confpred.cuda.compiler import compile_kernel\n"
        "from confpred.problem.operation import KernelSpec\n"
        f"compiled = compile_kernel({some_source()!r}, '{ARCH}')\n"
        "assert compiled.cached\n"
        "sys.stdout.buffer.write(compiled.cubin)\n"
    )
    second = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"CONFPRED_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert second.stdout == first.cubin


def test_the_folder_is_chosen_by_one_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("CONFPRED_CACHE_DIR")
    assert "confpred" in default_folder().parts


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "no payload", "foreign"])
def test_a_damaged_entry_is_removed_and_compiled_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = compile_into(tmp_path)
    path = entry(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(
        {
            "flipped": bytes(content),
            "cut": path.read_bytes()[:-1],
            "empty": b"",
            "no payload": path.read_bytes()[:32],
            "foreign": b"\x7fELF not one of ours",
        }[damage]
    )
    damaged = path.read_bytes()
    assert KernelCache(tmp_path).get(path.stem) is None
    assert not path.exists()
    path.write_bytes(damaged)
    again = compile_into(tmp_path)
    assert not again.cached
    assert again.cubin == good.cubin
    assert str(path) in caplog.text
    assert compile_into(tmp_path).cached


def test_everything_that_changes_the_kernel_changes_the_entry(tmp_path: Path) -> None:
    cache, source = KernelCache(tmp_path), some_source()
    changed = tuple((n, "DTYPE_BFLOAT16" if n == "DTYPE" else v) for n, v in source.defines)
    compile_kernel(source, ARCH, cache)
    compile_kernel(source, "sm_80", cache)
    compile_kernel(replace(source, defines=changed), ARCH, cache)
    assert len(list(tmp_path.rglob("*.cubin"))) == 3


def test_many_processes_share_a_folder(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        cubins = {compiled.cubin for compiled in pool.map(compile_into, [tmp_path] * 6)}
    assert len(cubins) == 1
    assert [path.name for path in entry(tmp_path).parent.iterdir()] == [entry(tmp_path).name]


def test_a_folder_that_cannot_be_written_only_costs_a_compile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    assert not compile_into(blocked).cached
    assert not compile_into(blocked).cached
    assert "not writable" in caplog.text


@pytest.mark.parametrize("mode", [0o702, 0o720])
def test_a_folder_that_others_can_write_to_is_not_trusted(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_into(tmp_path)
    folder = entry(tmp_path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    assert not compile_into(tmp_path).cached
    assert "can be written by other users" in caplog.text

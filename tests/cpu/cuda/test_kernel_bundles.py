"""Compiled kernels that travel: found without a compiler, and never where they do not fit."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from confpred.cuda import compiler
from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import (
    bundle_files,
    close_kernels,
    compile_kernel,
    nvrtc_version,
    open_kernels,
)
from confpred.cuda.epilogue import epilogue_kernel
from confpred.errors import DataError, InvalidInput
from confpred.files import write_folder
from confpred.problem.operation import KernelSpec

ARCH = "sm_90a"


def spec(activation: str) -> KernelSpec:
    return epilogue_kernel(64, "float16", bias=True, residual=False, activation=activation)


INSIDE, OUTSIDE = spec("relu"), spec("silu")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    for bundle in compiler._opened:
        close_kernels(bundle)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    cubin = compile_kernel(INSIDE, ARCH, KernelCache(folder / "cache")).cubin
    write_folder(folder / "made", bundle_files({INSIDE: cubin}, ARCH, nvrtc_version()))
    return folder / "made"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Return a copy: bundles are relocatable."""
    return shutil.copytree(made, tmp_path / "moved")


def no_compiler(*_: object) -> str:
    pytest.fail("the compiler is asked")


def test_a_kernel_is_found_without_a_compiler_and_the_cache_stays_empty(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    open_kernels(folder, ARCH)
    for name in ("_compile", "nvrtc_version"):
        monkeypatch.setattr(compiler, name, no_compiler)
    compiled = compile_kernel(INSIDE, ARCH, KernelCache(cache))
    assert compiled.cached
    assert compiled.cubin.startswith(b"\x7fELF")
    assert not cache.exists()


def test_a_bundle_of_another_compiler_serves_and_the_cache_does_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(tmp_path / "cache")
    compile_kernel(INSIDE, ARCH, cache)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.9")
    assert not compile_kernel(INSIDE, ARCH, cache).cached
    bundle = open_kernels(folder, ARCH)
    assert compile_kernel(INSIDE, ARCH, KernelCache(tmp_path / "empty")).cached
    close_kernels(bundle)
    assert not compile_kernel(INSIDE, ARCH, KernelCache(tmp_path / "empty")).cached


def test_what_is_missing_is_compiled_and_said_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_kernels(folder, ARCH)
    for other in (OUTSIDE, spec("gelu")):
        assert not compile_kernel(other, ARCH, KernelCache(tmp_path / "cache")).cached
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "moved lacks kernels, such as epilogue with" in caplog.text
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 2


def test_another_architecture_does_not_ask_the_bundle(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_kernels(folder, ARCH)
    assert not compile_kernel(INSIDE, "sm_80", KernelCache(tmp_path / "cache")).cached
    assert caplog.text == ""


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_kernel_is_compiled_again_and_stays(
    damage: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (folder / "kernels").rglob("*.cubin")
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    bad = {"flipped": bytes(flipped), "cut": good[:-1], "empty": b""}[damage]
    path.write_bytes(bad)
    open_kernels(folder, ARCH)
    compiled = compile_kernel(INSIDE, ARCH, KernelCache(tmp_path / "cache"))
    assert not compiled.cached
    assert compiled.cubin == good[32:]
    assert path.read_bytes() == bad, "a bundle is never written"
    assert f"{path} is damaged" in caplog.text


def test_a_folder_that_others_can_write_to_is_its_users_choice(
    folder: Path, tmp_path: Path
) -> None:
    for path in (folder, *folder.rglob("*/")):
        path.chmod(0o777)
    open_kernels(folder, ARCH)
    assert compile_kernel(INSIDE, ARCH, KernelCache(tmp_path / "cache")).cached


def test_the_bundle_that_was_opened_last_is_asked_first(
    folder: Path, made: Path, tmp_path: Path
) -> None:
    first, second = open_kernels(made, ARCH), open_kernels(folder, ARCH)
    assert compiler._opened == (second, first)
    assert open_kernels(made, ARCH) == first
    assert compiler._opened == (first, second, first)
    shutil.rmtree(folder / "kernels")
    close_kernels(first)
    assert compiler._opened == (second, first)
    close_kernels(first)
    assert not compile_kernel(INSIDE, ARCH, KernelCache(tmp_path / "cache")).cached


def test_another_architecture_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"manifest\.json: arch='sm_90a' is not.* sm_80"):
        open_kernels(folder, "sm_80")
    assert compiler._opened == ()


def test_other_sources_are_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for sources, message in (
        ({"epilogue.cu": "0" * 16}, "epilogue.cu has the digest 00000000 there, and "),
        ({"gone.cu": "0" * 16}, "gone.cu has the digest 00000000 there, and none here"),
        ({"epilogue.cu": None}, "epilogue.cu has the digest None there"),
        (["epilogue.cu"], '"sources" must be an object'),
    ):
        path.write_text(json.dumps(manifest | {"sources": sources}))
        with pytest.raises(DataError, match=message):
            open_kernels(folder, ARCH)
    assert compiler._opened == ()


@pytest.mark.parametrize("text", ["", "{", '{"format": "confpred-bundle/2"}', None])
def test_what_is_no_bundle_is_named(folder: Path, text: str | None) -> None:
    path = folder / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_kernels(folder, ARCH)

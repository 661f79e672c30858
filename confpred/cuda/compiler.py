"""CUDA source to cubin, by NVRTC through `cuda.core`, with a cache on disk. Needs no GPU."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confpred._version import __version__
from confpred.concurrency import submit, uninterrupted
from confpred.cuda.cache import KernelCache, default_folder, entry_name, seal, unseal
from confpred.errors import CompileError, DataError, InvalidInput, MissingExtra
from confpred.families.kernel_text import file_text, source_digest
from confpred.files import read_json
from confpred.problem.operation import KernelSpec

if TYPE_CHECKING:
    from cuda.core import ProgramOptions

_STANDARD = "c++17"
_ACTIVATIONS = "activations.cuh"
#: Held while `cuda.core` is imported: a second thread would find it half imported.
_importing = threading.Lock()


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel ready to load.

    Attributes:
        cubin: machine code for one architecture.
        entry: the kernel's name in it.
        cached: whether it came from the cache, or from a bundle.
    """

    cubin: bytes
    entry: str
    cached: bool


@cache
def nvrtc_version() -> str:
    """Return the compiler's version, such as ``13.0``.

    Raises:
        MissingExtra: `cuda.bindings` or NVRTC is not installed.
    """
    try:
        with uninterrupted, _importing:
            import cuda.core  # noqa: F401
            from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise MissingExtra("cuda-core and nvidia-cuda-nvrtc", "gpu") from error
    return f"{major}.{minor}"


@cache
def supported_archs() -> tuple[str, ...]:
    """Return the targets that the installed NVRTC compiles for, such as ``sm_80``, oldest first."""
    nvrtc_version()
    from cuda.bindings import nvrtc

    _, archs = nvrtc.nvrtcGetSupportedArchs()
    return tuple(f"sm_{arch}" for arch in sorted(archs))


def program_text(spec: KernelSpec) -> str:
    """Return the whole program that NVRTC is given: the config as macros, then the kernel. Raises
    FileNotFoundError where there is no such kernel."""
    return f'{_header(spec)}#line 1 "{spec.file}"\n{file_text(spec.file)}'


def _header(spec: KernelSpec) -> str:
    """Return the part of a program before the kernel's own text: the macros, then the activations
    if the kernel applies one that its text does not define."""
    macros = "".join(f"#define {name} {value}\n" for name, value in spec.defines)
    activation, more = f"#define {dict(spec.defines).get('ACTIVATION')} ", file_text(_ACTIVATIONS)
    lacks = activation in more and activation not in file_text(spec.file)
    return macros + more if lacks else macros


def compile_kernel(
    spec: KernelSpec, arch: str, kernel_cache: KernelCache | None = None
) -> CompiledKernel:
    """Compile `spec` for `arch` (such as ``sm_90a``), or take it from a bundle that is open or from
    the cache.

    Raises:
        CompileError: NVRTC refused it; the error carries the compiler's log.
        MissingExtra: the compiler is not installed.
    """
    store = kernel_cache or KernelCache(default_folder())
    compiled = compiled_before(spec, arch, store)
    if compiled is not None:
        return compiled
    text = program_text(spec)
    cubin = _compile(text, spec, options(arch, name=spec.entry))
    store.put(_key(text, spec, arch), cubin)
    return CompiledKernel(cubin, spec.entry, cached=False)


def compiled_before(
    spec: KernelSpec, arch: str, kernel_cache: KernelCache | None = None
) -> CompiledKernel | None:
    """Return `spec` for `arch` from a bundle or the cache; None if it has to be compiled."""
    cubin = read_bundled(spec, arch)
    if cubin is None:
        store = kernel_cache or KernelCache(default_folder())
        cubin = store.get(_key(program_text(spec), spec, arch))
    return None if cubin is None else CompiledKernel(cubin, spec.entry, cached=True)


def keep_compiled(spec: KernelSpec, arch: str, cubin: bytes) -> None:
    """Put `spec`, compiled for `arch` by the same NVRTC on another machine, into the cache."""
    KernelCache(default_folder()).put(_key(program_text(spec), spec, arch), cubin)


def cache_entry(spec: KernelSpec, arch: str) -> str:
    """Return the file, in the cache's folder, of `spec` compiled for `arch` by this NVRTC."""
    return entry_name(_key(program_text(spec), spec, arch))


def _key(text: str, spec: KernelSpec, arch: str) -> str:
    """Return the name in the cache of the program `text`: all that decides its machine code."""
    parts = (nvrtc_version(), _STANDARD, arch, spec.entry, text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def options(arch: str, **more: Any) -> ProgramOptions:
    """Return the options that every kernel is compiled with for `arch`, and `more` of
    `cuda.core`'s."""
    from cuda.core import ProgramOptions

    return ProgramOptions(
        arch=arch,
        std=_STANDARD,
        device_as_default_execution_space=True,  # else NVRTC takes a generic lambda for the host's
        **more,
    )


def _compile(text: str, spec: KernelSpec, program_options: ProgramOptions) -> bytes:
    from cuda.core import Program

    try:
        with uninterrupted:  # a child that is forked meanwhile could not compile
            return bytes(Program(text, "c++", program_options).compile("cubin").code)
    except Exception as error:  # cuda.core raises several classes when NVRTC refuses
        what = f"{spec.file} with {dict(spec.defines)} for {program_options.arch}"
        raise CompileError(what, str(error)) from error


def with_line_info(spec: KernelSpec, arch: str, folder: Path) -> bytes:
    """Return `spec` compiled for `arch` with the lines of its text, which is written to `folder`
    for a profiler to show. No cache has it; raises as `compile_kernel` does."""
    nvrtc_version()
    path = folder / spec.file
    path.write_text(file_text(spec.file), encoding="utf-8")
    text = program_text(spec).replace(f'#line 1 "{spec.file}"', f'#line 1 "{path}"', 1)
    return _compile(text, spec, options(arch, name=spec.entry, lineinfo=True))


def ptx_of(spec: KernelSpec, arch: str) -> str:
    """Return the PTX that NVRTC makes of `spec`, before the assembler; needs no GPU, and raises as
    `compile_kernel` and `program_text` do."""
    nvrtc_version()  # says how to install NVRTC where it is not
    # cuda.core, which compiles above, asks the driver before it makes PTX, and there may be none.
    from cuda.bindings import nvrtc

    text, name = program_text(spec).encode(), spec.file.encode()
    with uninterrupted:
        _, program = nvrtc.nvrtcCreateProgram(text, name, 0, [], [])
        arguments = options(arch.replace("sm_", "compute_")).as_bytes("nvrtc", "ptx")
        (refused,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        read_log, read_ptx = nvrtc.nvrtcGetProgramLog, nvrtc.nvrtcGetPTX
        size_of = nvrtc.nvrtcGetProgramLogSize if refused else nvrtc.nvrtcGetPTXSize
        buffer = bytearray(size_of(program)[1])
        (read_log if refused else read_ptx)(program, buffer)
        nvrtc.nvrtcDestroyProgram(program)
    result = buffer.rstrip(b"\0").decode()
    if refused:
        raise CompileError(f"{spec.file} with {dict(spec.defines)} for {arch}", result)
    return result


# Compiled kernels that travel: a folder that is read before the compiler is asked.
#
#     manifest.json           {"format": "confpred-bundle/1", "arch": "sm_90a", "compiler": "13.0",
#                              "confpred": "0.1.0", "sources": {"depthwise.cu": "4b5c6d7e8f901234"}}
#     kernels/0a/0a...cubin   entries as in the user's cache (`confpred.cuda.cache`)
#
# A cache entry is for one compiler and the exact bytes of a source. A kernel of a bundle is for the
# meaning of its source (`confpred.families.kernel_text.source_digest`), its macros and the
# architecture, so that a machine with another NVRTC, or with none, can load it. The folder need not
# be private to its user, who has named it; checksums are compared in both.


log = logging.getLogger(__name__)

FORMAT = "confpred-bundle/1"
MANIFEST, KERNELS = "manifest.json", "kernels"
_opened: tuple[KernelBundle, ...] = ()  # the latest first
_incomplete: set[KernelBundle] = set()  # bundles whose first missing kernel was logged
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelBundle:
    """A folder of compiled kernels.

    Attributes:
        folder: where it lies now.
        arch: what its kernels were compiled for, such as ``sm_90a``.
    """

    folder: Path
    arch: str

    def get(self, spec: KernelSpec) -> bytes | None:
        """Return the cubin of `spec`; None if it is missing or damaged."""
        path = self.folder / KERNELS / entry_name(_bundle_key(spec, self.arch))
        try:
            content = path.read_bytes()
        except OSError:
            return None
        cubin = unseal(content)
        if cubin is None:
            log.warning("%s is damaged: compiling it again", path)
        return cubin


def bundle_files(
    cubins: Mapping[KernelSpec, bytes], arch: str, compiler: str
) -> dict[str, str | bytes]:
    """Return the files of a bundle of `cubins`, made by NVRTC `compiler` for `arch`, by their names
    in its folder."""
    manifest = {
        "format": FORMAT,
        "arch": arch,
        "compiler": compiler,
        "confpred": __version__,
        "sources": {name: source_digest(name) for name in sorted({s.file for s in cubins})},
    }
    entries = {
        f"{KERNELS}/{entry_name(_bundle_key(spec, arch))}": seal(cubin)
        for spec, cubin in cubins.items()
    }
    return {MANIFEST: json.dumps(manifest, indent=1) + "\n", **entries}


def open_kernels(folder: Path, arch: str, *, whole: bool = True) -> KernelBundle:
    """Look for kernels in the bundle at `folder` from now on, before anywhere else. Where it should
    be `whole`, the first kernel that it lacks is a warning.

    Raises:
        DataError: it is no bundle, or was made of other kernel sources.
        InvalidInput: it was made for another architecture than `arch`.
    """
    global _opened
    path = folder / MANIFEST
    manifest = read_json(path, "a bundle's manifest", FORMAT)
    if manifest.get("arch") != arch:
        allowed = f"{arch}, the architecture of the device that is in use"
        raise InvalidInput(f"{path}: arch", manifest.get("arch"), allowed)
    sources = manifest.get("sources")
    if not isinstance(sources, dict):
        raise DataError(f'{path}: "sources" must be an object of texts')
    for name, digest in sources.items():
        current = _current_digest(name)
        if current != digest:
            raise DataError(
                f"{path} was made from other sources: {name} has the digest {str(digest)[:8]} "
                f"there, and {current[:8]} here; make the bundle again"
            )
    bundle = KernelBundle(folder.resolve(), arch)
    with uninterrupted, _lock:
        _opened = (bundle, *_opened)
        if not whole:
            _incomplete.add(bundle)
    return bundle


def close_kernels(bundle: KernelBundle) -> None:
    """Undo one `open_kernels` of `bundle`; loaded kernels stay loaded."""
    global _opened
    with uninterrupted, _lock:
        if bundle in _opened:
            place = _opened.index(bundle)
            _opened = _opened[:place] + _opened[place + 1 :]
        if bundle not in _opened:
            _incomplete.discard(bundle)


def read_bundled(spec: KernelSpec, arch: str) -> bytes | None:
    """Return the cubin of `spec` for `arch` from the open bundles; None if they lack it.

    The first miss is a warning, because the user counts on a start without a compiler.
    """
    bundles = [bundle for bundle in _opened if bundle.arch == arch]
    for bundle in bundles:
        if (cubin := bundle.get(spec)) is not None:
            return cubin
    for bundle in bundles:
        if bundle not in _incomplete:
            _incomplete.add(bundle)
            what = f"{spec.entry} with {dict(spec.defines)}"
            log.warning("%s lacks kernels, such as %s: compiling them", bundle.folder, what)
    return None


def _current_digest(name: str) -> str:
    try:
        return source_digest(name)
    except OSError:
        return "none"


def _bundle_key(spec: KernelSpec, arch: str) -> str:
    parts = (arch, spec.entry, _header(spec), spec.file, source_digest(spec.file))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# NVRTC runs outside Python's lock, so threads compile in parallel.


def compile_all(
    specs: Iterable[KernelSpec],
    arch: str,
    kernel_cache: KernelCache | None = None,
    *,
    threads: int | None = None,
) -> dict[KernelSpec, CompiledKernel]:
    """Compile each of `specs` once by `compile_kernel`, in `threads`, by default one a processor.

    Raises:
        CompileError: NVRTC refused one of them; raised when the others are done, and in the cache.
        MissingExtra: the compiler is not installed.
    """
    wanted = list(dict.fromkeys(specs))
    if not wanted:
        return {}
    workers = min(len(wanted), threads or _processors())
    with ThreadPoolExecutor(workers, "confpred-compile") as pool:
        futures = [submit(pool, compile_kernel, spec, arch, kernel_cache) for spec in wanted]
    return {spec: future.result() for spec, future in zip(wanted, futures, strict=True)}


def compiled_files(specs: Iterable[KernelSpec], arch: str) -> dict[str, str | bytes]:
    """Compile `specs` for `arch`, and return the files of a bundle of them, by their names in its
    folder. It needs no GPU, and raises as `compile_all` does."""
    compiled = compile_all(specs, arch)
    cubins = {spec: kernel.cubin for spec, kernel in compiled.items()}
    return bundle_files(cubins, arch, nvrtc_version())


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

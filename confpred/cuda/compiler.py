"""CUDA source to cubin, by NVRTC through `cuda.core`, with a cache on disk. Needs no GPU."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from confpred.cuda.bundles import bundled
from confpred.cuda.cache import KernelCache, default_folder, entry_name
from confpred.errors import CompileError, MissingExtra
from confpred.families.kernel_text import file_text
from confpred.forks import uninterrupted
from confpred.problem.operation import KernelSpec

if TYPE_CHECKING:
    from cuda.core import ProgramOptions

_STANDARD = "c++17"
#: Two threads that import `cuda.core` for the first time find it half imported.
_importing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Compiled:
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
    """The compiler's version, such as ``13.0``.

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
    """The targets that the installed NVRTC compiles for, such as ``sm_80``, oldest first."""
    nvrtc_version()
    from cuda.bindings import nvrtc

    _, archs = nvrtc.nvrtcGetSupportedArchs()
    return tuple(f"sm_{arch}" for arch in sorted(archs))


def program_text(spec: KernelSpec) -> str:
    """The whole program that NVRTC is given: the config as macros, then the kernel."""
    header = "".join(f"#define {name} {value}\n" for name, value in spec.defines)
    return f'{header}#line 1 "{spec.file}"\n{file_text(spec.file)}'


def compile_kernel(
    spec: KernelSpec, arch: str, kernel_cache: KernelCache | None = None
) -> Compiled:
    """Compile `spec` for `arch` (such as ``sm_90a``), or take it from a bundle that is open
    (`confpred.cuda.bundles`) or from the cache.

    Raises:
        CompileError: NVRTC refused it; the error carries the compiler's log.
        MissingExtra: the compiler is not installed.
    """
    store = kernel_cache or KernelCache(default_folder())
    known = compiled_before(spec, arch, store)
    if known is not None:
        return known
    text = program_text(spec)
    cubin = _compile(text, spec, options(arch, name=spec.entry))
    store.put(_key(text, spec, arch), cubin)
    return Compiled(cubin, spec.entry, cached=False)


def compiled_before(
    spec: KernelSpec, arch: str, kernel_cache: KernelCache | None = None
) -> Compiled | None:
    """`spec` for `arch` from a bundle or the cache; None where it has to be compiled."""
    cubin = bundled(spec, arch)
    if cubin is None:
        store = kernel_cache or KernelCache(default_folder())
        cubin = store.get(_key(program_text(spec), spec, arch))
    return None if cubin is None else Compiled(cubin, spec.entry, cached=True)


def cache_entry(spec: KernelSpec, arch: str) -> str:
    """Where a cache has `spec`, compiled for `arch` by the installed NVRTC: the name of its file,
    relative to the cache's folder.

    Raises:
        MissingExtra: the compiler is not installed.
    """
    return entry_name(_key(program_text(spec), spec, arch))


def _key(text: str, spec: KernelSpec, arch: str) -> str:
    """The name in the cache of the program `text`: all that decides its machine code."""
    parts = (nvrtc_version(), _STANDARD, arch, spec.entry, text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def options(arch: str, **more: Any) -> ProgramOptions:
    """The options that every kernel is compiled with for `arch`, and `more` of `cuda.core`'s."""
    from cuda.core import ProgramOptions

    return ProgramOptions(
        arch=arch,
        std=_STANDARD,
        device_as_default_execution_space=True,  # else NVRTC takes a generic lambda for the host's
        **more,
    )


def _compile(text: str, spec: KernelSpec, told: ProgramOptions) -> bytes:
    from cuda.core import Program

    try:
        with uninterrupted:  # a child that is forked meanwhile could not compile
            return bytes(Program(text, "c++", told).compile("cubin").code)
    except Exception as error:  # cuda.core raises several classes when NVRTC refuses
        what = f"{spec.file} with {dict(spec.defines)} for {told.arch}"
        raise CompileError(what, str(error)) from error

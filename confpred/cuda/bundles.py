"""Compiled kernels that travel: a folder that is read before the compiler is asked.

    manifest.json           {"format": "confpred-bundle/1", "arch": "sm_90a", "compiler": "13.0",
                             "confpred": "0.1.0", "sources": {"depthwise.cu": "4b5c6d7e8f901234"}}
    kernels/0a/0a...cubin   entries as in the user's cache (`confpred.cuda.cache`)

The user's cache tells compilers and every byte of a source apart. A bundle does not: its kernels
are known by what their source means (`confpred.families.kernel_text.source_digest`), their macros
and the architecture, so that they serve a machine with another NVRTC, or with none. Nor has the
folder to be private to its user, who has named it; checksums are compared all the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import confpred
from confpred.cuda.cache import entry_name, sealed, unsealed
from confpred.errors import DataError, InvalidInput
from confpred.families.kernel_text import source_digest
from confpred.files import read_json
from confpred.forks import uninterrupted
from confpred.problem.operation import KernelSpec

log = logging.getLogger(__name__)

FORMAT = "confpred-bundle/1"
MANIFEST, KERNELS = "manifest.json", "kernels"
_opened: tuple[KernelBundle, ...] = ()  # the latest first
_incomplete: set[KernelBundle] = set()  # what lacks a kernel is said once
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
        """The cubin of `spec`; None where it is missing or damaged."""
        path = self.folder / KERNELS / entry_name(_key(spec, self.arch))
        try:
            content = path.read_bytes()
        except OSError:
            return None
        cubin = unsealed(content)
        if cubin is None:
            log.warning("%s is damaged: compiling it again", path)
        return cubin


def bundle_files(
    cubins: Mapping[KernelSpec, bytes], arch: str, compiler: str
) -> dict[str, str | bytes]:
    """The files of a bundle of `cubins`, made for `arch` by an NVRTC of version `compiler`, by
    their names in its folder."""
    manifest = {
        "format": FORMAT,
        "arch": arch,
        "compiler": compiler,
        "confpred": confpred.__version__,
        "sources": {name: source_digest(name) for name in sorted({s.file for s in cubins})},
    }
    entries = {
        f"{KERNELS}/{entry_name(_key(spec, arch))}": sealed(cubin) for spec, cubin in cubins.items()
    }
    return {MANIFEST: json.dumps(manifest, indent=1) + "\n", **entries}


def open_kernels(folder: Path, arch: str) -> KernelBundle:
    """Look for kernels in the bundle at `folder` from now on, before anywhere else.

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
                f"{path} is of other kernels: the digest of {name} is {str(digest)[:8]} there, and "
                f"{current[:8]} here; make the bundle again"
            )
    bundle = KernelBundle(folder.resolve(), arch)
    with uninterrupted, _lock:
        _opened = (bundle, *(other for other in _opened if other != bundle))
    return bundle


def close_kernels(bundle: KernelBundle) -> None:
    """Look there no more; kernels that are loaded stay loaded."""
    global _opened
    with uninterrupted, _lock:
        _opened = tuple(other for other in _opened if other != bundle)
        _incomplete.discard(bundle)


def bundled(spec: KernelSpec, arch: str) -> bytes | None:
    """The cubin of `spec` for `arch` from the bundles that are open; None where they lack it, which
    is a warning the first time, as somebody counts on a start without a compiler."""
    bundles = [bundle for bundle in _opened if bundle.arch == arch]
    for bundle in bundles:
        cubin = bundle.get(spec)
        if cubin is not None:
            return cubin
    for bundle in bundles:
        if bundle not in _incomplete:
            _incomplete.add(bundle)
            what = f"{spec.entry} with {dict(spec.defines)}"
            log.warning("%s lacks kernels that are asked for, such as %s", bundle.folder, what)
    return None


def _current_digest(name: str) -> str:
    try:
        return source_digest(name)
    except OSError:
        return "none"


def _key(spec: KernelSpec, arch: str) -> str:
    macros = "".join(f"#define {name} {value}\n" for name, value in spec.defines)
    parts = (arch, spec.entry, macros, spec.file, source_digest(spec.file))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()

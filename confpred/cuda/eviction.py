"""The size of the kernel cache: what was not used for longest goes first.

No process keeps an index. A use sets an entry's time of change, and a *sweep* lists the folder and
removes the oldest entries. Any number of processes may sweep at once: they remove the same ones. An
entry under its temporary name is being written, and is left alone until nobody can be writing it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from confpred.errors import InvalidInput

log = logging.getLogger(__name__)
#: MiB; the kernels of a network take a few.
DEFAULT_MIB = 1024
_VARIABLE = "CONFPRED_CACHE_MIB"
#: A sweep leaves room, so that it is not the next kernel that needs one.
_KEPT = 7 / 8
#: A process looks again when it has added this part of what is allowed.
_LOOK_AGAIN = 1 / 16
_ABANDONED_S = 3600.0
_ENTRY = re.compile(r"[0-9a-f]+\.cubin")
_TEMPORARY = re.compile(r"\.[0-9a-f]+\.cubin\..+\.tmp")
#: Bytes that this process has added to each folder since it last looked.
_added: dict[Path, int] = {}


def most_bytes() -> int:
    """What ``$CONFPRED_CACHE_MIB`` allows the cache, or 1 GiB.

    Raises:
        InvalidInput: it is no whole number of MiB above 0.
    """
    chosen = os.environ.get(_VARIABLE)
    if not chosen:
        return DEFAULT_MIB * 2**20
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", chosen, re.ASCII):
        raise InvalidInput(_VARIABLE, chosen, "a whole number of MiB, at least 1")
    return int(chosen) * 2**20


def used(path: Path) -> None:
    """Note that the entry at `path` was used now."""
    with contextlib.suppress(OSError):  # a disk that is read-only: nothing can be removed either
        os.utime(path)


def added(folder: Path, size: int, most: int) -> None:
    """Note that an entry of `size` bytes was written to `folder`, and sweep it where that may have
    made it larger than `most` bytes. Of several processes each may add a sixteenth unseen."""
    sofar = _added.get(folder)
    if sofar is not None and sofar + size <= most * _LOOK_AGAIN:
        _added[folder] = sofar + size
        return
    _added[folder] = 0
    sweep(folder, most)


def sweep(folder: Path, most: int) -> None:
    """Where the entries in `folder` have more than `most` bytes, remove those that were not used
    for longest."""
    files = sorted(_files(folder), key=lambda file: file[0])
    total = sum(size for _, size, _ in files)
    if total <= most:
        return
    removed = 0
    for changed_ns, size, path in files:
        if total <= most * _KEPT:
            break
        with contextlib.suppress(OSError):
            if path.stat().st_mtime_ns != changed_ns:
                continue  # used since it was listed
            path.unlink()
            removed += 1
        total -= size  # also where another process was faster
    log.info("kernel cache %s: %d of %d entries removed", folder, removed, len(files))


def _files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Time of the last use (ns), size in bytes, and path of everything that a sweep may remove."""
    abandoned_ns = time.time_ns() - int(_ABANDONED_S * 1e9)
    for part in _listed(folder):
        if not part.is_dir(follow_symlinks=False):
            continue
        for file in _listed(Path(part.path)):
            temporary = _TEMPORARY.fullmatch(file.name)
            if temporary or _ENTRY.fullmatch(file.name):
                with contextlib.suppress(OSError):  # gone meanwhile
                    status = file.stat(follow_symlinks=False)
                    if not temporary or status.st_mtime_ns < abandoned_ns:
                        yield status.st_mtime_ns, status.st_size, Path(file.path)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []

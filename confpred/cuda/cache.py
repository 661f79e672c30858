"""The compiled-kernel cache on disk: content-addressed, checksummed, private to the user.

An entry is named by the SHA-256 of everything that decides its bytes, and holds the SHA-256 of its
payload before the payload, because a damaged cubin that the driver still loads computes wrong
results. Entries appear by atomic rename, so any number of processes may share the folder. Its size
is limited.

`cuda.core.utils.FileStreamProgramCache` (cuda-core 1.2) is not used: it keeps no checksum, so a
damaged cubin would be loaded, and it reads folders that other users can write to. Entries are the
raw binaries, so both checks would have to wrap it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from confpred.errors import InvalidInput, StorageError
from confpred.files import user_folder, write_whole

log = logging.getLogger(__name__)
_DIGEST_BYTES = 32


def default_folder() -> Path:
    """Return ``$CONFPRED_CACHE_DIR``, or the user's cache folder of the operating system."""
    chosen = os.environ.get("CONFPRED_CACHE_DIR")
    return Path(chosen) if chosen else user_folder("cache") / "kernels"


@dataclass(frozen=True, slots=True)
class KernelCache:
    """Compiled kernels by key.

    A cache that cannot be read or written only costs a compilation: `get` then returns None and
    `put` logs a warning. Nothing is read from a folder that another user could have written to.

    Attributes:
        folder: made at the first write, readable by its owner alone.
        most: bytes that its entries may have in all; by default what the user allows.
    """

    folder: Path
    most: int = field(default_factory=lambda: most_bytes())

    def get(self, key: str) -> bytes | None:
        """Return the payload stored under `key`; None if absent, damaged (then removed) or
        untrusted."""
        path = self._path(key)
        try:
            if not _private(path.parent):
                return None
            content = path.read_bytes()
        except OSError:
            return None
        if (payload := unseal(content)) is not None:
            note_use(path)
            return payload
        log.warning("damaged kernel cache entry %s: removed, compiling again", path)
        with contextlib.suppress(OSError):  # on a read-only disk it stays, and is found again
            path.unlink()
        return None

    def put(self, key: str, payload: bytes) -> None:
        """Store `payload` under `key`; an entry is either whole or absent."""
        content = seal(payload)
        try:
            write_whole(self._path(key), lambda file: file.write(content), private=True)
        except StorageError as error:
            log.warning("kernel cache %s is not writable (%s)", self.folder, error)
        else:
            note_addition(self.folder, len(content), self.most)

    def _path(self, key: str) -> Path:
        return self.folder / entry_name(key)


def entry_name(key: str) -> str:
    """Return the path of an entry in its folder."""
    return f"{key[:2]}/{key}.cubin"


def seal(payload: bytes) -> bytes:
    """Return the content of an entry: `payload` after its checksum."""
    return hashlib.sha256(payload).digest() + payload


def unseal(content: bytes) -> bytes | None:
    """Return the payload of an entry's content; None if that is damaged."""
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return payload if payload and hashlib.sha256(payload).digest() == digest else None


def _private(folder: Path) -> bool:
    """Return whether only this user can put files in `folder`."""
    if not hasattr(os, "geteuid"):  # Windows: the profile's folder is the user's own
        return True
    status = folder.stat()
    safe = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not safe:
        log.warning("kernel cache %s can be written by other users: not used", folder)
    return safe


# Eviction removes the least recently used entries first. No process keeps an index. A use
# sets an entry's time of change, and a *sweep* lists the folder and removes the oldest entries. Any
# number of processes may sweep at once: they remove the same ones. An entry under its temporary
# name is being written, and is left alone until nobody can be writing it.

#: MiB; the kernels of a network take a few.
DEFAULT_MIB = 1024
_VARIABLE = "CONFPRED_CACHE_MIB"
#: Part of the allowed bytes that a sweep leaves, so that the next kernel does not need another.
_KEPT = 7 / 8
#: A process sweeps again when it has added this part of the allowed bytes.
_LOOK_AGAIN = 1 / 16
_ABANDONED_S = 3600.0
_ENTRY = re.compile(r"[0-9a-f]+\.cubin")
_TEMPORARY = re.compile(r"\.[0-9a-f]+\.cubin\..+\.tmp")
#: Bytes that this process has added to each folder since its last sweep.
_added: dict[Path, int] = {}


def most_bytes() -> int:
    """Return the bytes that ``$CONFPRED_CACHE_MIB`` allows the cache, or 1 GiB.

    Raises:
        InvalidInput: it is no whole number of MiB above 0.
    """
    chosen = os.environ.get(_VARIABLE)
    if not chosen:
        return DEFAULT_MIB * 2**20
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", chosen, re.ASCII):
        raise InvalidInput(_VARIABLE, chosen, "a whole number of MiB, at least 1")
    return int(chosen) * 2**20


def note_use(path: Path) -> None:
    """Record that the entry at `path` was used now."""
    with contextlib.suppress(OSError):  # a disk that is read-only: nothing can be removed either
        os.utime(path)


def note_addition(folder: Path, size: int, most: int) -> None:
    """Count an entry of `size` bytes written to `folder`, and sweep the folder where that may have
    made it larger than `most` bytes. Each process may add a sixteenth of them before it sweeps."""
    together = _added.get(folder, most) + size
    if together <= most * _LOOK_AGAIN:
        _added[folder] = together
        return
    _added[folder] = 0
    sweep(folder, most)


def sweep(folder: Path, most: int) -> None:
    """Remove the least recently used entries of `folder`, if all have more than `most` bytes."""
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
    """Yield time of last use (ns), size (bytes) and path of the files that a sweep may remove."""
    abandoned_ns = time.time_ns() - int(_ABANDONED_S * 1e9)
    for part in _list_folder(folder):
        # Not `part.is_dir`, which raises an error where a file system refuses to tell.
        if os.path.islink(part) or not os.path.isdir(part):
            continue
        for file in _list_folder(Path(part.path)):
            temporary = _TEMPORARY.fullmatch(file.name)
            if temporary or _ENTRY.fullmatch(file.name):
                with contextlib.suppress(OSError):  # gone meanwhile
                    status = file.stat(follow_symlinks=False)
                    if not temporary or status.st_mtime_ns < abandoned_ns:
                        yield status.st_mtime_ns, status.st_size, Path(file.path)


def _list_folder(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []

"""The compiled-kernel cache on disk: content-addressed, checksummed, private to the user.

An entry is named by the SHA-256 of everything that decides its bytes, and holds the SHA-256 of its
payload before the payload, because a damaged cubin that the driver still loads computes wrong
results. Entries appear by atomic rename, so any number of processes may share the folder. Its size
is limited (`confpred.cuda.eviction`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from confpred.cuda import eviction
from confpred.errors import StorageError
from confpred.files import write_whole

log = logging.getLogger(__name__)
_DIGEST_BYTES = 32


def default_folder() -> Path:
    """``$CONFPRED_CACHE_DIR``, or the user's cache folder as the operating system names it."""
    chosen = os.environ.get("CONFPRED_CACHE_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("confpred")) / "kernels"


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
    most: int = field(default_factory=eviction.most_bytes)

    def get(self, key: str) -> bytes | None:
        """The payload stored under `key`; None if absent, damaged (then removed) or untrusted."""
        path = self._path(key)
        try:
            if not _private(path.parent):
                return None
            content = path.read_bytes()
        except OSError:
            return None
        payload = unsealed(content)
        if payload is not None:
            eviction.used(path)
            return payload
        log.warning("damaged kernel cache entry %s: removed, compiling again", path)
        with contextlib.suppress(OSError):  # on a read-only disk it stays, and is found again
            path.unlink()
        return None

    def put(self, key: str, payload: bytes) -> None:
        """Store `payload` under `key`; an entry is either whole or absent."""
        content = sealed(payload)
        try:
            write_whole(self._path(key), lambda file: file.write(content), private=True)
        except StorageError as error:
            log.warning("kernel cache %s is not writable (%s)", self.folder, error)
        else:
            eviction.added(self.folder, len(content), self.most)

    def _path(self, key: str) -> Path:
        return self.folder / entry_name(key)


def entry_name(key: str) -> str:
    """Where an entry lies in its folder."""
    return f"{key[:2]}/{key}.cubin"


def sealed(payload: bytes) -> bytes:
    """The content of an entry: `payload` after its checksum."""
    return hashlib.sha256(payload).digest() + payload


def unsealed(content: bytes) -> bytes | None:
    """The payload of an entry's content; None if that is damaged."""
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return payload if payload and hashlib.sha256(payload).digest() == digest else None


def _private(folder: Path) -> bool:
    """Whether only this user can put files in `folder`."""
    if not hasattr(os, "geteuid"):  # Windows: the profile's folder is the user's own
        return True
    status = folder.stat()
    safe = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not safe:
        log.warning("kernel cache %s can be written by other users: not used", folder)
    return safe

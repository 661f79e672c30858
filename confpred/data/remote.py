"""Folders of an object store, by fsspec: ``s3://bucket/runs``, ``gs://bucket/runs``.

They have the methods of `pathlib.Path` that the sampler and its readers use. A file is one object,
written by one request, so it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from confpred.errors import ConfpredError, FolderBusy, InvalidInput, StorageError
from confpred.files import write_whole

#: Seconds after which a lease that was not renewed counts as that of a dead sampler.
LEASE_S = 300.0
_RENEW_S = 30.0
#: Most seconds between two samplers that take over the same lease.
_SETTLED_S = 1.0


@dataclass(frozen=True, order=True)
class RemoteFile:
    """One object: its URL, its path in the file system, and the file system."""

    url: str
    path: str
    fs: Any = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the object for reading."""
        opened: IO[bytes] = self.fs.open(self.path, mode)
        return opened

    def write_bytes(self, content: bytes, *, new: bool = False) -> None:
        """Write the object whole; with `new`, only if there is none.

        Raises:
            FileExistsError: `new`, and the object exists.
            StorageError: the object store refused.
        """
        with self._storing("write"):
            self.fs.pipe_file(self.path, content, mode="create" if new else "overwrite")

    def read_bytes(self) -> bytes | None:
        """Return the content, or None if there is no such object; raises as `write_bytes`."""
        with self._storing("read"):
            try:
                return bytes(self.fs.cat_file(self.path))
            except FileNotFoundError:
                return None

    def unlink(self) -> None:
        """Remove the object, if there is one; raises as `write_bytes`."""
        with self._storing("remove"), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path)

    @contextlib.contextmanager
    def _storing(self, what: str) -> Any:
        try:
            yield
        except (FileExistsError, ConfpredError):
            raise
        except Exception as error:  # each store's client has classes of its own
            raise StorageError(f"cannot {what} {self.url}: {error}") from error


@dataclass(frozen=True)
class RemoteFolder:
    """A prefix of an object store; it exists even if it is empty."""

    url: str
    root: str
    fs: Any = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(f"{self.url}/{name}", f"{self.root}/{name}", self.fs)

    def is_dir(self) -> bool:
        """Return True, because every prefix exists."""
        return True

    def glob(self, pattern: str) -> list[RemoteFile]:
        """Return the objects directly in this folder whose names match.

        Raises:
            StorageError: the object store refused.
        """
        try:
            self.fs.invalidate_cache(self.root)
            paths = self.fs.glob(f"{self.root}/{pattern}")
        except Exception as error:
            raise StorageError(f"cannot list {self.url}: {error}") from error
        return [self / str(path).rpartition("/")[2] for path in paths]


#: A folder on this machine, or in an object store.
Folder = Path | RemoteFolder


def folder_at(text: str) -> Folder:
    """Return the folder that a path or a URL names.

    Raises:
        InvalidInput: fsspec does not know this kind of URL.
        ConfpredError: the package for such URLs is not installed.
    """
    if "://" not in text:
        return Path(text)
    import fsspec  # takes as long as all of confpred

    scheme = urlsplit(text).scheme
    if scheme in ("file", "local"):
        return Path(url2pathname(urlsplit(text).path))
    try:
        fs, root = fsspec.url_to_fs(text)
    except ValueError:
        allowed = "a folder, or a URL such as file:///runs, s3://bucket/runs or gs://bucket/runs"
        raise InvalidInput("folder", text, allowed) from None
    except ImportError as error:
        raise ConfpredError(f"{text} cannot be used: {error}") from error
    return RemoteFolder(text.rstrip("/"), root.rstrip("/"), fs)


def read_bytes(file: Path | RemoteFile) -> bytes | None:
    """Return the content, or None if there is no such file; raises as `RemoteFile.read_bytes`."""
    return file.read_bytes() if isinstance(file, RemoteFile) or file.exists() else None


def write_bytes(file: Path | RemoteFile, content: bytes) -> None:
    """Write a file whole; raise a StorageError if that is refused."""
    if isinstance(file, RemoteFile):
        file.write_bytes(content)
    else:
        write_whole(file, lambda opened: opened.write(content))


def _process_space() -> str:
    """Return an identifier of this machine's start and container, because hosts may share a name;
    empty if the system has none."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


class Lease:
    """The right of one sampler to write to a remote folder: an object that is created only if there
    is none, and renewed while the sampler lives.

    Raises:
        FolderBusy: another sampler holds the folder.
        StorageError: the object store refused.
    """

    def __init__(self, folder: RemoteFolder, run_id: str) -> None:
        self._folder, self._file = folder, folder / ".lease.json"
        self._holder = {
            "token": secrets.token_hex(8),
            "run_id": run_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": _process_space(),
        }
        self._renewed = 0.0

    def __enter__(self) -> Lease:
        try:
            self._file.write_bytes(self._content(), new=True)
        except FileExistsError:
            self._take_over()
        self._renewed = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(StorageError):  # it expires
            if self._held().get("token") == self._holder["token"]:
                self._file.unlink()

    def renew(self) -> None:
        """Renew the lease, if it is due.

        Raises:
            FolderBusy: another sampler has taken the folder over.
            StorageError: the object store refused.
        """
        if time.monotonic() - self._renewed < _RENEW_S:
            return
        held = self._held()
        if held.get("token") not in (None, self._holder["token"]):
            raise self._busy(held)
        self._file.write_bytes(self._content())
        self._renewed = time.monotonic()

    def _take_over(self) -> None:
        """Replace the lease of a dead sampler."""
        held = self._held()
        if not self._dead(held):
            if time.time() - float(held.get("time", 0)) < LEASE_S:
                raise self._busy(held)
            time.sleep(2 * _RENEW_S)  # a clock may be wrong; a living sampler renews meanwhile
            if self._held() != held:
                raise self._busy(held)
        self._file.unlink()
        try:
            self._file.write_bytes(self._content(), new=True)
        except FileExistsError:
            raise self._busy(self._held()) from None
        time.sleep(_SETTLED_S)  # another may take this lease for the dead sampler's, and remove it
        if (held := self._held()).get("token") != self._holder["token"]:
            raise self._busy(held)

    def _dead(self, held: dict[str, Any]) -> bool:
        """Return whether the holder was a process of this machine that has ended."""
        if not held.get("processes") or held["processes"] != self._holder["processes"]:
            return False
        try:
            os.kill(int(held.get("pid", 0)), 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def _held(self) -> dict[str, Any]:
        content = self._file.read_bytes()
        try:
            held = json.loads(content or b"{}")
        except ValueError:
            held = {}
        return held if isinstance(held, dict) else {}

    def _content(self) -> bytes:
        return json.dumps({**self._holder, "time": time.time()}).encode()

    def _busy(self, held: dict[str, Any]) -> FolderBusy:
        who = f"process {held.get('pid', '?')} of {held.get('host', '?')}"
        return FolderBusy(
            f"another sampler ({who}) is writing to {self._folder}; if it is dead, wait "
            f"{LEASE_S:.0f} s after its end"
        )

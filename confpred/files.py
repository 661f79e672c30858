"""Files and folders that appear whole or not at all, and JSON files with a format field."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from confpred.errors import ConfpredError, DataError, StorageError


def write_whole(
    path: Path,
    write: Callable[[BinaryIO], object],
    *,
    private: bool = False,
    replace: bool = True,
    mode: int = 0o644,
) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`, so that a reader
    sees the old file or the complete new one. Missing parent folders are made.

    Args:
        path: the file to make or replace.
        write: called with the temporary file, open for writing bytes.
        private: only this user may read the file and the folders made for it, and the file is not
            synced: after a power cut it may hold anything, so its reader has to check it.
        replace: a file of that name may exist, and is replaced.
        mode: the file's permissions, unless it is private.

    Raises:
        StorageError: the file system refused, or the file exists and must not be replaced.
    """
    folders = 0o700 if private else 0o777
    with _published(path, tempfile.mkstemp, folders, replace=replace) as (handle, temporary):
        with open(handle, "wb") as file:
            write(file)
            file.flush()
            if not private:
                os.fsync(file.fileno())
        if not private:
            os.chmod(temporary, mode)


def write_json(path: Path, content: Mapping[str, Any], **how: Any) -> None:
    """Write `content` as `write_whole` does, as JSON with a line a value: versions compare well."""
    text = json.dumps(content, indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()), **how)


def write_folder(path: Path, files: Mapping[str, str | bytes]) -> None:
    """Make the folder `path` with `files`, whole or not at all, by names such as ``"kernels/0a"``.

    Raises:
        StorageError: the file system refused, or the folder exists and is not empty.
    """
    with _published(path, lambda **beside: (None, tempfile.mkdtemp(**beside))) as (_, temporary):
        for name, content in files.items():
            file = Path(temporary, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o755)


def check_writable(path: Path) -> None:
    """Check, before long work, that `write_whole` or `write_folder` can make `path`.

    Raises:
        StorageError: the file system refused.
    """
    folder = next(above for above in path.parents if os.path.lexists(above))
    with (
        raising(StorageError, f"write {path}"),
        tempfile.NamedTemporaryFile(**_beside(path, folder)),
    ):
        pass


def _beside(path: Path, folder: Path) -> dict[str, Any]:
    return {"prefix": f".{path.name}.", "suffix": ".tmp", "dir": folder}


def whole_in(folder: Path) -> list[Path]:
    """Return the entries of `folder` by name, without those that `write_whole` or `write_folder` is
    writing, or was when its process ended; none where there is no such folder.

    Raises:
        OSError: the system refuses to show the folder.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if not re.fullmatch(r"\..+\.tmp", name)]


@contextlib.contextmanager
def raising(kind: type[ConfpredError], what: str) -> Iterator[None]:
    """Raise an OSError of the ``with`` block as an error of `kind`, "cannot `what`: reason"."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {what}: {error.strerror or error}") from error


@contextlib.contextmanager
def _published(
    path: Path, make: Callable[..., Any], parent_mode: int = 0o777, *, replace: bool = True
) -> Iterator[tuple[Any, str]]:
    """Make a file or folder under a temporary name beside `path`; when the block ends, rename it,
    or remove it if the block failed.
    """
    temporary = None
    try:
        with raising(StorageError, f"write {path}"):
            path.parent.mkdir(mode=parent_mode, parents=True, exist_ok=True)
            handle, temporary = make(**_beside(path, path.parent))
            yield handle, temporary
            if replace or not _linked(temporary, path):
                os.replace(temporary, path)
                temporary = None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            with contextlib.suppress(OSError):  # a file, which rmtree leaves
                os.unlink(temporary)


def _linked(temporary: str, path: Path) -> bool:
    """Give a file the further name `path`, which fails if the name is taken, as renaming does not;
    return False on a file system without hard links."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        return False
    return True


def user_folder(kind: str) -> Path:
    """Return confpred's folder for this user's ``data`` or ``cache``, as the operating system names
    it. Without a home directory, as many containers are, it can be neither read nor made."""
    folder = platformdirs.user_data_dir if kind == "data" else platformdirs.user_cache_dir
    with contextlib.suppress(RuntimeError):
        if (path := Path(folder("confpred"))).is_absolute():  # some versions answer "~/..."
            return path
    return Path(os.devnull, "no home directory")


def cache_folder(name: str) -> Path:
    """Return the folder `name` in ``$CONFPRED_CACHE_DIR``, or else in the user's cache."""
    return Path(os.environ.get("CONFPRED_CACHE_DIR") or user_folder("cache")) / name


def read_json(path: Path, kind: str, *forms: str) -> dict[str, Any]:
    """Return the JSON object in the file at `path`, which has ``"format"`` and one of `forms`.

    Raises:
        DataError: it cannot be read, is not JSON, or is not `kind` (such as "a problem suite").
    """
    with raising(DataError, f"read {path}"):
        content = path.read_bytes()
    return parse_json(content, path, kind, *forms)


def parse_json(text: bytes, path: Path, kind: str, *forms: str) -> dict[str, Any]:
    """Parse `text`, the content of the file at `path`, as `read_json` does.

    Raises:
        DataError: it is not JSON, or is not `kind`.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") not in forms:
        raise DataError(f'{path} is not {kind}: it lacks "format": "{forms[0]}"')
    return content

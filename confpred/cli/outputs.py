"""What a command is to write, checked before it begins to work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from confpred.errors import InvalidInput
from confpred.files import check_writable

force_option = click.option(
    "--force", is_flag=True, help="Replace output files that exist; never an input."
)


def check_files(
    outputs: Mapping[str, Path | None], *, force: bool, inputs: Iterable[Path | None] = ()
) -> None:
    """Check that files can be written.

    Args:
        outputs: by the option or argument that names them; None where it was not given.
        force: files that exist may be replaced.
        inputs: what the command reads, which is never replaced, by whatever name or link an output
            refers to it; of a folder, the files in it.

    Raises:
        InvalidInput: an output is no file, exists and may not be replaced, is an input, or is
            another output.
        StorageError: the file system would refuse an output.
    """
    read = dict(_identities(inputs))
    written: dict[str, str] = {}
    for field, path in outputs.items():
        if path is None:
            continue
        if path.is_dir():
            raise InvalidInput(field, str(path), "a file, and this is a folder")
        if path.exists() and (source := read.get(_identity(path))) is not None:
            raise InvalidInput(field, str(path), f"a file that is not read as well, as {source} is")
        if path.exists() and not path.is_file():
            raise InvalidInput(field, str(path), "a plain file, and this is a device or a pipe")
        if os.path.lexists(path) and not force:
            raise InvalidInput(field, str(path), "a new file; with --force one that exists")
        other = written.setdefault(os.path.realpath(path), field)
        if other != field:
            raise InvalidInput(field, str(path), f"another file than that of {other}")
        check_writable(path)


def check_new_folder(field: str, path: Path) -> None:
    """Check that a folder can be made.

    Raises:
        InvalidInput: something of that name exists.
        StorageError: the file system would refuse it.
    """
    if os.path.lexists(path):
        raise InvalidInput(field, str(path), "a folder that does not exist yet")
    check_writable(path)


def check_folder(field: str, path: Path) -> None:
    """Check that files can be added to a folder, which is made if it is missing.

    Raises:
        InvalidInput: it is no folder.
        StorageError: the file system would refuse it.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise InvalidInput(field, str(path), "a folder, and this is none")
    check_writable(path / field)


def _identities(inputs: Iterable[Path | None]) -> Iterable[tuple[tuple[int, int], Path]]:
    for path in inputs:
        if path is not None and path.exists():
            for file in (*path.iterdir(), path) if path.is_dir() else (path,):
                if file.exists():
                    yield _identity(file), file


def _identity(path: Path) -> tuple[int, int]:
    """What all names of a file share."""
    status = path.stat()
    return status.st_dev, status.st_ino

"""Errors that confpred raises on purpose.

ConfpredError
|-- InvalidInput (also a ValueError)  a field holds a value that is not allowed
|   |-- InvalidProblem                ... in a problem: a size, a dtype, a combination of sizes
|   `-- UnknownDevice                 ... in a device name
|-- DataError                         a measurement or suite file is missing, damaged or foreign
|-- ModelError                        a model folder is missing, damaged or foreign
|-- FolderBusy                        another sampler is writing to this folder
|-- StorageError                      the disk refused a write (full, read-only, no permission)
|-- CompileError                      NVRTC refused a kernel; `.log` holds its words
|-- LaunchError                       the CUDA driver refused a launch
|-- ServiceError                      the HTTP service refused a request, or its reply is malformed
|   `-- ServiceUnavailable            ... or it cannot be reached in time
`-- MissingExtra (also an ImportError)  an optional dependency is not installed
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class ConfpredError(Exception):
    """Base of every error that confpred raises on purpose; its text is fit for a user."""


class InvalidInput(ConfpredError, ValueError):
    """A named field holds a value that is not allowed.

    Attributes:
        field: name of the field, as the user wrote it.
        value: the offending value.
        allowed: the values that are accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        wrong = " is missing" if value is None else f"={_shown(value)} is not allowed"
        super().__init__(f"{field}{wrong}; allowed: {allowed}")


class InvalidProblem(InvalidInput):
    """A problem's field, or a combination of fields, that describes no computation."""


class UnknownDevice(InvalidInput):
    """A device name without a description in confpred."""


@contextlib.contextmanager
def placed(where: str) -> Iterator[None]:
    """Prefix the field of an InvalidInput that is raised in the ``with`` block with `where`."""
    try:
        yield
    except InvalidInput as error:
        raise type(error)(f"{where}{error.field}", error.value, error.allowed) from None


class DataError(ConfpredError):
    """A measurement or suite file is missing, damaged, or foreign."""


class ModelError(ConfpredError):
    """A model folder is missing, damaged, or foreign."""


class FolderBusy(ConfpredError):
    """Another sampler holds the lock of this output folder."""


class StorageError(ConfpredError):
    """The file system refused a write; nothing half-written is left behind."""


class CompileError(ConfpredError):
    """NVRTC refused a kernel; `log` is its own log."""

    def __init__(self, what: str, log: str) -> None:
        self.log = log
        super().__init__(f"{what} does not compile:\n{log}")


class LaunchError(ConfpredError):
    """The CUDA driver refused to load or launch a kernel."""


class ServiceError(ConfpredError):
    """The HTTP service refused a request, or its reply is malformed. It has the reply's `status`,
    or None, and the `request_id` of the request in the service's log."""

    def __init__(self, what: str, status: int | None, request_id: str) -> None:
        self.status, self.request_id = status, request_id
        super().__init__(f"{what} (request {request_id})")


class ServiceUnavailable(ServiceError):
    """The HTTP service cannot be reached, or is too busy, within the time that a call may take."""


class MissingExtra(ConfpredError, ImportError):
    """An optional dependency is needed here and is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}: {install_command(extra)}")


_COMPARED = 200  # characters of a name: comparing takes longer than linearly


def nearest(value: object, names: Iterable[str]) -> str:
    """Return the one or two names among `names` that are closest to `value`; all of them if none is
    close."""
    names, words = [*names], str(value)[:_COMPARED]
    return " or ".join(difflib.get_close_matches(words, names, 2) or names)


def first_line(error: BaseException) -> str:
    """Return the first line of an error of another library, or its class if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _shown(value: object) -> str:
    """Return `value` in at most 80 characters; Python itself prints no number of 4,300 digits."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"<{type(value).__name__} too large to print>"
    return text if len(text) <= 80 else text[:77] + "..."


# confpred is in no package index, so a message about an extra names the source of this
# installation, or else the packages of the extra.
_NAME = "confpred"
_CLONE = Path(__file__).parents[1]
_OF_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def install_command(extra: str) -> str:
    """Return the shell command that adds `extra`, such as ``train``, to this installation."""
    if (_CLONE / "pyproject.toml").exists():
        return _pip("--editable", f"{_CLONE}[{extra}]")
    import json  # these four take a third of the time of importing the command line
    from importlib.metadata import distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    installed = distribution(_NAME)
    url = urlsplit(json.loads(installed.read_text("direct_url.json") or "{}").get("url", ""))
    source = Path(url2pathname(url.path))
    if url.scheme == "file" and source.exists():  # a clone, or a wheel
        return _pip(f"{source}[{extra}]")
    return _pip(*_packages(extra, installed.requires or []))


def _packages(extra: str, requirements: list[str]) -> list[str]:
    """Return the packages of `extra`, and of the extras in it, among metadata's `requirements`."""
    packages: list[str] = []
    for requirement in requirements:
        package, _, marker = (part.strip() for part in requirement.partition(";"))
        of = _OF_EXTRA.search(marker)
        if of is None or of[1] != extra:
            continue
        inner = re.fullmatch(rf"{_NAME}\[(.+)\]", package)
        parts = [name.strip() for name in inner[1].split(",")] if inner else []
        packages += [p for part in parts for p in _packages(part, requirements)] or [package]
    return list(dict.fromkeys(packages))


def _pip(*words: str) -> str:
    return f"pip install {shlex.join(words)}"

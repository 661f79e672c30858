"""Files that appear whole or not at all, and JSON files that say what they are."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from confpred.errors import DataError, StorageError


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`.

    A reader sees the old file or the complete new one; after a failure the temporary file is gone.
    Missing parent folders are made.

    Raises:
        StorageError: the file system refused (full, read-only, no permission, not a folder).
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        with open(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def read_json(path: Path, kind: str, form: str) -> dict[str, Any]:
    """The JSON object in the file at `path`, which must say ``"format": form``.

    Raises:
        DataError: it cannot be read, is not JSON, or is not `kind` (such as "a plan").
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != form:
        raise DataError(f'{path} is not {kind}: it lacks "format": "{form}"')
    return content

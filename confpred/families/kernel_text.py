"""The text of the CUDA sources, and the digest by which measurements and models know it."""

from __future__ import annotations

import hashlib
import re
import sys
from functools import cache
from pathlib import Path

import confpred.kernels


@cache
def file_text(name: str) -> str:
    """The CUDA source `name` with its quoted includes put in place.

    It is looked for in ``confpred.kernels``, then where Python looks for modules: the source of a
    family from elsewhere lies beside its module, and needs no path that another machine lacks.

    Raises:
        FileNotFoundError: it is in none of these folders.
    """
    paths = (Path(folder) / name for folder in (confpred.kernels.__path__[0], *sys.path))
    found = next(filter(Path.is_file, paths), None)
    if found is None:
        raise FileNotFoundError(f"no CUDA source {name} in confpred.kernels or on Python's path")
    text = found.read_text(encoding="utf-8")
    return re.sub(r'#include "([\w.]+)"\n', lambda match: file_text(match[1]), text).replace(
        "#pragma once\n", ""
    )


@cache
def source_digest(file: str) -> str:
    """Identity of a CUDA source with its includes, whatever the config: 16 hex digits."""
    return hashlib.sha256(file_text(file).encode()).hexdigest()[:16]

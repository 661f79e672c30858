"""The text of the CUDA sources, and the digest by which measurements and models know it."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

import confpred.kernels


@cache
def file_text(name: str) -> str:
    """A source of ``confpred.kernels``, or at a path elsewhere, with its quoted includes (which are
    always of ``confpred.kernels``) put in place."""
    text = (Path(confpred.kernels.__path__[0]) / name).read_text(encoding="utf-8")
    return re.sub(r'#include "([\w.]+)"\n', lambda match: file_text(match[1]), text).replace(
        "#pragma once\n", ""
    )


@cache
def source_digest(file: str) -> str:
    """Identity of a CUDA source with its includes, whatever the config: 16 hex digits."""
    return hashlib.sha256(file_text(file).encode()).hexdigest()[:16]

"""The text of the CUDA sources, and the digest that identifies it in measurements and models."""

from __future__ import annotations

import hashlib
import re
import sys
from functools import cache
from itertools import groupby
from pathlib import Path

import confpred.kernels

_TEXT = r"""\"(?:\\.|[^"\\\n])*\"|'(?:\\.|[^'\\\n])*'"""
_COMMENT_OR_TEXT = re.compile(rf"//[^\n]*|/\*.*?\*/|({_TEXT})", re.DOTALL)
#: Tokens of C++: string literals, words and numbers, operators.
_TOKEN = re.compile(rf"{_TEXT}|[\w.]+|<<=|>>=|\+\+|--|->|::|##|&&|\|\||<<|>>|[-+*/%&|^=!<>]=|\S")


@cache
def file_text(name: str) -> str:
    """Return the CUDA source `name` with its quoted includes put in place.

    The file is looked for in ``confpred.kernels``, then on Python's module path: the source of a
    plug-in lies beside its module, and needs no path that another machine lacks.

    Raises:
        FileNotFoundError: it is in none of these folders.
    """
    paths = (Path(folder) / name for folder in (confpred.kernels.__path__[0], *sys.path))
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        raise FileNotFoundError(f"no CUDA source {name} in confpred.kernels or on Python's path")
    text = path.read_text(encoding="utf-8")
    return re.sub(r'#include "([\w.]+)"\n', lambda match: file_text(match[1]), text).replace(
        "#pragma once\n", ""
    )


@cache
def source_digest(file: str) -> str:
    """Return the identity of a CUDA source with its includes, whatever the config: 16 hex digits.

    The digest is of what the compiler sees: comments, blanks and line breaks do not count, except
    the line breaks that end a preprocessor directive. So mending a comment leaves measurements and
    models valid, and changing a token does not.
    """
    return hashlib.sha256(meaning(file_text(file)).encode()).hexdigest()[:16]


def identity_of(source: str) -> str:
    """Return the identity of what launches of this source run
    (`confpred.problem.operation.Launch.source`): a kernel's digest, or a library's name and
    release.

    Raises:
        FileNotFoundError: there is no such CUDA source.
    """
    return source_digest(source) if source.endswith(".cu") else source


def meaning(text: str) -> str:
    """Return CUDA source `text` as its tokens, one blank apart, with each directive on a line of
    its own."""
    plain = _COMMENT_OR_TEXT.sub(lambda match: match[1] or " ", text).replace("\\\n", " ")
    tokens = []
    for directive, lines in groupby(plain.splitlines(), lambda line: line.lstrip()[:1] == "#"):
        if directive:
            tokens += [f"\n{' '.join(_TOKEN.findall(line))}\n" for line in lines]
        else:  # at once, as no token goes beyond its line
            tokens += _TOKEN.findall("\n".join(lines))
    return " ".join(tokens)

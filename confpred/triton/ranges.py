"""Calls with sizes from ranges, such as ``M=16:8192,N=64:16384:64,dtype=float16/bfloat16``."""

from __future__ import annotations

import re

import numpy as np

from confpred.errors import InvalidInput, placed
from confpred.triton.problem import KernelCall

MULTIPLE = 16  # of most sizes: those of networks are, and Triton loads such in wide words


def calls_in(
    ranges: str, problem: type[KernelCall], count: int, seed: int
) -> tuple[KernelCall, ...]:
    """Return up to `count` distinct calls, the same ones for a seed.

    A range ``from:to`` is divided into `count` parts of one ratio, and each call has a size of
    another part. Sizes are multiples of 16, or of the ``multiple`` of ``from:to:multiple``; those
    below it are any. Texts and numbers with a ``/`` between them are chosen from at random.

    Raises:
        InvalidInput: a range is not of these forms, or of no field.
    """
    rng = np.random.default_rng(seed)
    columns: dict[str, list[str]] = {}
    for part in ranges.split(","):
        name, _, text = part.strip().partition("=")
        if name in columns or not text:
            raise InvalidInput("ranges", part, "one range a name, such as M=16:8192,N=4096")
        columns[name] = _texts(part, text, count, rng)
    with placed("ranges: "):
        rows = zip(*columns.values(), strict=True)
        calls = [problem.from_texts(dict(zip(columns, row, strict=True))) for row in rows]
    return tuple(dict.fromkeys(calls))


def _texts(part: str, text: str, count: int, rng: np.random.Generator) -> list[str]:
    """Return the texts of a field in each of `count` calls."""
    if ":" not in text:
        return [str(word) for word in rng.choice(text.split("/"), count)]
    match = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})(?::([0-9]{1,10}))?", text)
    low, high, multiple = (int(n or MULTIPLE) for n in match.groups()) if match else (0, 0, 0)
    if not 1 <= low <= high or not multiple:
        raise InvalidInput("ranges", part, "FROM:TO or FROM:TO:MULTIPLE, such as M=16:8192")
    places = (rng.permutation(count) + rng.random(count)) / count
    return [str(_rounded(size, low, high, multiple)) for size in low * (high / low) ** places]


def _rounded(size: float, low: int, high: int, multiple: int) -> int:
    """Return the nearest multiple in the range; the nearest integer where there is none, and for
    sizes below the first multiple."""
    rounded = min(round(size / multiple), high // multiple) * multiple
    return rounded if size >= multiple and rounded >= low else round(size)

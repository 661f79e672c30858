"""Where a test puts something in the place of the real thing, a comment has the reason."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

CPU = Path(__file__).parents[1]
ROOMS = ("client", "products", "project", "pytorch", "retraining", "service")
_PUT = re.compile(r"\b(?:monkey)?patch\.setattr\(")


def without_a_reason(text: str) -> list[str]:
    """Return the lines that replace something, and have no comment on them or above them."""
    put = ((a.strip(), b) for a, b in pairwise(["", *text.splitlines()]) if _PUT.search(b))
    return [line.strip() for above, line in put if " # " not in line and not above.startswith("#")]


@pytest.mark.parametrize("room", ROOMS)
def test_every_stand_in_has_its_reason(room: str) -> None:
    for path in (CPU / room).rglob("*.py"):
        assert without_a_reason(path.read_text(encoding="utf-8")) == [], path.name


def test_one_without_is_seen() -> None:
    put = "    patch" + '.setattr(module, "name", 1)'
    assert without_a_reason(f"{put}  # a reason\n# A reason.\n{put}\n") == []
    assert without_a_reason(f"x = 1\n{put}\n") == [put.strip()]

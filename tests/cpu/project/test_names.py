"""Names say what they hold: those that say nothing are few, and one class name has one meaning."""

from __future__ import annotations

import ast
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: Names that hold anything, and how often they may stand in the code that ships.
EMPTY_NAMES = {"found", "each", "known", "given", "told", "rest"}
MOST_EMPTY_NAMES = 150
#: Most names of classes, without leading underscores, that several modules define.
MOST_SHARED_CLASSES = 8


def modules() -> Iterator[Path]:
    for folder in ("confpred", "service"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def names_in(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                yield token.string


def test_names_that_say_nothing_are_few() -> None:
    counts = {
        path.relative_to(ROOT).as_posix(): sum(name in EMPTY_NAMES for name in names_in(path))
        for path in modules()
    }
    assert sum(counts.values()) <= MOST_EMPTY_NAMES, {p: n for p, n in counts.items() if n}


def test_a_class_name_has_one_meaning() -> None:
    places = defaultdict(set)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(path.relative_to(ROOT).as_posix())
    shared = {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}
    assert len(shared) <= MOST_SHARED_CLASSES, shared

"""Which tests are slow, as their files say: ``@pytest.mark.slow(reason="...")``."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import pytest


def slow_but(fast: Container[object], values: Iterable[object], reason: str) -> list[object]:
    """`values` for a parametrized test whose cases are slow except for those of `fast`; a tuple is
    the values of several parameters."""
    mark = pytest.mark.slow(reason=reason)
    return [
        value
        if value in fast
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value in values
    ]


def reasons(file: Path) -> Iterator[str | None]:
    """Yield the reason that each use of the marker in a file gives; None where it gives none."""
    tree = ast.parse(file.read_text())
    calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if _is_marker(node):
            call = calls.get(node)
            given = {k.arg: ast.literal_eval(k.value) for k in call.keywords} if call else {}
            yield given.get("reason") or None


def which_are_slow(file: Path) -> dict[str, bool]:
    """Return the tests of a file by their names, and whether all cases of a test are slow."""
    body = ast.parse(file.read_text()).body
    all_are = any(
        isinstance(node, ast.Assign)
        and [ast.unparse(target) for target in node.targets] == ["pytestmark"]
        and _has_marker(node.value)
        for node in body
    )
    return {
        node.name: all_are or any(map(_is_marker, map(_function, node.decorator_list)))
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _function(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _is_marker(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.slow"


def _has_marker(node: ast.AST) -> bool:
    return any(map(_is_marker, ast.walk(node)))

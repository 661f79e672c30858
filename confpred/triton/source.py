"""The Python source of a Triton kernel: its identity, and the names that its loops are over."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's source.

    Attributes:
        digest: of the kernel and of all that it calls or reads: 16 hex digits.
        looped: names in the steps of its loops, or else in their bounds, such as ``BLOCK_K``.
    """

    digest: str
    looped: frozenset[str]


def source_of(function: FunctionType) -> Source:
    """Return the source of a kernel, given its plain Python function.

    Comments, blanks, decorators and the docstring do not count. Constants and kernels that the
    source names count, save Triton's own, which have Triton's version.

    Raises:
        OSError: the source cannot be read.
    """
    texts: dict[str, str] = {}
    _collect(function, texts)
    digest = hashlib.sha256("\n".join(f"{n}: {texts[n]}" for n in sorted(texts)).encode())
    loops = (node.iter for node in ast.walk(_tree(function)) if isinstance(node, ast.For))
    nodes = (node for loop in loops for part in _steps(loop) for node in ast.walk(part))
    looped = frozenset(node.id for node in nodes if isinstance(node, ast.Name))
    return Source(digest.hexdigest()[:16], looped)


def _steps(loop: ast.expr) -> list[ast.expr]:
    """Return the step of a ``range``, or its bounds where it has none."""
    arguments = loop.args if isinstance(loop, ast.Call) else [loop]
    return arguments[2:3] or arguments


def plain_function(kernel: Any) -> FunctionType:
    """Return the Python function inside a kernel and its decorators."""
    while not inspect.isfunction(kernel):
        kernel = kernel.fn
    return kernel


def _tree(function: FunctionType) -> ast.Module:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition: Any = tree.body[0]
    definition.decorator_list = []
    if ast.get_docstring(definition) is not None:
        del definition.body[0]
    return tree


def _collect(function: FunctionType, texts: dict[str, str]) -> None:
    """Put the text of `function`, and of all that it names, into `texts`."""
    name = f"{function.__module__}.{function.__qualname__}"
    if name in texts:
        return
    tree = _tree(function)
    texts[name] = ast.unparse(tree)
    for used, value in _named(function, tree):
        if inspect.isfunction(inner := getattr(value, "fn", None)):
            _collect(inner, texts)
        elif isinstance(value := getattr(value, "value", value), (bool, int, float, str)):
            texts[f"{name} {used}"] = repr(value)


def _named(function: FunctionType, tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the global and enclosing values that a function names, and members of modules."""
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            yield node.id, scope[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = scope.get(node.value.id)
            if isinstance(module, ModuleType) and module.__name__.partition(".")[0] != "triton":
                yield f"{node.value.id}.{node.attr}", getattr(module, node.attr, None)

"""The error tree: as drawn, catchable as a whole, and readable."""

from __future__ import annotations

import inspect
import re

import pytest

from confpred import errors
from confpred.errors import (
    CompileError,
    InvalidInput,
    InvalidProblem,
    MissingExtra,
    install_command,
)

CLASSES = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__
]


def test_the_tree_drawn_in_the_docstring_is_the_tree() -> None:
    """Every class is drawn, one level below the class that it derives from; one base has all."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        match = re.match(r"^((?:\|   |    )*)(?:[|`]-- )?([A-Z]\w+)\b", line)
        if match and (match[2] == "ConfpredError" or "--" in line):
            depth = 0 if match[2] == "ConfpredError" else len(match[1]) // 4 + 1
            path[depth:] = [match[2]]
            drawn[match[2]] = path[depth - 1] if depth else "Exception"
    assert drawn == {c.__name__: c.__bases__[0].__name__ for c in CLASSES}


def test_also_what_python_would_have_raised() -> None:
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(MissingExtra, ImportError)


def test_bad_input_names_field_value_and_what_is_allowed() -> None:
    error = InvalidProblem("n", 0, "an integer from 1 to 65536")
    assert (error.field, error.value, error.allowed) == ("n", 0, "an integer from 1 to 65536")
    assert str(error) == "n=0 is not allowed; allowed: an integer from 1 to 65536"


@pytest.mark.parametrize(
    "value", ["x" * 10_000, 10**6000, list(range(10_000))], ids=["text", "integer", "list"]
)
def test_a_huge_value_is_cut(value: object) -> None:
    error = InvalidInput("n", value, "less")
    assert error.value is value
    assert len(str(error)) < 150


def test_a_value_too_deep_to_print_is_still_refused() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert "n=" in str(InvalidInput("n", value, "less"))


def test_compile_errors_carry_the_log() -> None:
    error = CompileError("grouped_fprop.cu", "line 3: error: what?")
    assert error.log in str(error)
    assert "grouped_fprop.cu" in str(error)
    assert install_command("gpu") in str(MissingExtra("torch", "gpu"))

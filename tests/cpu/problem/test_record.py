"""`Record` serves an operation that is not a convolution: checks, texts and JSON for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from confpred.data.measurements import problem_of_row
from confpred.errors import InvalidProblem
from confpred.problem.record import Record


@dataclass(frozen=True, slots=True)
class Softmax(Record):
    """Softmax of each row of a matrix, in square blocks."""

    LIMITS: ClassVar = {"rows": (1, 1000), "columns": (1, 64), "block": (1, 8)}
    TUPLES: ClassVar = {"block": ("h", "w")}
    CHOICES: ClassVar = {"dtype": ("float16", "float32")}

    rows: int
    columns: int
    block: tuple[int, int] = (1, 1)
    dtype: str = "float32"
    logarithm: bool = False


def test_texts_and_json_round_trip() -> None:
    problem = Softmax(7, 9, block=2, logarithm=True)
    assert problem.block == (2, 2)
    assert str(problem) == "rows=7 columns=9 block=2 logarithm=true"
    assert Softmax.parse(str(problem)) == problem
    assert Softmax.parse("columns=9 rows=7 block=1x2").block == (1, 2)
    assert problem.to_json()["block"] == [2, 2]
    assert Softmax.from_json(problem.to_json()) == problem
    assert hash(problem) == hash(Softmax(7, 9, (2, 2), "float32", True))


def test_a_row_of_a_table_holds_it() -> None:
    row = {"rows": 7, "columns": 9, "block_h": 2, "block_w": 3, "dtype": "float16"}
    row |= {"logarithm": True}
    assert problem_of_row(row, Softmax) == Softmax(7, 9, (2, 3), "float16", True)


def test_a_record_without_a_layer_of_its_own_is_its_layer() -> None:
    assert Softmax(7, 9).layer() == Softmax(7, 9)


def test_records_of_two_operations_are_never_equal() -> None:
    @dataclass(frozen=True, slots=True)
    class Sum(Record):
        LIMITS: ClassVar = Softmax.LIMITS
        CHOICES: ClassVar = Softmax.CHOICES
        rows: int
        columns: int
        dtype: str = "float32"

    assert Sum(7, 9) != Softmax(7, 9)


@pytest.mark.parametrize(
    ("text", "field", "allowed"),
    [
        ("rows=7", "columns", "an integer from 1 to 64 (required)"),
        ("rows=0 columns=1", "rows", "an integer from 1 to 1000"),
        ("rows=1 columns=1 block=9", "block", "an integer from 1 to 8, or a pair of them"),
        ("rows=1 columns=1 block=1x9", "block", "an integer from 1 to 8, or a pair of them"),
        ("rows=1 columns=1 dtype=bfloat16", "dtype", "float16 or float32"),
        ("rows=1 columns=1 logarithm=maybe", "logarithm", "true or false"),
        ("rows=1 columns=1 stride=2", "stride", "a field among rows, columns, block, dtype"),
        ("rows=1 rows=2", "rows", "one value a field"),
        ("seven", "layer", "words of the form field=value, with blanks between them"),
        ("rows=7,columns=9", "layer", "words of the form field=value, with blanks between them"),
        ("rows=7, columns=9", "layer", "words of the form field=value, with blanks between them"),
        ("=7", "layer", "words of the form field=value, with blanks between them"),
        # A wrong field comes before a missing one.
        ("rows=7,8", "rows", "an integer from 1 to 1000"),
        ("rows=", "rows", "an integer from 1 to 1000"),
        ("rows=7 dtype=int4", "dtype", "float16 or float32"),
        ("rows=7 block=1-2", "block", "an integer from 1 to 8, or a pair of them"),
    ],
)
def test_bad_words_are_named_with_its_own_fields(text: str, field: str, allowed: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        Softmax.parse(text)
    assert caught.value.field == field
    assert caught.value.allowed.startswith(allowed)


def test_what_is_no_mapping_is_answered_with_its_own_fields() -> None:
    with pytest.raises(InvalidProblem, match="fields such as rows, columns, block"):
        Softmax.from_json([1])  # type: ignore[arg-type]

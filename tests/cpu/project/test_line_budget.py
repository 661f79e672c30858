"""Lines of code a folder, and modules that ship: what is there stays as small as it is.

Comments, docstrings and blank lines are free. A budget is raised by a decision
(``docs/decisions``), and lowered whenever lines go.
"""

from __future__ import annotations

import token
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: Lines of code of a folder, those in it included.
BUDGETS = {
    "benchmarks": 6746, "confpred": 28346, "confpred/cli": 2189, "confpred/client": 758,
    "confpred/cuda": 834, "confpred/cudnn": 536, "confpred/data": 594, "confpred/families": 5105,
    "confpred/launch": 189, "confpred/measure": 913, "confpred/model": 1191,
    "confpred/predict": 963, "confpred/problem": 1838, "confpred/products": 425,
    "confpred/pytorch": 6875, "confpred/report": 844, "confpred/retraining": 971,
    "confpred/sampler": 1526, "confpred/training": 1777, "confpred/triton": 365,
    "datasets": 4770, "examples": 538, "service": 3487, "tests": 38740,
}  # fmt: skip
MODULES = 200  # of confpred and service together
LONGEST = 500  # lines of a module that ships
#: Names that several modules share, as a kernel family and a table do in their rooms.
SAME_NAMES = 8


def modules(folder: str) -> Iterator[Path]:
    return (path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def code_lines(path: Path) -> int:
    """Return how many lines have a token that is neither a comment nor a docstring."""
    free = (token.INDENT, token.DEDENT, token.NEWLINE, token.ENDMARKER, tokenize.COMMENT)
    free += (tokenize.NL, tokenize.ENCODING)
    found: set[int] = set()
    with path.open("rb") as file:
        for each in tokenize.tokenize(file.readline):
            is_docstring = each.type == token.STRING and each.line.lstrip().startswith('"""')
            if each.type not in free and not is_docstring:
                found.update(range(each.start[0], each.end[0] + 1))
    return len(found)


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_is_within_its_budget(folder: str) -> None:
    assert sum(map(code_lines, modules(folder))) <= BUDGETS[folder]


def test_every_room_has_a_budget() -> None:
    rooms = {f"confpred/{path.parent.name}" for path in (ROOT / "confpred").glob("*/__init__.py")}
    assert rooms - BUDGETS.keys() <= {
        f"confpred/{name}" for name in ("kernels", "models", "suites")
    }


def test_modules_that_ship_are_few_short_and_of_one_name() -> None:
    shipped = [*modules("confpred"), *modules("service")]
    assert len(shipped) <= MODULES
    assert [str(path) for path in shipped if lines(path) > LONGEST] == []
    names = [path.name for path in shipped if path.name != "__init__.py"]
    assert len({name for name in names if names.count(name) > 1}) <= SAME_NAMES

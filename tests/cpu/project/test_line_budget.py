"""Lines of Python a folder, and modules that ship: what is there stays as small as it is.

A budget is raised by a decision (``docs/decisions``), and lowered whenever lines go.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: Lines of a folder, those in it included.
BUDGETS = {
    "benchmarks": 7200, "confpred": 30000, "confpred/cli": 2230, "confpred/client": 1120,
    "confpred/cuda": 1160, "confpred/cudnn": 790, "confpred/data": 980, "confpred/families": 3970,
    "confpred/measure": 1170, "confpred/model": 2000, "confpred/predict": 1430,
    "confpred/problem": 1750, "confpred/products": 770, "confpred/pytorch": 4870,
    "confpred/report": 1200, "confpred/retraining": 1420, "confpred/sampler": 2180,
    "confpred/training": 2390, "datasets": 2710, "examples": 650, "service": 4870, "tests": 38300,
}  # fmt: skip
MODULES = 150  # of confpred and service together
LONGEST = 500  # lines of a module that ships
#: Names that several modules share, as a kernel family and a table do in their rooms.
SAME_NAMES = 8


def modules(folder: str) -> Iterator[Path]:
    return (path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_is_within_its_budget(folder: str) -> None:
    assert sum(map(lines, modules(folder))) <= BUDGETS[folder]


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

"""The list of faults fits the tree of today, and planting them tells what tests notice.

`make faults` plants all of them, which takes long. Here each is planted on paper alone.
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from faults.plant import Fault, plant_all, planted, read_faults
from slow import which_are_slow

ROOT = Path(__file__).parents[3]
FAULTS = read_faults()
AREAS = {"selection", "legality", "splits", "caches", "storage", "timing"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_names_tests_that_exist(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    wrong = planted(fault, text)
    assert wrong != text
    ast.parse(wrong)
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        found = ast.parse((ROOT / file).read_text()).body
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        functions = {node.name for node in found if isinstance(node, kinds)}
        assert not name or name in functions, test


def test_the_faults_are_of_all_areas_and_distinct() -> None:
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    counts = Counter(fault.area for fault in FAULTS)
    assert set(counts) == AREAS
    assert min(counts.values()) >= 5


def test_a_text_that_has_gone_or_come_twice_is_named() -> None:
    fault = Fault("a fault", "timing", "x.py", "a + b", "a - b", ())
    assert planted(fault, "a + b\n") == "a - b\n"
    for text in ("a * b\n", "a + b\na + b\n"):
        with pytest.raises(ValueError, match=r"x\.py has [02] times, not once: 'a \+ b'"):
            planted(fault, text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a repository of one function and one test, which looks at its sum alone."""
    files = {
        "confpred/arithmetic.py": "def both(a, b):\n    return a + b, a * b\n",
        "confpred/__init__.py": "",
        "kernels/__init__.py": "inside = True\n",
        "test_sum.py": "from confpred.arithmetic import both\nfrom confpred.kernels import inside\n"
        "\n\ndef test_sum():\n    assert inside\n    assert both(2, 3)[0] == 5\n",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow(reason): takes long"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def fault(name: str, old: str, new: str) -> Fault:
    return Fault(name, "sums", "confpred/arithmetic.py", old, new, ("test_sum.py",))


@pytest.mark.slow(reason="it starts pytest five times")
def test_faults_are_caught_missed_or_break_the_tests(project: Path) -> None:
    before = {path: path.read_bytes() for path in project.glob("**/*.py")}
    faults = [
        fault("a wrong sum", "a + b", "a - b"),
        fault("a wrong product", "a * b", "a / b"),
        fault("no function", "def both", "def neither"),
        fault("another wrong sum", "a + b", "a"),
    ]
    found = {o.fault: o.result for o in plant_all(project, faults, jobs=2)}
    assert found == {
        "a wrong sum": "caught",
        "a wrong product": "missed",
        "no function": "broken",
        "another wrong sum": "caught",
    }
    assert {path: path.read_bytes() for path in project.glob("**/*.py")} == before


def test_tests_that_fail_by_themselves_are_told(project: Path) -> None:
    (project / "test_sum.py").write_text("def test_sum():\n    assert False\n")
    with pytest.raises(RuntimeError, match="the tests fail without a fault"):
        list(plant_all(project, [fault("a wrong sum", "a + b", "a - b")], jobs=1))


@pytest.mark.slow(reason="the tests of a fault run into their limit")
def test_all_tests_together_have_the_patience_of_all_faults(project: Path) -> None:
    """Sound tests may take longer than those of one fault, as they do where there are many."""
    (project / "test_sum.py").write_text("import time\n\n\ndef test_sum():\n    time.sleep(1.5)\n")
    one = fault("a wrong sum", "a + b", "a - b")
    found = next(plant_all(project, [one] * 60, 1, patience_s=1))
    assert (found.result, found.output) == ("caught", "the tests did not end within 1 s")
    with pytest.raises(RuntimeError, match="the tests did not end within 1 s"):
        next(plant_all(project, [one], 1, patience_s=1))


@pytest.mark.slow(reason="it starts pytest four times")
def test_slow_tests_run_only_when_asked_for(project: Path) -> None:
    text = (project / "test_sum.py").read_text()
    marked = text.replace("def test_sum", '@pytest.mark.slow(reason="an example")\ndef test_sum')
    (project / "test_sum.py").write_text(f"import pytest\n{marked}")
    faults = [fault("a wrong sum", "a + b", "a - b")]
    for slow, result in ((False, "missed"), (True, "caught")):
        (found,) = plant_all(project, faults, 1, slow=slow)
        assert found.result == result


def test_nearly_all_faults_name_a_test_that_is_fast() -> None:
    """`make test` alone is to catch at least 90 % of the faults; `make faults` shows it."""
    fast = set()
    for file in {test.partition("::")[0] for fault in FAULTS for test in fault.tests}:
        found = which_are_slow(ROOT / file)
        fast |= {f"{file}::{name}" for name, is_slow in found.items() if not is_slow}
        fast |= {file} if not all(found.values()) else set()
    noticed = [fault for fault in FAULTS if fast & set(fault.tests)]
    assert len(noticed) >= 0.9 * len(FAULTS)

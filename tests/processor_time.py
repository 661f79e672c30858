"""Budgets of processor time: a folder of tests takes no longer than it is allowed to.

Time is counted in turns of a fixed loop, which each process times again and again: on a slower
machine, or beside other work, both take longer. The processes of a test count when they have ended.
Folders of which a run has all fast tests, all slow ones, or both, are held to their budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import numpy as np
import pytest

ROOT = Path(__file__).parent
#: Turns that the fast tests of a folder may take, and the slow ones: 2.5 times what they took with
#: empty caches of PyTorch and of kernels, or more. On another day, or beside other work, the same
#: tests took up to 1.6 times as many.
BUDGETS: dict[str, tuple[int, int]] = {
    "cpu/cli": (4800, 11800), "cpu/client": (2000, 2800), "cpu/cuda": (1300, 2200),
    "cpu/cudnn": (1100, 0), "cpu/data": (2500, 1100), "cpu/families": (13700, 56700),
    "cpu/kernels": (21300, 124600), "cpu/measure": (100, 0), "cpu/model": (2500, 0),
    "cpu/predict": (5900, 0), "cpu/problem": (3300, 0), "cpu/products": (2400, 2500),
    "cpu/project": (9900, 104600), "cpu/pytorch": (51800, 173100), "cpu/report": (1500, 0),
    "cpu/retraining": (3900, 22300), "cpu/sampler": (7400, 21700), "cpu/service": (27700, 34600),
    "cpu/training": (3300, 5400), "cpu/triton": (8500, 26000),
}  # fmt: skip
OVER_BUDGET = 6  # an exit status that pytest does not use: no test is to run again
_KINDS = {"not slow": (0,), "slow": (1,), "": (0, 1)}  # of these two, by `-m`
_EACH = 25  # tests; so often the loop is timed
_TOLD = "turns"


def used_s() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    both = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in both)


def turn_s() -> float:
    """Return what a turn of the loop takes: some hundredths of a second."""
    start = used_s()
    table = {str(number): number * number % 97 for number in range(60_000)}
    np.sort(np.random.default_rng(sum(table.values())).random(200_000))
    return used_s() - start


def is_over(took: int, most: int | None) -> bool:
    return most is not None and took > most


class Watch:
    """A plugin that counts what each test takes, where it runs, and adds up where all are told."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._spent = config, Counter[str]()
        self._tests, self._turn_s, self._before = 0, 0.0, 0.0
        self._is_last = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
        if self._tests % _EACH == 0:
            self._turn_s = min(turn_s() for _ in range(3))
        self._tests, self._is_last = self._tests + 1, nextitem is None
        self._before = used_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = used_s()
        # Fixtures of the whole run end after the last test, and are no test's.
        if not (self._is_last and call.when == "teardown"):
            report.user_properties.append((_TOLD, (now - self._before) / self._turn_s))
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = Path(report.nodeid.partition("::")[0]).parent.as_posix().removeprefix("tests/")
        self._spent[folder] += dict(report.user_properties).get(_TOLD, 0.0)

    def _is_whole(self, folder: str) -> bool:
        """Return whether all tests of a folder were to run."""
        option, path = self._config.option, ROOT / folder
        given = [Path(self._config.invocation_params.dir, arg) for arg in self._config.args]
        chosen = option.keyword or option.deselect or getattr(option, "lf", False)
        return not chosen and any(each in (path, *path.parents) for each in given)

    def found(self) -> list[tuple[str, int, int | None]]:
        """Return the folders that ran whole, what each took, and its budget, if it has one."""
        kinds = _KINDS.get(self._config.option.markexpr)
        if kinds is None:
            return []
        found: list[tuple[str, int, int | None]] = []
        for folder in filter(self._is_whole, sorted(self._spent)):
            budgets = BUDGETS.get(folder)
            most = None if budgets is None else sum(budgets[kind] for kind in kinds)
            found.append((folder, round(self._spent[folder]), most))
        return found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(self._config, "workerinput")
        if not is_worker and any(is_over(took, most) for _, took, most in self.found()):
            session.exitstatus = OVER_BUDGET

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for folder, took, most in self.found():
            budget, over = "no budget" if most is None else str(most), is_over(took, most)
            words = f"{folder} took {took} turns of processor time, of {budget}"
            terminalreporter.write_line(words + ": over the budget" * over, red=over)

"""Threads that share a predictor, and processes that are forked while they use it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared import python

from confpred.concurrency import Recent, Remembered
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem

LAYER = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
THREADS = 8


def layers(count: int, first: int = 0) -> list[Problem]:
    return [replace(LAYER, n=2 + i % 50, h=30 + i // 50) for i in range(first, first + count)]


class Counting(Predictor):
    """Counts the problems that are worked out."""

    asked = 0

    def _answer_all(self, asked: Any) -> Any:
        self.asked += len(asked)
        return super()._answer_all(asked)


def ask(predictor: Predictor, shares: Sequence[Sequence[Problem]]) -> float:
    """Processor seconds of this process until each share was asked for by a thread of its own.

    Not the clock's: other work shares this machine, and may take a core at any moment.
    """
    start = time.process_time()
    with ThreadPoolExecutor(len(shares)) as threads:
        list(threads.map(lambda share: predictor.choose_many(share, "h100"), shares))
    return time.process_time() - start


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> Predictor:
    predictor = Predictor.load(model_folder)
    predictor.choose(LAYER, "h100")
    return predictor


def test_what_threads_ask_at_once_is_worked_out_once(loaded: Predictor) -> None:
    predictor = Counting(loaded.models)
    asked = layers(100)
    ask(predictor, [asked] * THREADS)
    assert predictor.asked == len(asked)
    assert predictor.choose_many(asked, "h100") == loaded.choose_many(asked, "h100")


def test_threads_do_distinct_work_once(loaded: Predictor) -> None:
    """Eight threads cost as much as one thread, and not the work of each other again."""
    alone, together = [], []
    for turn in range(3):
        asked = layers(80, 1000 * turn)
        alone.append(ask(Predictor(loaded.models), [asked]))
        predictor = Counting(loaded.models)
        together.append(ask(predictor, [asked[i::THREADS] for i in range(THREADS)]))
        assert predictor.asked == len(asked)
    assert min(together) < 2.5 * min(alone)


def test_who_fails_leaves_the_work_to_the_others() -> None:
    """Each thread gets an answer or an error of its own, and nobody waits for good."""
    tried: list[int] = []
    begun = threading.Barrier(THREADS)

    def find(asked: Sequence[str]) -> list[str]:
        tried.append(1)
        time.sleep(0.02)  # so that the others wait for this try
        if len(tried) < 3:
            raise OSError(*asked)
        return [each.upper() for each in asked]

    remembered = Remembered(find, 10)

    def work(_: int) -> str:
        begun.wait()
        try:
            return remembered("a")
        except OSError as error:
            return str(error)

    with ThreadPoolExecutor(THREADS) as threads:
        results = list(threads.map(work, range(THREADS), timeout=20))
    assert sorted(results) == ["A"] * (THREADS - 2) + ["a"] * 2
    assert len(tried) == 3


def test_many_are_found_in_one_call_and_shared_with_who_asks_for_one() -> None:
    calls: list[list[int]] = []

    def find(asked: Sequence[int]) -> list[int]:
        calls.append([*asked])
        return [-each for each in asked]

    remembered = Remembered(find, 10)
    assert remembered(3) == -3
    assert remembered.many([1, 2, 3, 2]) == [-1, -2, -3, -2]
    assert remembered.many([]) == []
    assert remembered(2) == -2
    assert calls == [[3], [1, 2]]


def test_threads_whose_many_overlap_wait_for_each_other_without_end() -> None:
    """Each has begun what the other one needs too."""
    begun = threading.Barrier(2)

    def find(asked: Sequence[int]) -> list[int]:
        begun.wait(20)
        return [-each for each in asked]

    remembered = Remembered(find, 10)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(remembered.many, [1, 2])
        while not remembered._under_way:
            time.sleep(0.001)
        second = threads.submit(remembered.many, [2, 3, 1])
        assert (first.result(20), second.result(20)) == ([-1, -2], [-2, -3, -1])


def test_recent_keeps_what_was_used_last() -> None:
    recent: Recent[int, int] = Recent(4)
    for i in range(1, 100):
        recent.put(i, -i)
        last = range(max(1, i - 3), i + 1)
        assert [recent.get(j) for j in last] == [-j for j in last]
        assert len(recent) <= 8
    assert recent.get(1) is None
    recent.clear()
    assert (recent.get(99), len(recent)) == (None, 0)


# Forks while other threads are at work; a child that takes half a minute hangs.
_FORKING = """
import os, sys, threading, time
from dataclasses import replace
from pathlib import Path
from confpred import Predictor, Problem

layer = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
{setup}
stop = threading.Event()
def keep_working(start):
    done = start
    while not stop.is_set():
        work(done)
        done += 1
threads = [threading.Thread(target=keep_working, args=(i * 10**6,)) for i in range({threads})]
for thread in threads:
    thread.start()
hung = 0
for turn in range({turns}):
    if hung:
        break
    time.sleep(0.003 * turn)
    child = os.fork()
    if child == 0:
        {child}
        os._exit(7)
    until = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            hung += 1
            os.kill(child, 9)
            os.waitpid(child, 0)
            break
        time.sleep(0.002)
stop.set()
for thread in threads:
    thread.join()
print(hung, "hung")
"""
_PREDICTING = """
predictor = Predictor.load(sys.argv[1])
def work(i):
    predictor.choose(replace(layer, n=1 + i % 50, h=31 + i // 50 % 1000), "h100")
"""


def forked(*arguments: Path, **parts: object) -> str:
    done = python("-c", _FORKING.format(**parts), *arguments)
    assert done.stderr == ""
    return done.stdout.strip()


def test_no_child_hangs_that_was_forked_while_a_thread_predicts(model_folder: Path) -> None:
    child = 'predictor.choose(replace(layer, k=320, n=2 + turn), "h100")'
    assert forked(model_folder, setup=_PREDICTING, threads=1, turns=8, child=child) == "0 hung"


def test_no_child_hangs_at_what_threads_are_working_out(model_folder: Path) -> None:
    """The child asks what its parent's threads are about to find, with models they are loading."""
    setup = """
def work(i):
    shared[:] = shared[-3:] + [Predictor.load(sys.argv[1])]
    shared[-1].choose(layer, "h100")
shared = []
work(0)
"""
    child = "[p.choose(replace(layer, n=3), 'h100') for p in list(shared)]"
    assert forked(model_folder, setup=setup, threads=3, turns=12, child=child) == "0 hung"


def test_a_forked_child_may_fork_again(model_folder: Path) -> None:
    child = (
        "grandchild = os.fork(); work(turn); "
        "os._exit(0) if grandchild == 0 else os.waitpid(grandchild, 0)"
    )
    assert forked(model_folder, setup=_PREDICTING, threads=2, turns=5, child=child) == "0 hung"


def test_no_child_hangs_at_a_property_that_a_thread_is_computing(repository: Path) -> None:
    """Before Python 3.12, that of `functools` has one lock for all objects of a class."""
    setup = """
from confpred.concurrency import cached_property
class Slow:
    @cached_property
    def value(self):
        time.sleep(0.01)
        return 1
def work(i):
    slow = Slow()
    assert slow.value is slow.value == 1
"""
    assert forked(setup=setup, threads=2, turns=4, child="work(0)") == "0 hung"
    texts = {path: path.read_text() for path in (repository / "confpred").rglob("*.py")}
    own = re.compile("from functools import .*cached_property")
    assert [path.name for path, text in texts.items() if own.search(text)] == ["concurrency.py"]


def test_a_process_ends_while_a_thread_of_its_predicts(model_folder: Path) -> None:
    program = f"""
import itertools, sys, threading, time
from dataclasses import replace
from confpred import Predictor, Problem
layer = Problem.parse("{LAYER}")
{_PREDICTING}
threading.Thread(target=lambda: [*map(work, itertools.count())], daemon=True).start()
time.sleep(0.3)
"""
    for _ in range(3):
        done = python("-c", program, model_folder)
        assert (done.returncode, done.stderr) == (0, "")

"""Parts of config tables, and several problems at once, give what one problem and the whole table
give, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from layers import multiplier
from random_layers import LARGE_WINDOWS, WINDOWS, problems

from confpred.families import common
from confpred.families.batch import ProblemBatch
from confpred.families.protocol import Batched
from confpred.families.registry import all_families
from confpred.families.table import Table, config_table, legal_among
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device

FAMILIES = [family for family in all_families().values() if isinstance(family, Batched)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("key", ["h100", "a100"])
def test_together_and_in_part_is_as_alone_and_whole(family, key):
    device, rng = get_device(key), np.random.default_rng(0)
    served: list[Problem] = []
    windows = LARGE_WINDOWS if "large" in family.name else WINDOWS
    for problem in problems(
        family.name.rpartition("_")[2], windows=windows, times=multiplier(family)
    ):
        if family.serves(problem):
            served.append(problem)
        else:
            assert not family.legal(problem, device).any()
        if len(served) == 75:
            break
    rows = np.sort(rng.choice(len(family.configs), len(family.configs) // 6, replace=False))
    table, some, seen = family.table(rows), set(rows.tolist()), 0
    for start in range(0, len(served), 25):
        few = served[start : start + 25]
        together, at, workings = family.offered(ProblemBatch(few), device, table)
        features = family.described(together, device, table, at, workings).T
        for i, problem in enumerate(few):
            legal = np.flatnonzero(family.legal(problem, device))
            legal = legal[[row in some for row in legal.tolist()]].astype(np.intp)
            mine = together.index == i
            assert rows[at[mine]].tolist() == legal.tolist(), str(problem)
            expected = family.features(problem, device, legal)
            assert features[mine].tobytes() == expected.tobytes(), str(problem)
            one, at_one, found = family.offered(ProblemBatch([problem]), device, table)
            assert rows[at_one].tolist() == legal.tolist(), str(problem)
            alone = family.described(one, device, table, at_one, found).T
            assert alone.tobytes() == expected.tobytes(), str(problem)
            seen += len(legal)
    assert seen > 400


@pytest.mark.parametrize("name", ["grouped_wgrad", "depthwise_fprop"])
@pytest.mark.parametrize("count", [3, 400])
def test_rows_of_many_problems_are_legal_as_those_of_one(name, count):
    family, device, rng = all_families()[name], get_device("h100"), np.random.default_rng(0)
    asked = [next(problems(d)) for d in ("fprop", "wgrad")]  # one of them is not served
    asked += [p for p, _ in zip(problems(name.rpartition("_")[2]), range(40), strict=False)]
    tables = [family.legal(problem, device) for problem in asked]
    rows = [np.sort(rng.integers(0, len(family.configs), count)) for _ in asked]
    for table, own in zip(tables, rows, strict=True):  # some of them are legal
        own[::2] = np.resize(np.flatnonzero(table) if table.any() else own, len(own[::2]))
        own.sort()
    found = legal_among(family, asked, rows, device)
    assert [f.tolist() for f in found] == [
        table[own].tolist() for table, own in zip(tables, rows, strict=True)
    ]
    assert np.concatenate(found).any()


@dataclass(frozen=True)
class _Half:
    high: int
    low: int


def _halves(problem: Problem) -> _Half:
    return _Half(problem.h // 2, problem.w // 2)


LAYER = Problem(2, 16, 8, 9, 16, 3, 3, padding=1)
LAYERS = [LAYER, replace(LAYER, h=20), replace(LAYER, h=30, stride=2, dtype="bfloat16")]


def test_what_differs_is_an_array_and_what_does_not_is_itself():
    several = ProblemBatch(LAYERS)
    assert several.h.tolist() == [[8], [20], [30]]
    assert several.n == 2
    stride_h, stride_w = several.stride
    assert stride_h.tolist() == stride_w.tolist() == [[1], [1], [2]]
    assert several.padding == (1, 1)
    assert (several.dtype == "float16").tolist() == [[True], [True], [False]]
    halves = several.map(_halves)
    assert (halves.high.tolist(), halves.low) == ([[4], [10], [15]], 4)
    view = several.at(np.array([0, 2, 2]))
    assert view.h.tolist() == [8, 30, 30]
    assert view.map(_halves).high.tolist() == [4, 15, 15]
    assert view.once(lambda p: p.h + p.n).tolist() == [10, 32, 32]
    with pytest.raises(AttributeError):
        _ = several.depth


def test_one_problem_keeps_its_numbers():
    one = ProblemBatch([LAYER])
    assert (one.h, one.stride, one.map(_halves)) == (8, (1, 1), _Half(4, 4))
    problem, rows = one.pairs(np.arange(3), np.array([True, False, True]))
    assert problem is one
    assert rows.tolist() == [0, 2]


def test_pairs_are_narrowed_problem_by_problem():
    several = ProblemBatch(LAYERS)
    rows = np.array([10, 20, 30])
    first, found = several.pairs(rows, several.h > np.array([5, 15, 25]))
    assert first.index.tolist() == [0, 1, 1, 2, 2, 2]
    assert found.tolist() == [10, 10, 20, 10, 20, 30]
    second, found = first.pairs(found, first.h + found > 40)
    assert (second.index.tolist(), found.tolist()) == ([2, 2], [20, 30])
    per_row = second.each_row(lambda p: p.h * np.arange(3), np.array([1, 2]))
    assert per_row.tolist() == [30, 60]
    none, found = several.pairs(rows, np.zeros(3, np.bool_))
    assert not len(found)
    assert not len(none.h)


def test_a_part_of_them_is_of_those():
    several = ProblemBatch(LAYERS)
    assert several.part([0, 1, 2]) is several
    assert several.part([2]).h == 30
    assert several.part([0, 2]).h.tolist() == [[8], [30]]


def test_rules_are_asked_once_for_each_kind_of_row():
    configs = config_table(("a", "b"), [(1, 5), (2, 5), (1, 6), (2, 6), (1, 5)])
    table = Table.of(configs)
    asked = []

    def rule(t):
        asked.append(t["a"].tolist())
        return t["a"] == 1

    assert table.by(("a",), rule).tolist() == [True, False, True, False, True]
    assert asked == [[1, 2]]
    both = table.by(("a", "b"), lambda t: t["a"] + t["b"] == 7)
    assert both.tolist() == [False, True, True, False, False]
    limits = np.array([[5], [6]])
    assert table.by(("b",), lambda t: t["b"] <= limits).tolist() == [
        [True, True, False, False, True],
        [True] * 5,
    ]


@pytest.mark.parametrize("size", range(-3, 12))
@pytest.mark.parametrize("piece", range(1, 6))
def test_pieces_are_rounded_up(size, piece):
    assert common.ceil_div(size, piece) == -(-size // piece)
    assert common.ceil_div(np.array([size]), piece).tolist() == [-(-size // piece)]


def test_pieces_of_large_arrays_are_rounded_up_without_an_error():
    """As far as integers are floats too: what divides evenly, and what is one off."""
    rng = np.random.default_rng(0)
    piece = rng.integers(1, 2**20, 10_000)
    even = piece * rng.integers(1, 2**32, len(piece))
    for size in (even - 1, even, even + 1):
        assert common.ceil_div(size, piece).tolist() == (-(-size // piece)).tolist()

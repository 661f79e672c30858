"""No layer of a held-out network is ever trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confpred.errors import DataError, InvalidInput
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.training.cross_validate import part_of, split_by_network
from confpred.training.dataset import Timings, read_dataset

LAYERS = ((64, "a"), (128, "b"), (192, "b"))
OF_NO_NETWORK = (256, 14, 1, "float16", "none", False, frozenset())


def _problem_of(entry):  # no lambda, whose text hypothesis takes for a regular expression
    return entry[:-1]


# Few distinct layers, so that networks share them and coverage problems repeat them.
entries = st.lists(
    st.tuples(
        st.sampled_from((64, 128, 192)),
        st.sampled_from((7, 14)),
        st.sampled_from((1, 32)),
        st.sampled_from(("float16", "bfloat16")),
        st.sampled_from(("none", "relu")),
        st.booleans(),
        st.sets(st.sampled_from("abcdef"), max_size=3),
    ),
    min_size=1,
    max_size=40,
    unique_by=_problem_of,
)


def timings_of(drawn) -> list[Timings]:
    one = np.ones(1)
    return [
        Timings(
            Problem(n, c, h, h, c, 3, 3, groups=8, dtype=dtype, activation=act, bias=bias),
            tuple(sorted(names)),
            "grouped_fprop",
            np.zeros(1, np.intp),
            one,
            one,
            get_device("h100"),
        )
        for c, h, n, dtype, act, bias, names in drawn
    ]


SIXTY = timings_of(
    (64 * (i + 1), 14, 1, "float16", "none", False, {f"net{i % 12}"}) for i in range(60)
)


def layer(p: Problem) -> tuple[object, ...]:
    """The key of problems that differ only in batch size, dtype and epilogue."""
    sizes = (p.c, p.h, p.w, p.k, p.r, p.s)
    return (*sizes, p.stride, p.padding, p.dilation, p.groups, p.direction)


@given(entries, st.integers(2, 8), st.integers(0, 5))
def test_nothing_leaks(drawn, folds, seed):
    timings = timings_of(drawn)
    networks = {t.networks[0] for t in timings if t.networks}
    if len(networks) < 2:
        with pytest.raises(DataError, match="at least 2 networks"):
            split_by_network(timings, folds, seed)
        return
    try:
        split = split_by_network(timings, folds, seed)
    except DataError:  # nothing is left to learn from, so no layer is of no network
        assert {layer(t.problem) for t in timings} == {
            layer(t.problem) for t in timings if t.networks
        }
        return
    assert sorted(name for fold in split for name in fold.networks) == sorted(networks)
    judged = [t.problem for fold in split for t in fold.test]
    assert len(set(judged)) == len(judged)
    assert set(judged) <= {t.problem for t in timings if t.networks}
    for fold in split:
        held_out = [t for t in timings if set(t.networks) & set(fold.networks)]
        first = [t.problem for t in held_out if t.networks[0] in fold.networks]
        assert {t.problem for t in fold.test} == (set(first) if fold.train else set())
        hidden = {layer(t.problem) for t in held_out}
        # Exactly the hidden layers are missing: no leak, and nothing is thrown away.
        kept = [t.problem for t in timings if layer(t.problem) not in hidden]
        assert [t.problem for t in fold.train] == kept


def test_a_fold_judges_only_families_that_it_learns() -> None:
    found = [
        replace(t, family=family)
        for t, family in zip(
            timings_of((c, 14, 1, "float16", "none", False, {n}) for c, n in LAYERS),
            ("grouped_fprop", "grouped_fprop", "depthwise_fprop"),
            strict=True,
        )
    ]
    split = split_by_network(found, 2, 0)
    assert {f.networks: f.test for f in split} == {("a",): (found[0],), ("b",): (found[1],)}
    alone = [found[0], found[2]]
    with pytest.raises(DataError, match="a family that problems of 2 networks have"):
        split_by_network(alone, 2, 0)
    # Another device's are learned from where their problem was measured here, too.
    elsewhere = {"family": "depthwise_fprop", "device": get_device("h200")}
    split = split_by_network(alone, 2, 0, [replace(found[0], **elsewhere)])
    assert [t for f in split for t in f.test] == [found[2]]
    (other,) = timings_of([OF_NO_NETWORK])
    with pytest.raises(DataError, match="a family that problems of 2 networks have"):
        split_by_network(alone, 2, 0, [replace(other, **elsewhere)])


def test_folds_are_of_about_one_size():
    assert [len(f.test) for f in split_by_network(SIXTY, 4, 0)] == [15] * 4


def test_another_seed_gives_another_split():
    splits = [tuple(f.networks for f in split_by_network(SIXTY, 4, s)) for s in (0, 1, 2, 3, 0)]
    assert len(set(splits)) == 4
    assert splits[0] == splits[4]


def test_a_part_has_the_families_and_the_number_of_problems_asked_for(measurements):
    dataset = read_dataset([measurements])
    other = tuple(replace(t, family="depthwise_fprop") for t in dataset.timings[::2])
    dataset = replace(dataset, timings=dataset.timings[1::2] + other)
    assert part_of(dataset, (), None, 0) is dataset
    of_family = part_of(dataset, ["depthwise_fprop"], None, 0)
    assert of_family.timings == other
    assert of_family.pytorch_ms.keys() == {t.problem for t in other}
    few = part_of(dataset, ["depthwise_fprop"], 5, 0)
    assert len(few.timings) == 5
    assert set(few.timings) <= set(other)
    assert few.digest == part_of(dataset, ["depthwise_fprop"], 5, 0).digest
    assert few.digest != part_of(dataset, ["depthwise_fprop"], 5, 1).digest
    with pytest.raises(InvalidInput, match=r"allowed: grouped_fprop$"):
        part_of(dataset, ["grouped_wgrad"], None, 0)

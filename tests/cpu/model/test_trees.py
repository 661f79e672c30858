"""The C API answers as LightGBM's own Python package does, to the bit."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import lightgbm
import numpy as np
import pytest

from confpred.errors import ModelError
from confpred.model.trees import Trees, _library
from confpred.training.fit import text_of

FEATURES = 7


@pytest.fixture(scope="module")
def booster() -> lightgbm.Booster:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, FEATURES))
    y = x[:, 0] * x[:, 1] + np.sin(x[:, 2])
    parameters = {"objective": "regression", "num_leaves": 31, "verbosity": -1, "num_threads": 1}
    return lightgbm.train(parameters, lightgbm.Dataset(x, y), 50)


@pytest.fixture(scope="module")
def trees(booster: lightgbm.Booster) -> Trees:
    found = Trees(booster.model_to_string())
    assert found.features == tuple(booster.feature_name())
    return found


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(500, FEATURES)).astype(np.float32)


@pytest.mark.parametrize("rows", [0, 1, 17, 500])
@pytest.mark.parametrize(
    ("first", "end"), [(0, 1), (0, 20), (0, 50), (0, None), (1, 5), (20, 50), (20, None), (49, 60)]
)
def test_equals_lightgbm(booster, trees, matrix, rows, first, end):
    count = -1 if end is None else end - first
    expected = (
        booster.predict(matrix[:rows], start_iteration=first, num_iteration=count) if rows else []
    )
    assert trees.predict(matrix[:rows], first, end).tolist() == list(expected)


def test_trees_that_are_not_there_add_nothing(trees, matrix):
    assert not trees.predict(matrix, 50).any()
    assert trees.predict(matrix[:3], 0, 80).tolist() == trees.predict(matrix[:3]).tolist()


def test_layout_of_the_matrix_does_not_matter(trees, matrix):
    expected = trees.predict(matrix).tolist()
    assert trees.predict(np.asfortranarray(matrix)).tolist() == expected
    assert trees.predict(np.repeat(matrix, 2, axis=0)[::2]).tolist() == expected


@pytest.mark.parametrize("shape", [(3, FEATURES - 1), (3, FEATURES + 1), (FEATURES,)])
def test_a_matrix_of_another_width_is_refused(trees, shape):
    with pytest.raises(ModelError, match="takes 7 features a row"):
        trees.predict(np.zeros(shape, np.float32))


@pytest.mark.parametrize("text", ["", "foreign", "tree\nversion=v4\n"])
def test_foreign_text_is_refused(text):
    with pytest.raises(ModelError, match="not LightGBM's text form"):
        Trees(text)


def test_a_text_that_lightgbm_refuses_is_refused_whenever_it_is_asked(booster, matrix):
    text = booster.model_to_string().replace("feature_infos=", "infos=")
    trees = Trees(text)
    for _ in range(2):
        with pytest.raises(ModelError, match="LightGBM: "):
            trees.predict(matrix)


def test_threads_may_be_the_first_to_ask(booster, trees, matrix):
    expected = trees.predict(matrix).tolist()
    for _ in range(20):
        fresh = Trees(booster.model_to_string())
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _, t=fresh: t.predict(matrix).tolist(), range(8)))
        assert answers == [expected] * 8


def test_parsing_leaves_lightgbms_number_of_threads_as_it_was(booster, matrix):
    def most() -> int:
        found = ctypes.c_int()
        _library().LGBM_GetMaxThreads(ctypes.byref(found))
        return found.value

    before = most()
    fresh = [Trees(booster.model_to_string()) for _ in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda trees: trees.predict(matrix, 0, 20), fresh))
    assert most() == before


def test_training_keeps_what_predictions_need(matrix):
    """`text_of` leaves out most of LightGBM's text; the answers are those of the whole, but for the
    digits of what leaves say."""
    rng = np.random.default_rng(2)
    label = matrix[:, 0] * matrix[:, 1] + rng.normal(size=len(matrix))
    grown = lightgbm.LGBMRegressor(
        n_estimators=30, num_leaves=15, min_child_samples=5, n_jobs=1, verbosity=-1
    ).fit(matrix, label)
    whole, text = grown.booster_, text_of(grown)
    kept = lightgbm.Booster(model_str=text)
    leaves = (each.predict(matrix, pred_leaf=True).tolist() for each in (kept, whole))
    assert next(leaves) == next(leaves)
    assert Trees(text).predict(matrix).tolist() == kept.predict(matrix).tolist()
    assert kept.predict(matrix) == pytest.approx(whole.predict(matrix), rel=0, abs=30 * 0.5e-5)
    assert len(text) < 0.5 * len(whole.model_to_string())


def test_an_ensemble_goes_on_with_a_multiple_of_another(matrix):
    """As the trees that rank follow those that order."""
    rng = np.random.default_rng(3)
    first, other = (
        lightgbm.LGBMRegressor(n_estimators=trees, min_child_samples=5, n_jobs=1, verbosity=-1).fit(
            matrix, matrix[:, column] + rng.normal(size=len(matrix))
        )
        for column, trees in enumerate((20, 10))
    )
    both = Trees(text_of(first, (other, -0.5)))
    parts = [each.booster_.predict(matrix) for each in (first, other)]
    expected = parts[0] - 0.5 * parts[1]
    assert both.predict(matrix) == pytest.approx(expected, rel=0, abs=30 * 0.5e-5)
    alone = both.predict(matrix, 0, 20)
    assert alone == pytest.approx(parts[0], rel=0, abs=20 * 0.5e-5)


def test_threads_may_ask_for_other_numbers_of_trees(trees, matrix):
    """LightGBM keeps the number in the booster, where a call beside this one would change it."""
    parts = ((0, 1), (0, 25), (25, None), (0, None))
    expected = {part: trees.predict(matrix, *part) for part in parts}

    def ask(index: int) -> bool:
        part, rows = parts[index % len(parts)], 8 if index % 3 else len(matrix)
        return np.array_equal(trees.predict(matrix[:rows], *part), expected[part][:rows])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(900)))


def replaced(text: str, field: str, place: int, value: str) -> str:
    """`text` with another value in a field of its first tree."""
    line = next(line for line in text.splitlines() if line.startswith(f"{field}="))
    values = line.partition("=")[2].split(" ")
    values[place] = value
    return text.replace(line, f"{field}={' '.join(values)}", 1)


@pytest.mark.parametrize(
    ("field", "place", "value", "allowed"),
    [
        ("split_feature", 3, "99999", "0 to 6"),
        ("split_feature", 0, "7", "0 to 6"),
        ("split_feature", 0, "-1", "0 to 6"),
        ("left_child", 0, "0", "a later split or a leaf of the tree"),  # an endless loop
        ("left_child", 2, "30", "a later split or a leaf of the tree"),
        ("right_child", 2, "-32", "a later split or a leaf of the tree"),
        ("decision_type", 1, "1", "an even number"),
        ("num_leaves", 0, "32", "a number for each of the tree's splits or leaves"),
        ("num_leaves", 0, "0", "1 or more"),
        ("threshold", 0, "1 2", "a number for each of the tree's splits or leaves"),
        ("leaf_value", 0, "1 2", "a number for each of the tree's splits or leaves"),
        ("num_cat", 0, "1", "0"),
        ("is_linear", 0, "1", "0"),
    ],
)
def test_trees_that_lead_nowhere_are_refused(booster, matrix, field, place, value, allowed):
    trees = Trees(replaced(booster.model_to_string(), field, place, value), "here.txt")
    with pytest.raises(ModelError, match=rf"here\.txt is damaged: tree 0 has a \w+ .* {allowed}$"):
        trees.predict(matrix, 0, 10)
    with pytest.raises(ModelError, match=r"here\.txt is damaged: tree 0 has a"):
        trees.check()
    assert len(trees.predict(matrix, 1, 10)) == len(matrix)  # the part is sound


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("num_class=1\n", "num_class=9\n", "needs num_class=1"),
        ("num_tree_per_iteration=1\n", "num_tree_per_iteration=9\n", "num_tree_per_iteration=1"),
        ("max_feature_idx=6\n", "max_feature_idx=5\n", "needs max_feature_idx=6"),
        ("num_class=1\n", "num_class=1\nnum_class=9\n", "has num_class=1 and num_class=9"),
        ("num_leaves=31\n", "num_leaves=31\nnum_leaves=99\n", "num_leaves"),
        ("\nend of trees\n", "\n", "no end of trees"),
        ("left_child=", "left_child=1-", "left_child of the trees has not 60 integers"),
        ("left_child=", "left_child=one", "left_child of the trees has not 60 integers"),
        ("right_child=", "other_child=", "not all trees have other_child at one position"),
    ],
)
def test_a_text_of_another_form_is_refused(booster, matrix, before, after, reason):
    text = booster.model_to_string(num_iteration=2)
    assert before in text
    with pytest.raises(ModelError, match=reason):
        Trees(text.replace(before, after, 1)).predict(matrix)


def test_lengths_of_trees_are_not_trusted(booster, matrix):
    text = booster.model_to_string()
    sizes = next(line for line in text.splitlines() if line.startswith("tree_sizes="))
    other = Trees(text.replace(sizes, "tree_sizes=" + " ".join(["99999999"] * 50)))
    assert other.predict(matrix).tolist() == booster.predict(matrix).tolist()

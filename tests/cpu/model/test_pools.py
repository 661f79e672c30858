"""Families with one config table learn from each other, and keep their own answers apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from confpred.families.registry import all_families
from confpred.model.features import Pool, pools
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.training.cross_validate import family_models
from confpred.training.dataset import Timings
from confpred.training.fit import fit_families

FPROP, DGRAD = (all_families()[f"depthwise_{direction}"] for direction in ("fprop", "dgrad"))
LAYER = Problem(32, 96, 28, 28, 96, 3, 3, padding=1, groups=96)
PROBLEMS = {FPROP: LAYER, DGRAD: replace(LAYER, direction="dgrad")}


def rows_of(family, problem=None):
    legal = np.flatnonzero(family.legal(problem or PROBLEMS[family], synthetic.DEVICE))
    return legal[:: max(1, len(legal) // 40)]


def test_families_are_together_if_their_config_tables_are_the_same():
    found = pools(all_families().values())
    names = {family.name: pool.name for pool in found for family in pool.families}
    assert set(names) == set(all_families())
    assert names["depthwise_fprop"] == names["depthwise_dgrad"]
    assert names["grouped_fprop"] == names["grouped_dgrad"]
    assert names["depthwise_fprop"] != names["grouped_fprop"]
    assert names["depthwise_wgrad"] == "depthwise_wgrad"


def test_the_order_of_families_does_not_matter():
    first, second = Pool([FPROP, DGRAD]), Pool([DGRAD, FPROP])
    assert first.name == second.name == "depthwise_dgrad+depthwise_fprop"
    assert first.feature_names == second.feature_names


@pytest.mark.parametrize("family", [FPROP, DGRAD])
def test_each_family_fills_the_columns_that_it_has(family):
    pool = Pool([FPROP, DGRAD])
    rows = rows_of(family)
    matrix = pool.features(family, PROBLEMS[family], synthetic.DEVICE, rows)
    own = family.features(PROBLEMS[family], synthetic.DEVICE, rows)
    assert matrix.dtype == np.float32
    columns = dict(zip(pool.feature_names, matrix.T, strict=True))
    for name, column in zip(family.feature_names, own.T, strict=True):
        assert np.array_equal(columns.pop(name), column), name
    assert set(columns.pop("pool_member")) == {pool.families.index(family)}
    assert len(set(columns.pop("log_device_bandwidth"))) == 1
    assert all(np.isnan(column).all() for column in columns.values())


def test_a_family_alone_is_its_own_pool():
    pool = Pool([FPROP])
    rows = rows_of(FPROP)
    matrix = pool.features(FPROP, LAYER, synthetic.DEVICE, rows)
    assert pool.feature_names == (*FPROP.feature_names, "log_device_bandwidth")
    assert np.array_equal(matrix[:, :-1], FPROP.features(LAYER, synthetic.DEVICE, rows))
    assert len(np.unique(matrix[:, -1])) == 1


def test_a_pool_tells_devices_apart():
    pool = Pool([FPROP])
    h100, h200 = (
        pool.features(FPROP, LAYER, get_device(key), rows_of(FPROP))[:, -1]
        for key in ("h100", "h200")
    )
    assert (h100 < h200).all()


def test_families_of_a_pool_share_trees_that_tell_them_apart():
    """Forward wide vectors are fast, backward narrow ones: each gets its own answer."""
    timings = []
    for family, sign in ((FPROP, 1), (DGRAD, -1)):
        for n in range(8, 40):
            problem = replace(PROBLEMS[family], n=n)
            rows = rows_of(family, problem)
            ms = 2.0 - sign * 0.2 * np.log2(family.configs["vec"][rows])
            timings.append(Timings(problem, ("net",), family.name, rows, ms, ms, synthetic.DEVICE))
    models = family_models(fit_families(timings, synthetic.DEVICE, synthetic.SMALL, 0))
    assert models[FPROP.name].order is models[DGRAD.name].order
    for family, best in ((FPROP, max), (DGRAD, min)):
        problem = replace(PROBLEMS[family], n=20, h=29)
        rows = rows_of(family, problem)
        ranked, _ = models[family.name].rank(problem, synthetic.DEVICE, rows)
        assert family.configs["vec"][ranked[0]] == best(family.configs["vec"][rows])

"""Every family of convolution of volumes, depthwise or dense, keeps these."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from layers import DENSE_VOLUMES, H100, VOLUMES, random_legal_conv
from volume_layers import (
    DENSE,
    DEPTHWISE,
    FAMILIES,
    NOT_DENSE,
    NOT_DEPTHWISE,
    legal_rows,
    parsed,
)

from confpred.families.protocol import Family, config_dict
from confpred.families.registry import families_of, family_named
from confpred.problem.device import KNOWN

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
#: Features of all convolutions that are the same for all these, and for dense ones.
SAME = {"direction", "rank", "channels_first", "deterministic", "activation", "residual"}
SAME_OF_DENSE = {"groups", "log_groups", *(f"dilation_{axis}" for axis in "dhw")}


def each(depthwise: tuple[str, ...], dense: tuple[str, ...]) -> pytest.MarkDecorator:
    """Return a mark that gives each family the layers of its kind."""
    kinds = (VOLUMES, depthwise), (DENSE_VOLUMES, dense)
    pairs = [(family, words) for kind, all_words in kinds for family in kind for words in all_words]
    return pytest.mark.parametrize(("name", "words"), pairs)


@every_family
def test_a_family_is_found_by_name_and_problem(family: Family) -> None:
    assert family_named(family.name) is family
    assert families_of(parsed(family, ""))[family.name] is family
    assert len(np.unique(family.configs)) == len(family.configs)
    assert len(family.configs) <= (2300 if family.name in DENSE_VOLUMES else 2200)
    assert len(set(family.feature_names)) == len(family.feature_names)


@each(NOT_DEPTHWISE, NOT_DENSE)
def test_other_layers_have_no_configs(name: str, words: str) -> None:
    family = FAMILIES[name]
    assert not family.legal(parsed(family, words), H100).any()


@every_family
def test_other_directions_have_no_configs(family: Family) -> None:
    problem = parsed(family, "")
    for direction in {"fprop", "dgrad", "wgrad"} - {problem.direction}:
        assert not family.legal(parsed(family, f"direction={direction}"), H100).any()


@each((*DEPTHWISE, "c=192 k=192 groups=192 d=9 h=30 w=50"), DENSE)
def test_no_two_configs_of_a_layer_are_the_same_launch(name: str, words: str) -> None:
    family = FAMILIES[name]
    problem = parsed(family, words)
    seen: dict[object, int] = {}
    for row in legal_rows(family, problem):
        steps = family.launch(problem, row).steps
        key = tuple((s.kernel, s.grid, s.block, tuple(s.scalars.items())) for s in steps)
        assert key not in seen, (config_dict(family, row), config_dict(family, seen[key]))
        seen[key] = row


@every_family
def test_features_and_estimates_are_finite_and_no_promise(family: Family) -> None:
    rng = random.Random(family.name)
    matrices = []
    for device in KNOWN.values():
        problem = replace(random_legal_conv(rng, family, device), n=rng.choice((1, 64)))
        rows = np.flatnonzero(family.legal(problem, device))
        matrix = family.features(problem, device, rows)
        assert matrix.shape == (len(rows), len(family.feature_names))
        assert matrix.dtype == np.float32
        assert np.isfinite(matrix).all()
        assert (family.estimate_s(problem, device, rows) >= device.roofline_s(problem)).all()
        some = rng.sample(range(len(rows)), min(5, len(rows)))
        assert np.array_equal(family.features(problem, device, rows[some]), matrix[some])
        matrices.append(matrix)
    spans = np.ptp(np.concatenate(matrices), axis=0)
    constant = {n for n, span in zip(family.feature_names, spans, strict=True) if not span}
    assert constant <= SAME | (SAME_OF_DENSE if family.name in DENSE_VOLUMES else {"group_width"})

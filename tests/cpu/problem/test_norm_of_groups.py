"""Norms over groups as a problem and an operation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from layers import GROUP_NORMS, random_group_norm
from norms import expected, inputs_of

from confpred.errors import InvalidProblem
from confpred.families.registry import operation_named, operation_of
from confpred.problem.device import get_device
from confpred.problem.norm import DIRECTIONS
from confpred.problem.norm_of_groups import NORM, Norm

LAYER = Norm(2, 4096, 320, 32, activation="silu")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("n=65536 p=65536 c=8", "n"),
        ("n=2 p=4 c=8 groups=3", "groups"),
        ("n=2 p=4 c=8 activation=tanh", "activation"),
        ("n=2 p=4 c=8 direction=backward residual=true", "residual"),
        ("n=2 p=4 c=8 dtype=half weights=bfloat16", "weights"),
        ("n=2 p=4 c=8 affine=none adaptive=true", "affine"),
        ("n=2 p=4 c=8 affine=none weights=float16", "affine"),
        ("n=2 p=4 c=8 centred=false", "centred"),
    ],
)
def test_senseless_layers_are_refused(words: str, field: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        Norm.parse(words)
    assert caught.value.field == field


def test_it_is_an_operation_that_files_can_name() -> None:
    assert operation_named("norm") is operation_of(LAYER) is NORM
    assert Norm.parse(str(LAYER)) == LAYER == Norm.from_json(LAYER.to_json())


@pytest.mark.parametrize(
    ("sizes", "grouping"),
    [
        ({"p": 64, "c": 32, "groups": 8}, "group norm"),
        ({"p": 64, "c": 32, "groups": 1}, "group norm"),
        ({"p": 64, "c": 32, "groups": 32}, "instance norm"),
        ({"p": 1, "c": 32, "groups": 32}, "group norm"),  # an instance norm of a pixel is refused
        ({"p": 1, "c": 32}, "layer norm"),
        ({"p": 1, "c": 32, "centred": False}, "RMS norm"),
    ],
)
def test_norms_have_their_names(sizes: Any, grouping: str) -> None:
    assert Norm(4, **sizes).grouping == grouping


@pytest.mark.parametrize(
    ("fields", "tensors", "passes"),
    [
        ({}, 2, 3),
        ({"residual": True}, 3, 4),
        ({"direction": "backward"}, 3, 5),
        ({"direction": "backward", "residual": True}, 5, 7),
        ({"n": 8192, "p": 1, "groups": 1}, 2, 2),
    ],
)
def test_bytes_are_those_of_the_passes(fields: Any, tensors: int, passes: int) -> None:
    layer = Norm(**LAYER.to_json() | fields)
    assert (layer.tensors, layer.passes) == (tensors, passes)
    images = [o for o in NORM.operands(layer) if len(o.shape) == 3]
    assert len(images) == tensors
    assert sum(o.bytes for o in NORM.operands(layer)) == pytest.approx(layer.minimum_bytes, abs=4)


def test_layers_of_one_design_are_held_out_together() -> None:
    other = Norm(8, 4096, 320, 32, "float32", "relu", direction="backward")
    assert other.layer() == LAYER.layer() != Norm(2, 1024, 320, 32).layer()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_features_have_their_names(direction: str) -> None:
    (row,) = NORM.features(Norm(**LAYER.to_json() | {"direction": direction}), get_device("h100"))
    assert row.dtype == np.float32
    named = dict(zip(NORM.feature_names, row.tolist(), strict=True))
    assert named["backward"] == (direction == "backward")
    assert (named["log_pixels"], named["log_groups"]) == (12, 5)


@pytest.mark.parametrize("name", GROUP_NORMS)
def test_pytorchs_operators_compute_it(name: str) -> None:
    """Those that are timed beside the kernels, of every kind of norm."""
    rng = random.Random(name)
    for seed in range(12):
        problem = random_group_norm(rng, GROUP_NORMS[name], 12_000)
        if problem.is_backward and not problem.centred:
            continue  # PyTorch has no such gradient on a CPU
        problem = Norm(**problem.to_json() | {"dtype": "float32", "weights": "float32"})
        inputs = inputs_of(problem, seed)
        found = NORM.pytorch(problem, inputs)
        right = expected(problem, inputs)
        outputs = [
            o for o in NORM.operands(problem) if o.terms and o.name not in ("mean", "invstd")
        ]
        found = found if problem.is_backward else (found,)
        for output, tensor in zip(outputs, found, strict=True):
            tensor = tensor if tensor.shape == output.shape else tensor.permute(0, 2, 1)
            apart = (tensor.double() - right[output.name]).norm()
            assert apart < 3e-5 * right[output.name].norm(), (problem, output.name)


@pytest.mark.parametrize("weights", ["float16", "float32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_precision_is_as_networks_have_it(direction: str, weights: str) -> None:
    """By itself, or under autocast in float32 and back."""
    problem = Norm(2, 30, 24, 4, direction=direction, weights=weights, activation="silu")
    inputs = inputs_of(problem, 0)
    found, right = NORM.pytorch(problem, inputs), expected(problem, inputs)
    found = found if problem.is_backward else (found,)
    for output, tensor in zip([o for o in NORM.operands(problem) if o.terms], found, strict=False):
        assert str(tensor.dtype) == f"torch.{output.dtype}"
        tensor = tensor if tensor.shape == output.shape else tensor.permute(0, 2, 1)
        assert (tensor - right[output.name]).norm() < 4e-3 * right[output.name].norm()

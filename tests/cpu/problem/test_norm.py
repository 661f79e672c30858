"""Batch norm as a problem and an operation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from norms import expected, inputs_of

from confpred.errors import InvalidProblem
from confpred.families.registry import operation_named, operation_of
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.device import get_device
from confpred.problem.norm import BATCH_NORM, DIRECTIONS, BatchNorm

LAYER = BatchNorm(32, 56, 56, 64, activation="relu")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("n=1 h=1 w=1 c=8", "n"),
        ("n=65536 h=65536 w=1 c=8", "n"),
        ("n=2 h=1 w=1 c=0", "c"),
        ("n=2 h=1 w=1 c=8 activation=tanh", "activation"),
        ("n=2 h=1 w=1 c=8 direction=fprop", "direction"),
        ("n=2 h=1 w=1 c=8 direction=backward residual=true", "residual"),
    ],
)
def test_senseless_layers_are_refused(words: str, field: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        BatchNorm.parse(words)
    assert caught.value.field == field


def test_one_row_is_enough_where_statistics_are_known() -> None:
    assert BatchNorm(1, 1, 1, 8, frozen=True).rows == 1


def test_it_is_an_operation_that_files_can_name() -> None:
    assert operation_named("batch_norm") is operation_of(LAYER) is BATCH_NORM
    assert BatchNorm.parse(str(LAYER)) == LAYER == BatchNorm.from_json(LAYER.to_json())


@pytest.mark.parametrize(
    ("fields", "tensors", "passes"),
    [
        ({}, 2, 3),
        ({"residual": True}, 3, 4),
        ({"frozen": True}, 2, 2),
        ({"direction": "backward"}, 3, 5),
        ({"direction": "backward", "residual": True}, 5, 7),
        ({"direction": "backward", "frozen": True}, 3, 3),
    ],
)
def test_bytes_are_those_of_the_passes(fields: dict, tensors: int, passes: int) -> None:
    layer = BatchNorm(32, 56, 56, 64, activation="relu", **fields)
    assert (layer.tensors, layer.passes) == (tensors, passes)
    images = [o for o in BATCH_NORM.operands(layer) if len(o.shape) == 4]
    assert len(images) == tensors
    assert sum(o.bytes for o in images) == tensors * layer.tensor_bytes < layer.minimum_bytes


def test_layers_of_one_design_are_held_out_together() -> None:
    other = BatchNorm(8, 56, 56, 64, "float32", "silu", True, "backward")
    assert other.layer() == LAYER.layer() != BatchNorm(32, 28, 28, 64).layer()
    assert (other.grouping, other.kind) == ("norm", "backward norm")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_features_have_their_names(direction: str) -> None:
    layer = BatchNorm(32, 56, 56, 64, direction=direction)
    (row,) = BATCH_NORM.features(layer, get_device("h100"))
    assert row.dtype == np.float32
    named = dict(zip(BATCH_NORM.feature_names, row.tolist(), strict=True))
    assert named["backward"] == (direction == "backward")
    assert named["log_channels"] == 6


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pytorchs_operators_compute_the_operation(
    direction: str, activation: str, frozen: bool
) -> None:
    sizes, residual, affine = (3, 4, 5, 6), activation != "none", activation != "relu"
    layer = BatchNorm(*sizes, "float32", activation, residual, direction, affine, frozen)
    inputs = inputs_of(layer, 0)
    right = expected(layer, inputs)
    found = BATCH_NORM.pytorch(layer, {name: x.clone() for name, x in inputs.items()})
    found = found if isinstance(found, tuple) else (found,)
    images = [name for name in right if name not in ("mean", "invstd") and "new" not in name]
    order = ("out", "in_grad", "residual_grad", "weight_grad", "bias_grad")
    assert len(found) == len(images)
    for name, result in zip((n for n in order if n in images), found, strict=True):
        result = result.permute(0, 2, 3, 1) if result.dim() == 4 else result
        torch.testing.assert_close(result.double(), right[name], rtol=1e-4, atol=1e-4)


def test_running_statistics_are_updated_as_pytorch_does() -> None:
    layer = BatchNorm(3, 4, 5, 6, "float32")
    inputs = inputs_of(layer, 0)
    right = expected(layer, inputs)
    BATCH_NORM.pytorch(layer, inputs)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(inputs[name].double(), right[f"new_{name}"])


def test_backward_is_prepared_outside_of_its_time() -> None:
    layer = BatchNorm(3, 4, 5, 6, "float32", "relu", direction="backward")
    inputs = inputs_of(layer, 0)
    prepared = BATCH_NORM.prepared(layer, inputs)
    assert prepared.keys() > inputs.keys()
    first, again = (BATCH_NORM.pytorch(layer, t) for t in (inputs, prepared))
    assert all(map(torch.equal, first, again))
    forward = inputs_of(LAYER.layer(), 0)
    assert BATCH_NORM.prepared(LAYER.layer(), forward) == forward

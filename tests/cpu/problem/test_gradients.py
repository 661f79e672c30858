"""Both gradients of a convolution as one problem, and its operation."""

from __future__ import annotations

import pytest
import torch
from references import outside, random_inputs, reference

from confpred.errors import InvalidProblem
from confpred.families.registry import families_of, kernels_of, operation_named, operation_of
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import get_device
from confpred.problem.gradients import GRADIENTS, Gradients

LAYER = Gradients(4, 24, 14, 15, 24, 3, 5, padding=(1, 2), groups=24, bias=True)


def test_it_is_an_operation_that_files_can_name() -> None:
    assert operation_named("conv2d_gradients") is operation_of(LAYER) is GRADIENTS
    assert Gradients.parse(str(LAYER)) == LAYER == Gradients.from_json(LAYER.to_json())
    assert set(kernels_of(LAYER)) == {"depthwise_both", "depthwise_banded_both"}
    for direction in ("dgrad", "wgrad"):
        assert not set(families_of(LAYER)) & set(families_of(LAYER.apart(direction)))


@pytest.mark.parametrize("words", ["direction=dgrad", "activation=relu", "residual=true"])
def test_senseless_layers_are_refused(words: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        Gradients.parse(f"n=4 c=8 h=9 w=9 k=8 r=3 s=3 {words}")
    assert caught.value.field == words.partition("=")[0]
    with pytest.raises(InvalidProblem):
        Problem.parse("n=4 c=8 h=9 w=9 k=8 r=3 s=3 direction=both")


def test_apart_it_is_the_two_convolutions() -> None:
    sizes = {"padding": (1, 2), "groups": 24}
    dgrad = Problem(4, 24, 14, 15, 24, 3, 5, direction="dgrad", **sizes)
    wgrad = Problem(4, 24, 14, 15, 24, 3, 5, direction="wgrad", bias=True, **sizes)
    assert (LAYER.apart("dgrad"), LAYER.apart("wgrad")) == (dgrad, wgrad)
    assert LAYER.flops == dgrad.flops + wgrad.flops
    assert LAYER.minimum_bytes == sum(o.bytes for o in GRADIENTS.operands(LAYER))
    saved = LAYER.itemsize * LAYER.output_elements
    assert LAYER.minimum_bytes == dgrad.minimum_bytes + wgrad.minimum_bytes - saved


def test_layers_of_one_design_are_held_out_together() -> None:
    fields = {"padding": (1, 2), "groups": 24}
    other = Gradients(9, 24, 14, 15, 24, 3, 5, dtype="float32", deterministic=True, **fields)
    assert LAYER.layer() == other.layer() == LAYER.layer().layer()


def test_operands_references_and_features_are_those_of_the_directions() -> None:
    names = ["in_grad", "filter_grad", "bias_grad", "out_grad", "in", "filter"]
    assert [o.name for o in GRADIENTS.operands(LAYER)] == names
    apart = {d: LAYER.apart(d) for d in ("dgrad", "wgrad")}
    known = {o.name: o for p in apart.values() for o in CONVOLUTION.operands(p)}
    assert {o.name: o for o in GRADIENTS.operands(LAYER)} == known
    for output, direction in zip(names, ("dgrad", "wgrad", "wgrad"), strict=False):
        expected = CONVOLUTION.reference(apart[direction], output)
        assert GRADIENTS.reference(LAYER, output) == expected
    features = GRADIENTS.features(LAYER, get_device("h100"))
    assert features.shape == (1, len(GRADIENTS.feature_names))


@pytest.mark.parametrize("bias", [True, False])
def test_pytorchs_call_is_the_reference(bias: bool) -> None:
    problem = Gradients(2, 6, 9, 8, 6, 3, 3, (2, 1), (1, 1), groups=6, dtype="float32", bias=bias)
    family = kernels_of(problem)["depthwise_both"]
    inputs = random_inputs(family, problem, 0)
    found = [
        x.permute(0, 2, 3, 1) if x.dim() == 4 else x for x in GRADIENTS.pytorch(problem, inputs)
    ]
    outputs = [o for o in GRADIENTS.operands(problem) if o.terms]
    results = dict(zip([o.name for o in outputs], found, strict=True))
    assert not outside(outputs, results, reference(problem, inputs))
    assert all(isinstance(x, torch.Tensor) for x in found)

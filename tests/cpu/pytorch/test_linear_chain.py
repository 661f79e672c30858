"""`confpred.linear_chain` as far as a machine without a GPU can tell: its arguments, PyTorch's own
operators, and which calls are chains."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from activations import activate
from torch import Tensor, nn

import confpred
from confpred.errors import InvalidInput
from confpred.predict.predictor import Predictor
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.linear_chain import MOST_LAYERS, LinearChain
from confpred.pytorch.linear_chain import problem_of
from confpred.pytorch.run import choosing


def layers(*widths: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    pairs = list(pairwise(widths))
    return [torch.randn(b, a) / a**0.5 for a, b in pairs], [torch.randn(b) for _, b in pairs]


def expected(
    x: Tensor, weights: list[Tensor], biases: list[Tensor] | None, name: str, last: bool
) -> Tensor:
    for index, weight in enumerate(weights):
        x = F.linear(x, weight, None if biases is None else biases[index])
        if name != "none" and (last or index < len(weights) - 1):
            x = activate(name, x)
    return x


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("last", [False, True])
def test_it_is_what_pytorch_computes(name: str, last: bool) -> None:
    weights, biases = layers(7, 12, 12, 5)
    x = torch.randn(2, 3, 7)
    activation = None if name == "none" else name
    for given in (biases, None):
        found = confpred.linear_chain(x, weights, given, activation=activation, last=last)
        assert torch.equal(found, expected(x, weights, given, name, last))
        assert found.shape == (2, 3, 5)


@pytest.mark.parametrize("count", [1, MOST_LAYERS, MOST_LAYERS + 1, 2 * MOST_LAYERS + 3])
def test_a_chain_of_any_length_is_computed(count: int) -> None:
    weights, biases = layers(*[6] * (count + 1))
    x = torch.randn(4, 6)
    found = confpred.linear_chain(x, weights, biases, last=False)
    assert torch.equal(found, expected(x, weights, biases, "relu", False))


def test_gradients_are_pytorchs() -> None:
    weights, biases = layers(5, 6, 6)
    parameters = [nn.Parameter(weight) for weight in weights]
    confpred.linear_chain(torch.randn(3, 5), parameters, biases, max_error=0.1).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)


def test_bad_arguments_are_named() -> None:
    weights, biases = layers(5, 6, 6)
    x = torch.randn(3, 5)
    for field, call in (
        ("activation", lambda: confpred.linear_chain(x, weights, activation="tanh")),
        ("weights", lambda: confpred.linear_chain(x, [])),
        ("biases", lambda: confpred.linear_chain(x, weights, biases[:1])),
        ("max_error", lambda: confpred.linear_chain(x, weights, max_error=2.0)),
    ):
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == field
    with pytest.raises(RuntimeError):
        confpred.linear_chain(torch.randn(3, 4), weights)


def test_what_a_chain_is() -> None:
    weights, biases = layers(7, 12, 12, 5)
    x = torch.randn(2, 3, 7)
    assert problem_of(x, weights, biases, "relu", False) == LinearChain(
        6, 7, 12, 5, 3, dtype="float32", last=False
    )
    single = problem_of(x, weights[:1], None, "none", True)
    assert single == LinearChain(6, 7, 12, 12, 1, dtype="float32", activation="none", bias=False)
    several, _ = layers(7, 12, 13, 5)
    assert problem_of(x, several, None, "relu", True) is None  # two widths between
    assert problem_of(x[..., :6], weights, biases, "relu", True) is None
    assert problem_of(x, weights, [biases[0], biases[1], biases[1]], "relu", True) is None
    assert problem_of(x[:0], weights, biases, "relu", True) is None
    wide = [torch.empty(20_000, 7, device="meta")]
    assert problem_of(x, wide, None, "relu", True) is None


def test_a_predictor_is_for_one_operation() -> None:
    former = choosing.current_predictor()
    shipped = choosing.current_predictor("linear_chain")
    assert shipped.models["h100"].operation.name == "linear_chain"
    mine = Predictor({})
    with pytest.raises(InvalidInput, match="operation='softmax' is not allowed"):
        confpred.use_predictor(mine, operation="softmax")
    try:
        confpred.use_predictor(mine, operation="linear_chain")
        assert choosing.current_predictor("linear_chain") is mine
        assert choosing.current_predictor() is former
    finally:
        confpred.use_predictor(shipped, operation="linear_chain")

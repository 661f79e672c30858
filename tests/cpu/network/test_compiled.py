"""An optimized model while `torch.compile` traces it."""

from __future__ import annotations

import copy

import pytest
import torch
from network_blocks import InvertedResidual, Network, images, made
from torch import nn

import confpred


@pytest.fixture
def model() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return made(Network(InvertedResidual(8), InvertedResidual(8)))


def close_to_the_original(compiled: nn.Module, model: nn.Module) -> None:
    """In evaluation or not, as `model` is; what its norms count is left as it was."""
    x, state = images(), copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        expected = confpred.revert(copy.deepcopy(model))(x)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-3)
    model.load_state_dict(state)


@pytest.mark.parametrize("which", [0, -1])
def test_a_norm_that_goes_into_training_is_seen(which, model) -> None:
    confpred.optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close_to_the_original(compiled, model)
    norm = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)][which]
    norm.train()
    close_to_the_original(compiled, model)
    steps = int(norm.num_batches_tracked)
    with torch.inference_mode():
        compiled(images())
    assert norm.num_batches_tracked == steps + 1
    norm.eval()
    close_to_the_original(compiled, model)


def test_what_is_written_to_a_parameter_is_seen(model) -> None:
    confpred.optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close_to_the_original(compiled, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    close_to_the_original(compiled, model)

"""`explain` says why a network cannot be captured, whichever of PyTorch's layers raised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import confpred
from confpred.errors import ConfpredError


@torch.library.custom_op("explaining::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("layer", ["Dynamo", "AOTAutograd"])
@pytest.mark.parametrize("text", ["", "\n \n", "no such layer\nand more", "Because:\n- why"])
def test_a_reason_is_never_empty(text: str, layer: str) -> None:
    """Each of the two layers calls the operator on tensors without values once."""
    calls: list[Tensor] = []

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > (layer == "AOTAutograd"):
            raise AssertionError(text)
        return torch.empty_like(x)

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.explaining.twice(x)

    reason = "no such layer" if text[:2] == "no" and layer != "Dynamo" else r".*\w"
    with pytest.raises(ConfpredError, match=f"Failing cannot be captured: {reason}"):
        confpred.explain(Failing(), torch.rand(2, 4))

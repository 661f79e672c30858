"""`explain` says why a network cannot be captured, whichever of PyTorch's layers raised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import confpred
from confpred.errors import ConfpredError
from confpred.pytorch import backend


@pytest.mark.passes_fail
@pytest.mark.parametrize("training", [False, True])
def test_a_graph_that_is_undone_has_no_rows(monkeypatch, training: bool) -> None:
    """PyTorch's operators run; a pass failed after confpred's were put in their place."""

    def fail(graph: torch.fx.Graph) -> None:
        raise ValueError("no such graph")

    model = nn.Conv2d(8, 8, 3, groups=8)
    assert confpred.explain(model, torch.rand(2, 8, 6, 6), training=training).rows
    name = "describe_tensors" if training else "update_in_place"
    monkeypatch.setattr(backend.passes, name, fail)  # a pass that fails
    explanation = confpred.explain(model, torch.rand(2, 8, 6, 6), training=training)
    assert explanation.rows == ()
    assert explanation.step.launches_after


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


# One process captures any number of networks; Dynamo keeps few graphs for each code object.


def test_each_of_many_networks_is_explained() -> None:
    images = torch.randn(2, 8, 9, 9, dtype=torch.half)
    for channels in range(8, 88, 8):
        model = torch.nn.Sequential(torch.nn.Conv2d(8, channels, 3), torch.nn.ReLU()).half()
        told = confpred.explain(model, images, device="h100")
        assert (told.step.parts, len(told.rows)) == (1, 1)

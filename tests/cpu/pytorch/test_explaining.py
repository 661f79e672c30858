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


class Failing(nn.Module):
    """Raises `error` in its operator's call number `call` on tensors without values: Dynamo's is
    the first one, and AOTAutograd's, inside the backend, the next."""

    def __init__(self, error: Exception, call: int) -> None:
        super().__init__()

        @twice.register_fake
        def _(x: Tensor) -> Tensor:
            nonlocal call
            call -= 1
            if call < 1:
                raise error
            return torch.empty_like(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.explaining.twice(x)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("error", [AssertionError(), ValueError("\n \n"), RuntimeError("No:\n- a")])
def test_the_reason_is_not_empty(error: Exception, call: int) -> None:
    with pytest.raises(ConfpredError, match=r"Failing cannot be captured: .*\w"):
        confpred.explain(Failing(error, call), torch.rand(2, 4))


def test_the_reason_is_the_error_in_the_backend() -> None:
    with pytest.raises(ConfpredError, match="Failing cannot be captured: no such layer"):
        confpred.explain(Failing(ValueError("no such layer\nand more"), 2), torch.rand(2, 4))

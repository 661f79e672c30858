"""What follows PyTorch's own convolution, where no kernel of ours can run: the same, in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from confpred.problem.conv2d import ACTIVATIONS
from confpred.pytorch.epilogue import apply_epilogue, can_apply


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_equals_pytorch_in_place(activation, with_bias, with_residual, layout) -> None:
    torch.manual_seed(0)
    out = torch.randn(2, 6, 3, 5, dtype=torch.float64).contiguous(memory_format=layout)
    bias = torch.randn(6).double() if with_bias else None
    residual = torch.randn(2, 6, 3, 5).double() if with_residual else None
    expected = out.clone()
    expected = expected if bias is None else expected + bias[:, None, None]
    expected = expected if residual is None else expected + residual
    expected = expected if activation == "none" else getattr(F, activation)(expected)
    assert apply_epilogue(out, bias, residual, activation) is out
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous(memory_format=layout)


def test_an_empty_tensor_stays_empty() -> None:
    out = torch.empty(0, 6, 3, 5)
    assert apply_epilogue(out, torch.ones(6), None, "relu").shape == (0, 6, 3, 5)


def test_no_gradient_is_recorded() -> None:
    bias = torch.ones(6, requires_grad=True)
    out = apply_epilogue(torch.randn(2, 6, 3, 5), bias, None, "silu")
    assert not out.requires_grad


def test_the_kernel_takes_no_tensor_of_the_cpu() -> None:
    out = torch.randn(2, 8, 3, 5).contiguous(memory_format=torch.channels_last)
    assert not can_apply(out, None, None, "relu")

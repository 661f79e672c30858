"""Epilogues, scales and shifts by PyTorch's operators, for tensors that no kernel takes."""

from __future__ import annotations

import pytest
import torch
from activations import activate

from confpred.problem.activation import ACTIVATIONS, activated
from confpred.pytorch.run.pointwise import apply_epilogue, can_apply, scale_shift

LAYOUTS = [torch.channels_last, torch.contiguous_format]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_epilogue_equals_pytorch_in_place(activation, with_bias, with_residual, layout) -> None:
    torch.manual_seed(0)
    out = torch.randn(2, 6, 3, 5, dtype=torch.float64).contiguous(memory_format=layout)
    bias = torch.randn(6).double() if with_bias else None
    residual = torch.randn(2, 6, 3, 5).double() if with_residual else None
    expected = out.clone()
    expected = expected if bias is None else expected + bias[:, None, None]
    expected = expected if residual is None else expected + residual
    expected = activate(activation, expected)
    assert apply_epilogue(out, bias, residual, activation) is out
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scale_and_shift_equal_pytorch(activation, with_residual, layout, dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 3, 5).to(dtype).contiguous(memory_format=layout)
    scale, shift = torch.randn(6), torch.randn(6)
    residual = torch.randn(2, 6, 3, 5).to(dtype) if with_residual else None
    wide = x.double() * scale.double()[:, None, None] + shift.double()[:, None, None]
    wide = wide if residual is None else wide + residual.double()
    before = x.clone()
    found = scale_shift(x, scale, shift, residual, activation)
    torch.testing.assert_close(found, activate(activation, wide).to(dtype))
    assert torch.equal(x, before)
    assert found.stride() == x.stride()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_pytorchs(activation) -> None:
    x = torch.linspace(-9, 9, 181)
    assert torch.equal(activated(activation, x), activate(activation, x))


def test_an_empty_tensor_stays_empty() -> None:
    out = torch.empty(0, 6, 3, 5)
    assert apply_epilogue(out, torch.ones(6), None, "relu").shape == (0, 6, 3, 5)
    assert scale_shift(out, torch.ones(6), torch.ones(6), None, "relu").shape == (0, 6, 3, 5)


def test_no_gradient_is_recorded() -> None:
    bias = torch.ones(6, requires_grad=True)
    assert not apply_epilogue(torch.randn(2, 6, 3, 5), bias, None, "silu").requires_grad
    assert not scale_shift(torch.randn(2, 6, 3, 5), bias, bias, None, "silu").requires_grad


def test_the_kernels_take_no_tensor_of_the_cpu() -> None:
    out = torch.randn(2, 8, 3, 5).contiguous(memory_format=torch.channels_last)
    assert not can_apply(out, None, None)

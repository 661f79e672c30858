"""What follows PyTorch's own convolution, where no kernel of ours can run: the same, in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from confpred.problem.conv2d import ACTIVATIONS
from confpred.pytorch import fallback
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


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("with_residual", [True, False])
def test_the_first_call_leaves_a_shorter_way(activation, with_residual, monkeypatch) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 5, 5), torch.randn(6, 2, 3, 3), torch.randn(6)
    geometry = ((1, 1), (1, 1), (1, 1), 2)
    residual = torch.randn(2, 6, 5, 5) if with_residual else None
    expected = F.conv2d(x, weight, bias, *geometry)
    expected = expected if residual is None else expected + residual
    expected = expected if activation == "none" else F.silu(expected)

    def finisher(*of):
        return lambda out, bias, residual: apply_epilogue(out, bias, residual, activation)

    monkeypatch.setattr(fallback, "epilogue_of", finisher)
    kept = []
    run = fallback.pytorch_run(geometry, activation, kept.append)
    torch.testing.assert_close(run(x, weight, bias, residual), expected)
    (again,) = kept
    torch.testing.assert_close(again(x, weight, bias, residual), expected)


def test_without_an_epilogue_of_ours_each_call_is_the_first(monkeypatch) -> None:
    x, weight, bias = torch.randn(2, 4, 5, 5), torch.randn(6, 2, 3, 3), torch.randn(6)
    monkeypatch.setattr(fallback, "epilogue_of", lambda *_: None)
    kept = []
    run = fallback.pytorch_run(((1, 1), (1, 1), (1, 1), 2), "relu", kept.append)
    expected = F.relu(F.conv2d(x, weight, bias, padding=1, groups=2))
    torch.testing.assert_close(run(x, weight, bias, None), expected)
    assert not kept

"""Dense lines that lie channels last are images to PyTorch's operator: a GPU copies nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from confpred.pytorch.run.convolve import Call, backward_by_pytorch, by_pytorch
from confpred.pytorch.run.loading import dense

CASES = [
    ((1, 1, 1), False), ((1, 9, 3), False), ((2, 3, 1), False), ((2, 1, 1), True),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "transposed"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pytorch_copies_no_line(axes, transposed, dtype) -> None:
    stride, padding, dilation = axes
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return dense(torch.randn(shape, device="cuda", generator=generator).to(dtype))

    x, weight = random(4, 64, 1001), random(64, 64, 4 if transposed else 7)
    mask = (True, True, False)
    call = Call(
        ((stride,), (padding,), (dilation,), 1), mask=mask, output_padding=(0,) * transposed
    )
    grad = dense(torch.ones_like(by_pytorch(x, weight, None, call)))

    def step() -> list[torch.Tensor | None]:
        out = by_pytorch(x, weight, None, call)
        return [out, *backward_by_pytorch(grad, x, weight, call, mask)[:2]]

    step()  # cuDNN tries its algorithms
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        found = step()
        torch.cuda.synchronize()
    kernels = [event.key for event in seen.key_averages() if event.self_device_time_total > 0]
    assert kernels
    assert not [k for k in kernels if "direct_copy" in k or "nchwToNhwc" in k or "nhwcToNchw" in k]
    operands = [t.double().contiguous().requires_grad_() for t in (x, weight)]
    convolve = F.conv_transpose1d if transposed else F.conv1d
    expected = convolve(*operands, None, stride, padding, dilation=dilation)
    expected.sum().backward()
    for t, reference in zip(found, [expected, *(t.grad for t in operands)], strict=True):
        assert t.mT.is_contiguous()
        assert (t.double() - reference).norm() < 5e-3 * reference.norm()

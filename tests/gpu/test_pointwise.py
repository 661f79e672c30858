"""The epilogue of PyTorch's own convolution, in one kernel, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from activations import activate
from launching import Guarded

from confpred.measure.kernels import ABSOLUTE, ROUNDING
from confpred.problem.conv2d import ACTIVATIONS
from confpred.pytorch.run.pointwise import apply_epilogue, can_apply

LAST = torch.channels_last
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
#: N, K, P, Q: vectors and single elements, less than a block, and more than one wave of blocks.
SIZES = (
    (1, 8, 1, 1),
    (2, 24, 7, 5),
    (3, 33, 9, 11),
    (5, 1, 13, 3),
    (2, 8 * 1009, 5, 3),
    (1, 65_535, 2, 1),
    (32, 320, 40, 40),
    (16, 333, 57, 31),
)


def guarded(x: torch.Tensor) -> tuple[torch.Tensor, Guarded]:
    """`x` channels last on the GPU, with poison before and behind it."""
    dense = x.permute(0, 2, 3, 1).contiguous()
    place = Guarded(dense.numel() * dense.element_size())
    inside = place.inside.view(x.dtype).view(dense.shape)
    inside.copy_(dense)
    return inside.permute(0, 3, 1, 2), place


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(shape, device="cuda") * 8 - 4).to(dtype)


def expected(out, bias, residual, activation) -> torch.Tensor:
    total = out.double()
    total = total if bias is None else total + bias.double()[:, None, None]
    total = total if residual is None else total + residual.double()
    return activate(activation, total)


def check(found: torch.Tensor, right: torch.Tensor, name: str) -> None:
    bound = ROUNDING[name] * right.abs() + ABSOLUTE
    assert bool(((found.double() - right).abs() <= bound).all())  # false for NaN


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_pytorch_in_float64(name: str, activation: str, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    dtype = DTYPES[name]
    for with_bias, with_residual in ((True, True), (True, False), (False, True), (False, False)):
        out, place = guarded(random(*size, dtype=dtype))
        bias = random(size[1], dtype=dtype) if with_bias else None
        residual, other = guarded(random(*size, dtype=dtype)) if with_residual else (None, place)
        assert can_apply(out, bias, residual)
        right = expected(out, bias, residual, activation)
        before = None if residual is None else residual.clone()
        assert apply_epilogue(out, bias, residual, activation) is out
        check(out, right, name)
        assert place.intact()
        assert other.intact()
        assert before is None or torch.equal(before, residual)


def test_nan_and_infinity_pass_as_pytorchs() -> None:
    values = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 65504.0]
    )
    for activation in ACTIVATIONS:
        out = values.half().cuda().view(1, 8, 1, 1).contiguous(memory_format=LAST)
        right = expected(out, None, None, activation).half()
        apply_epilogue(out, None, None, activation)
        if activation in ("silu", "gelu", "hardswish"):  # -inf * 0: NaN or 0 by the formula
            right, out = right[:, [0, 1, 3, 5]], out[:, [0, 1, 3, 5]]
        torch.testing.assert_close(out, right, equal_nan=True, rtol=2e-3, atol=1e-5)


def test_what_the_kernel_cannot_take_goes_to_pytorch() -> None:
    plain = random(2, 16, 5, 7, dtype=torch.float16)
    last = plain.contiguous(memory_format=LAST)
    odd = torch.empty(2 * 16 * 35 + 1, dtype=torch.float16, device="cuda")[1:]
    odd = odd.view(2, 5, 7, 16).permute(0, 3, 1, 2).copy_(plain)
    double = last.double()
    bias = random(16, dtype=torch.float16)
    cases = {
        "channels first": (plain.clone(), bias, None),
        "not aligned": (odd, bias, None),
        "float64": (double, bias.double(), None),
        "a residual of another layout": (last.clone(memory_format=LAST), None, plain),
        "a bias of another dtype": (last.clone(memory_format=LAST), bias.float(), None),
        "a bias with gaps": (last.clone(memory_format=LAST), bias.repeat(2)[::2], None),
    }
    for what, (out, some_bias, residual) in cases.items():
        assert not can_apply(out, some_bias, residual), what
        right = expected(out, some_bias, residual, "silu")
        assert apply_epilogue(out, some_bias, residual, "silu") is out
        torch.testing.assert_close(out.double(), right, rtol=4e-3, atol=4e-3)


def test_a_bias_may_begin_anywhere() -> None:
    out = random(2, 16, 5, 7, dtype=torch.float16).contiguous(memory_format=LAST)
    bias = random(17, dtype=torch.float16)[1:]
    right = expected(out, bias, None, "relu")
    assert can_apply(out, bias, None)
    check(apply_epilogue(out, bias, None, "relu"), right, "float16")


def test_runs_on_the_current_stream_and_in_a_graph() -> None:
    start = random(8, 64, 14, 14, dtype=torch.float16).contiguous(memory_format=LAST)
    bias = random(64, dtype=torch.float16)
    right = expected(start, bias, None, "gelu")
    out = torch.empty_like(start)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out.copy_(start)
        apply_epilogue(out, bias, None, "gelu")
    torch.cuda.current_stream().wait_stream(stream)
    check(out, right, "float16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(start)
        apply_epilogue(out, bias, None, "gelu")
    out.zero_()
    graph.replay()
    check(out, right, "float16")


def test_a_graph_may_meet_a_kernel_that_is_not_loaded(monkeypatch) -> None:
    from confpred.launch import runner
    from confpred.pytorch.run import choosing

    runner.loaded.cache_clear()
    monkeypatch.setattr(choosing, "_cache", {})
    start = random(3, 40, 6, 5, dtype=torch.float32).contiguous(memory_format=LAST)
    out = start.clone(memory_format=LAST)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(start)
        apply_epilogue(out, None, start, "relu6")
    assert all(choosing._cache.values())
    graph.replay()
    check(out, expected(start, None, start, "relu6"), "float32")


def test_more_than_two_to_the_31_elements() -> None:
    rows = 2**31 // 64 + 3
    if torch.cuda.mem_get_info()[0] < rows * 64 * 2 + 2**30:
        pytest.skip("needs 5.3 GB of device memory")
    out = torch.full((1, rows, 1, 64), -1.0, dtype=torch.float16, device="cuda")
    bias = torch.arange(64, dtype=torch.float16, device="cuda")
    image = out.permute(0, 3, 1, 2)
    assert can_apply(image, bias, None)
    apply_epilogue(image, bias, None, "relu")
    row = (bias - 1).clamp(min=0)
    for part in out[0, :, 0].split(2**20):
        assert torch.equal(part, row.expand_as(part))


def test_nearly_as_fast_as_a_copy() -> None:
    """The kernel reads and writes each element once; so does a copy."""
    out = random(128, 256, 56, 56, dtype=torch.float16).contiguous(memory_format=LAST)
    other, bias = torch.empty_like(out), random(256, dtype=torch.float16)

    def seconds(function) -> float:
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # until all is in the queue: the host's time is not meant
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    ours = seconds(lambda: apply_epilogue(out, bias, None, "relu"))
    copy = seconds(lambda: other.copy_(out))
    assert ours < copy / 0.85, f"{ours:.3f} ms against {copy:.3f} of a copy"

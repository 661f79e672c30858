"""Parts of what serves lines and volumes: problems, views, layouts by cost, causal layers, copies.
`test_ranks.py` has whole programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_blocks import CLONE, CONV, FOLD, LAST, PLAIN, Around
from torch import Tensor, nn

import confpred
from confpred.errors import InvalidInput
from confpred.launch.assignment import Assignment
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.pytorch.backend import confpred as backend
from confpred.pytorch.rewrite import fusing
from confpred.pytorch.run import loading
from confpred.pytorch.run.convolve import Call, backward, forward, layer_of, problem_of
from confpred.pytorch.run.fold import empty, fold
from confpred.pytorch.run.pointwise import can_apply

LAST_3D = torch.channels_last_3d


def line(channels: int = 8, length: int = 9) -> Tensor:
    """Return lines with their channels last."""
    return torch.randn(2, length, channels, generator=torch.Generator().manual_seed(0)).mT


@pytest.mark.parametrize(("image", "filters", "layout", "found"), [
    ((2, 8, 9), (8, 1, 3), "channels_last", Problem(2, 8, 1, 9, 8, 1, 3, groups=8)),
    ((2, 8, 9), (8, 1, 3), "channels_first",
     ConvNd(2, 8, 9, 8, 3, rank=1, groups=8, layout="channels_first")),
    ((2, 8, 4, 5, 6), (8, 1, 1, 3, 3), "channels_last", Problem(8, 8, 5, 6, 8, 3, 3, groups=8)),
    ((2, 8, 4, 5, 6), (8, 1, 3, 1, 1), "channels_last", Problem(2, 8, 4, 30, 8, 3, 1, groups=8)),
    ((2, 8, 4, 5, 6), (8, 1, 3, 3, 3), "channels_last",
     ConvNd(2, 8, 6, 8, 3, d=4, h=5, t=3, r=3, groups=8)),
    ((8, 9), (8, 1, 3), "channels_first", None),  # not batched
    ((2, 8, 2), (8, 1, 3), "channels_first", None),  # too short
    ((2, 8, 9, 9, 9, 9), (8, 1, 3, 3, 3, 3), "channels_first", None),
])  # fmt: skip
def test_a_layer_of_any_rank_is_described(image, filters, layout, found) -> None:
    rank = len(filters) - 2
    geometry: Any = ((1,) * rank, (0,) * rank, (1,) * rank, 8)
    assert problem_of("fprop", image, filters, torch.float16, geometry, layout) == found


def test_a_transposed_image_with_a_bias_is_no_problem_of_images() -> None:
    sizes: Any = ("dgrad", (2, 8, 9, 9), (4, 8, 3, 3), torch.float16, ((1, 1), (0, 0), (1, 1), 1))
    assert isinstance(layer_of(*sizes), Problem)
    assert isinstance(problem_of(*sizes, bias=True), ConvNd)


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_an_output_padding_beyond_the_stride_makes_no_gradient(captured, launches, kind) -> None:
    """A dilated filter allows it; a kernel would read a larger input than there is."""
    layer, rank = kind(8, 8, 3, dilation=2, output_padding=1, groups=8), int(kind.__name__[-2])
    x = loading.dense(torch.randn(2, 8, *[4] * rank))
    run(layer, x)
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    confpred.optimize(layer)(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)
    assert launches == []


@pytest.mark.parametrize("fields", [{}, {"cut": 3}, {"output_padding": (0,)}])
def test_a_call_is_read_as_it_was_written(fields) -> None:
    problem = ConvNd(2, 8, 9, 8, 3, rank=1, groups=8, stride=2, layout="channels_first")
    hints = (Assignment(problem), None)
    call = Call(((2,), (0,), (1,), 8), "silu", hints=hints, **fields)
    assert Call.read(call.text()) == call


def test_layouts_of_lines_and_volumes() -> None:
    volume = torch.randn(2, 8, 3, 4, 5)
    for t, last in ((line(), line()), (volume, volume.contiguous(memory_format=LAST_3D))):
        assert loading.is_channels_last(last)
        assert not loading.is_channels_last(t.contiguous())
        assert loading.layout_of(t.contiguous()) == "channels_first"
        again = loading.dense(t.contiguous())
        assert again.stride() == last.stride()
        assert loading.dense(last, "channels_first").is_contiguous()
    assert loading.layout_of(part_of_channels(line())) == "channels_last"
    assert loading.layout_of(torch.randn(2, 8, 5)[:, :4]) == "channels_first"
    assert loading.layout_of(part_of_channels(line(length=1))) == "channels_first"
    one = line(channels=1)
    assert loading.lies_channels_last(one)
    assert loading.layout_of(one) == "channels_first"
    assert not loading.lies_channels_last(torch.randn(2, 8))


@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 4, 2, 3, 3), (6, 1, 5)])
def test_filters_of_any_rank_are_folded(shape) -> None:
    filters, mean = torch.randn(shape), torch.randn(6)
    variance = torch.rand(6) + 0.5
    filter, _ = fold([None], [None], [mean], [variance], [None], [filters], [0.1], ["float32"])
    scale = (variance + 0.1).rsqrt().view(-1, *(1,) * (len(shape) - 1))
    torch.testing.assert_close(filter, filters * scale)
    assert loading.lies_channels_last(empty(mean, filters, "float32")[0])


def test_one_pass_takes_lines_that_are_channels_last(monkeypatch) -> None:
    monkeypatch.setattr("confpred.pytorch.run.pointwise.alike", lambda *_: True)  # no GPU
    assert can_apply(line(), None, line())
    assert not can_apply(line().contiguous(), None, None)


def run(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        expected = model(x)
        found = torch.compile(model, backend=backend)(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def depthwise(taps: int = 3, **options: Any) -> nn.Conv1d:
    torch.manual_seed(0)
    return nn.Conv1d(8, 8, taps, **{"padding": taps // 2, "groups": 8, **options})


def test_a_copy_has_to_pay(captured, launches, monkeypatch) -> None:
    """A kernel for channels last alone is launched where it saves more than both copies."""
    captured.wins = lambda problem: isinstance(problem, Problem)
    run(nn.Sequential(depthwise()), line().contiguous())
    assert launches == [Problem(2, 8, 1, 9, 8, 1, 3, padding=(0, 1), groups=8, dtype="float32",
                                bias=True)]  # fmt: skip
    assert captured.of("inference").count(CLONE) == 2
    captured.passes.clear()
    torch._dynamo.reset()
    monkeypatch.setattr("confpred.pytorch.rewrite.matches.LAUNCH_MS", 0.6)  # of 1 ms to be saved
    run(nn.Sequential(depthwise()), line().contiguous())
    assert captured.of("inference").targets() == [PLAIN]


def test_no_copy_lies_between_layers_of_one_layout(captured, launches) -> None:
    captured.wins = lambda problem: isinstance(problem, Problem)
    run(nn.Sequential(depthwise(), nn.Tanh(), depthwise(), nn.Tanh()), line().contiguous())
    done = captured.of("inference").targets()
    tanh = "aten.tanh.default"
    permuted = "aten.permute.default"
    copy = [permuted, CLONE, permuted]
    assert done == [*copy, CONV, tanh, CONV, tanh, CLONE]
    assert len(launches) == 2


def test_tokens_are_neither_copied_in_nor_out(captured, launches) -> None:
    model = Around(lambda m, x: m.head(m.conv(x.mT).mT), conv=depthwise(), head=nn.Linear(8, 4))
    run(model, line().mT.contiguous())
    transpose, *others = captured.of("inference").targets()
    assert others[:2] == [CONV, transpose]
    assert isinstance(launches[0], Problem)


CAUSAL = {
    "pad": lambda m, x: F.silu(m.plain(F.pad(x, (3, 0)))),
    "cut": lambda m, x: F.silu(m.padded(x)[..., :-3]),
    "cut to a length": lambda m, x: F.silu(m.padded(x)[..., : x.shape[-1]]),
    "pad, stride": lambda m, x: F.silu(m.strided(F.pad(x, (3, 0)))),
    "cut, sum": lambda m, x: F.relu(x + m.padded(x)[..., :-3]),
    "two cuts, sum": lambda m, x: F.relu(m.padded(x)[..., :-3] + m.padded(x * 2)[..., :-3]),
}


def part_of_channels(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as a part of a tensor of twice the channels, which are last."""
    return torch.cat([x.mT, x.mT], 2).mT[:, : x.shape[1]]


NOT_CAUSAL = {
    "a seen slice": lambda m, x: m.padded(x)[..., :-3],
    "both sides": lambda m, x: F.silu(m.plain(F.pad(x, (3, 1)))),
    "ones": lambda m, x: F.silu(m.plain(F.pad(x, (3, 0), value=1.0))),
    "channels": lambda m, x: F.silu(m.padded(x)[:, :3]),
    "the beginning": lambda m, x: F.silu(m.padded(x)[..., 3:]),
    "steps": lambda m, x: F.silu(m.padded(x)[..., :-3:2]),
    "channels last": lambda m, x: F.silu(m.plain(F.pad(x.mT.contiguous().mT, (0, 0)))),
    "a part of channels last": lambda m, x: F.silu(m.padded(part_of_channels(x))[..., :-3]),
}


def layers() -> dict[str, nn.Module]:
    return {
        "plain": depthwise(4, padding=0), "padded": depthwise(4, padding=3),
        "strided": depthwise(4, padding=0, stride=3),
    }  # fmt: skip


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_causal_layer_is_one_problem(captured, launches, kind) -> None:
    run(Around(CAUSAL[kind], **layers()), line(length=11).contiguous())
    done = captured.of("inference").targets()
    assert set(done) <= {CONV, "aten.mul.Tensor"}
    assert {(p.padding[2], p.layout) for p in launches} == {(3, "channels_first")}
    assert all(p.cut for p in launches)


@pytest.mark.parametrize("kind", NOT_CAUSAL)
def test_other_slices_and_paddings_stay(captured, launches, kind) -> None:
    run(Around(NOT_CAUSAL[kind], **layers()), line(length=11).contiguous())
    assert all(getattr(p, "cut", 0) == 0 for p in launches)


def test_a_part_of_other_channels_is_copied_by_the_graph(captured, launches) -> None:
    run(Around(lambda m, x: F.silu(m.padded(x[:, :8])).mT, **layers()), line(channels=16))
    assert [type(p) for p in launches] == [Problem]  # an image's, as it is channels last
    assert CLONE in captured.of("inference").targets()


def test_inductor_computes_a_factor_of_a_product_in_one_pass() -> None:
    from torch._inductor import metrics

    def forward(m: Any, x: Tensor) -> Tensor:
        return (F.silu(x[:, :8]) * F.silu(x[:, 8:])).mT @ m.weight

    module = Around(forward)
    module.weight = nn.Parameter(torch.randn(8, 4))
    x, options = line(channels=16), {"inductor": True}
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        metrics.reset()
        found = torch.compile(module, backend="confpred", options=options)(x)
        torch.testing.assert_close(found, module(x))
    assert metrics.generated_kernel_count == 1


@pytest.mark.parametrize(("forward", "stays"), [
    (lambda x: F.silu(x).permute(0, 2, 1), False),
    (lambda x: torch.mul(x, x[:, :1]).permute(0, 2, 1), True),
    (lambda x: (x * 2).permute(2, 0, 1), True),  # not in the order of memory
    (lambda x: x[:, :, None].clone(memory_format=torch.channels_last).permute(0, 2, 3, 1), True),
])  # fmt: skip
def test_operands_are_permuted_where_that_changes_no_number(forward, stays) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from confpred.pytorch.rewrite import inductor

    graph = make_fx(forward, tracing_mode="fake")(line()).graph
    inductor.permute_before_pointwise(graph)
    last: Any = graph.output_node().args[0]
    assert (last.target is torch.ops.aten.permute.default) == stays
    found = [call(line()) for call in (torch.fx.GraphModule({}, graph), forward)]
    torch.testing.assert_close(*found)
    assert found[0].stride() == found[1].stride()


def test_a_causal_layer_without_a_kernel_is_as_it_was(captured, launches) -> None:
    captured.wins = lambda problem: not getattr(problem, "cut", 0)
    run(Around(CAUSAL["pad"], **layers()), line(length=11).contiguous())
    assert captured.of("inference").targets() == ["aten.constant_pad_nd.default", CONV]


def test_a_padded_input_that_others_may_write_to_is_not_kept(captured, launches) -> None:
    """PyTorch's backward pass of the convolution reads the padded tensor. The forward pass has it,
    too: else the partitioner of PyTorch 2.9 leaves it to the backward pass, which fails then."""
    model, found = Around(CAUSAL["pad"], **layers()), []
    for call in (torch.compile(model, backend=backend), model):
        x = line(length=11).contiguous()
        out = call(x)
        with torch.no_grad():
            x.mul_(2.0)
        found.append(torch.autograd.grad(out.sum(), model.plain.weight))
    torch.testing.assert_close(*found)
    assert [getattr(p, "cut", 0) for p in launches] == [0, 0]


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_cut_equals_a_padding_on_the_left(captured, stride, dilation) -> None:
    """For lengths that leave any rest."""
    for length in range(9, 13):
        x = line(length=length).contiguous()
        conv = depthwise(3, padding=0, stride=stride, dilation=dilation)
        model = Around(lambda m, x: m.conv(F.pad(x, (2 * dilation, 0))), conv=conv)
        torch._dynamo.reset()
        captured.passes.clear()
        run(model, x)
        assert captured.of("inference").targets() == [CONV]


@pytest.mark.parametrize("cut", [0, 3])
@pytest.mark.parametrize("x", [line(), line().contiguous()])
def test_gradients_of_launched_lines(launches, x, cut) -> None:
    conv = depthwise(4, padding=3)
    call = Call(((1,), (3,), (1,), 8), mask=(True, True, True), cut=cut)
    given = x.clone().requires_grad_()
    out = conv(given)[..., : 12 - cut]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(out, [given, conv.weight, conv.bias], grad)
    with torch.no_grad():
        torch.testing.assert_close(forward(x, conv.weight, conv.bias, None, call), out)
        torch.testing.assert_close(backward(grad, x, conv.weight, call), expected)
    is_image = loading.is_channels_last(x) and not cut
    assert {type(p) for p in launches} == {Problem if is_image else ConvNd}
    assert len(launches) == 3


def test_a_residual_that_is_broadcast_is_pytorchs(launches) -> None:
    call = Call(((1,), (1,), (1,), 8), "relu")
    conv, x = depthwise(bias=False), line()
    with torch.no_grad():
        found = forward(x, conv.weight, None, torch.ones(1, 8, 1), call)
        torch.testing.assert_close(found, F.relu(conv(x) + 1))
        assert launches == []
        forward(x, conv.weight, None, x, call)
    assert len(launches) == 1


GEOMETRIES = ({"padding": 1, "groups": 4}, {"stride": 2, "dilation": 2, "padding": 2})


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_one_call_of_any_rank_equals_pytorch(rank, geometry) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, *(7, 6, 5)[:rank])
    weight = torch.randn(8, 8 // geometry.get("groups", 1), *(3,) * rank).requires_grad_()
    bias, own = torch.randn(8), (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    expected = own(x, weight, bias, **geometry)  # type: ignore[arg-type]
    residual = torch.randn_like(expected)
    found = confpred.convolution(x, weight, bias, residual, activation="silu", **geometry)
    torch.testing.assert_close(found, F.silu(expected + residual))
    for out in (found, F.silu(expected + residual)):
        out.sum().backward(retain_graph=True)
    with torch.no_grad():
        plain = confpred.convolution(x, weight, bias, residual, activation="silu", **geometry)
    torch.testing.assert_close(plain, found)


def test_the_one_call_keeps_pytorchs_strides(launches) -> None:
    conv = depthwise(bias=False)
    out = confpred.convolution(line(), conv.weight, padding=1, groups=8)
    assert out.is_contiguous()
    out.sum().backward()
    assert len(launches) == 2
    assert isinstance(launches[0], Problem)


@pytest.mark.parametrize(("arguments", "field"), [
    ({"x": torch.zeros(8, 9)}, "x"), ({"weight": torch.zeros(8, 1)}, "weight"),
    ({"padding": (1, 1)}, "padding"), ({"residual": torch.zeros(8)}, "residual"),
])  # fmt: skip
def test_wrong_arguments_of_the_one_call_are_named(arguments, field) -> None:
    given: Any = {"x": line(), "weight": torch.zeros(8, 1, 3), "groups": 8, **arguments}
    with pytest.raises(InvalidInput) as caught:
        confpred.convolution(given.pop("x"), given.pop("weight"), **given)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_enable_takes_every_rank_and_gives_it_back(kind) -> None:
    former = kind._conv_forward
    layer = kind(4, 4, 3, groups=4)
    x = torch.randn(2, 4, *[5] * (layer.weight.dim() - 2))
    expected = layer(x)
    with confpred.enabled():
        assert kind._conv_forward is not former
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(torch.jit.script(layer)(x), expected)
        torch.testing.assert_close(layer(x[0]), expected[0])  # not batched
    assert kind._conv_forward is former


def test_explain_describes_every_rank() -> None:
    transposed = nn.ConvTranspose1d(8, 8, 4, stride=2, bias=False)
    model = nn.Sequential(depthwise(), nn.SiLU(), transposed).eval()
    rows = [row.cells() for row in confpred.explain(model, line().contiguous(), "h100").rows]
    computed = [cells[3] for cells in rows]
    assert computed[:2] == ["fprop depthwise 3 -> 8 + silu", "dgrad 4/2 -> 8"]
    volume = torch.randn(2, 8, 4, 5, 6).contiguous(memory_format=LAST_3D)
    layer = nn.Conv3d(8, 8, 3, groups=8).to(memory_format=LAST_3D)
    (row, *_) = confpred.explain(layer, volume, "h100", training=True).rows
    assert row.cells()[3] == "fprop depthwise 3x3x3 -> 8"
    assert row.reason.startswith("transferred from h200")
    dense = nn.Conv3d(8, 16, 3).to(memory_format=LAST_3D)
    (row, *_) = confpred.explain(dense, volume, "h100", training=False).rows
    assert row.reason == "no legal kernel, or none within limits"
    assert row.is_estimate
    frames = nn.Conv3d(8, 8, (1, 3, 3), groups=8).half()
    volume = volume.half()
    (row, *_) = confpred.explain(frames, volume, "h100", training=False).rows
    assert isinstance(row.problem, Problem)
    assert not row.is_estimate


def test_a_filter_that_cannot_be_folded_leaves_a_pass(captured, launches, monkeypatch) -> None:
    # No small network has such filters.
    monkeypatch.setattr(fusing, "_fold_of", lambda *_: fusing.Fold((), 0.0, is_lossy=True))
    layer = nn.Conv3d(8, 8, 3, groups=8).to(memory_format=LAST_3D)
    volume = torch.randn(2, 8, 4, 5, 6).contiguous(memory_format=LAST_3D)
    run(nn.Sequential(layer, nn.BatchNorm3d(8), nn.SiLU()), volume)
    assert captured.of("inference").targets() == [FOLD, CONV]
    assert launches == []


def test_images_that_are_channels_first_stay_pytorchs(captured, launches) -> None:
    run(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8)), torch.randn(2, 8, 5, 5))
    assert launches == []
    run(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8)).to(memory_format=LAST),
        torch.randn(2, 8, 5, 5).contiguous(memory_format=LAST))  # fmt: skip
    assert len(launches) == 1

"""While enabled, PyTorch's functions and modules compute what they did, by kernels of ours."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from layers_on_gpu import (
    LAST,
    LAYERS,
    SHAPE,
    Layer,
    OursFirst,
    close,
    in_float64,
    make_layer,
    ours_first,
    pytorch_refused,
    served_by,
)
from torch import nn

import confpred
from confpred.pytorch import choosing, switch

conv1d, conv2d, conv_transpose2d = F.conv1d, F.conv2d, F.conv_transpose2d  # PyTorch's own


@pytest.fixture(autouse=True)
def ours() -> Iterator[OursFirst]:
    """Enabled, and kernels of ours serve every layer that they can."""
    with ours_first() as predictor, confpred.enabled(wait=True):
        yield predictor
    assert F.conv2d is conv2d


@pytest.fixture
def layer() -> Layer:
    return make_layer(SHAPE, 64)


def exact_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def module_of(layer: Layer, kwargs: dict) -> nn.Conv2d:
    x, weight, bias = layer
    made = nn.Conv2d(x.shape[1], weight.shape[0], 3, **kwargs)
    made = made.to(device=x.device, dtype=weight.dtype, memory_format=LAST)
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(bias)
    return made


#: Of the layers, the depthwise ones have kernels in float32.
CASES = [(name, dtype) for name in LAYERS for dtype in (torch.float16, torch.bfloat16)]
CASES += [(name, torch.float32) for name in LAYERS if name.startswith("depthwise")]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_equals_pytorch_forward_and_backward(name, dtype, ours) -> None:
    kwargs, channels = LAYERS[name]
    given = make_layer(kwargs, channels, dtype)
    module = module_of(given, kwargs)
    exact = exact_of(*given)
    right = conv2d(*exact, **kwargs)
    grad = torch.randn_like(right)
    expected = torch.autograd.grad(right, exact, grad)
    with pytorch_refused():
        with torch.no_grad():
            close(F.conv2d(*given, **kwargs), right)
            close(module(given[0]), right)
        assert not served_by("dgrad", ours)
        x = given[0].requires_grad_()
        out = module(x)
        mine = torch.autograd.grad(out, (x, module.weight, module.bias), grad.to(dtype))
    close(out.detach(), right.detach())
    assert out.is_contiguous(memory_format=LAST)
    for a, b in zip(mine, expected, strict=True):
        assert a.dtype is dtype
        close(a, b)
    assert all(served_by(direction, ours) for direction in ("fprop", "dgrad", "wgrad"))
    assert None not in ours.chosen


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x bias", "weight bias"])
def test_some_gradients(wanted, layer, ours) -> None:
    names = ("x", "weight", "bias")
    needed = [t.requires_grad_() for n, t in zip(names, layer, strict=True) if n in wanted.split()]
    out = F.conv2d(*layer, **SHAPE)
    grad = torch.randn_like(out)
    mine = torch.autograd.grad(out, needed, grad)
    exact = exact_of(*layer)
    theirs = torch.autograd.grad(conv2d(*exact, **SHAPE), exact, grad.double())
    right = [g for n, g in zip(names, theirs, strict=True) if n in wanted.split()]
    for a, b in zip(mine, right, strict=True):
        close(a, b)
    assert served_by("dgrad", ours) == ("x" in wanted.split())
    assert served_by("wgrad", ours) == ("weight" in wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_under_autocast(name, dtype) -> None:
    kwargs, channels = LAYERS[name]
    given = make_layer(kwargs, channels, torch.float32)
    module, x = module_of(given, kwargs), given[0].requires_grad_()
    tolerance = 4e-2 if dtype is torch.bfloat16 else 1e-2
    for change in (
        lambda w: None,
        lambda w: w.add_(0.5),  # as an optimizer's step
        lambda w: w.data.mul_(2),  # which PyTorch does not count as a change
    ):
        with torch.no_grad():
            change(module.weight)
        with pytorch_refused(), torch.autocast("cuda", dtype=dtype):
            out = module(x)
            grad = torch.randn_like(out)
            mine = torch.autograd.grad(out, (x, module.weight, module.bias), grad)
        assert out.dtype is dtype
        exact = exact_of(x, module.weight, module.bias)
        right = conv2d(*exact, **kwargs)
        close(out.detach(), right.detach(), tolerance)
        for a, b in zip(mine, torch.autograd.grad(right, exact, grad.double()), strict=True):
            assert a.dtype is torch.float32
            close(a, b, tolerance)
        with pytorch_refused(), torch.no_grad(), torch.autocast("cuda", dtype=dtype):
            close(module(x), right.detach(), tolerance)


def test_mixed_dtypes_are_autocasts_alone(layer) -> None:
    """What autocast made possible stays an error without it, and the other way round."""
    x, weight, bias = layer
    mixed = (x, weight.float(), bias.float())
    for _ in range(2):
        with pytest.raises(RuntimeError) as theirs:
            conv2d(*mixed, **SHAPE)
        with pytest.raises(RuntimeError) as mine:
            F.conv2d(*mixed, **SHAPE)
        assert str(mine.value) == str(theirs.value)
        with torch.autocast("cuda", dtype=torch.float16), pytorch_refused():
            close(F.conv2d(*mixed, **SHAPE), conv2d(*in_float64(*layer), **SHAPE))
    for wrong in (weight.double(), weight.int()):
        with torch.autocast("cuda", dtype=torch.float16), pytest.raises(RuntimeError):
            F.conv2d(x, wrong, **SHAPE)


def test_two_devices_are_pytorchs_error(layer) -> None:
    x, weight, bias = layer
    for wrong in ((x, weight.cpu(), bias), (x.cpu(), weight, None), (x, weight, bias.cpu())):
        with pytest.raises(RuntimeError) as theirs:
            conv2d(*wrong, **SHAPE)
        with pytest.raises(RuntimeError) as mine:
            F.conv2d(*wrong, **SHAPE)
        assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:0],
        lambda x: x.contiguous(),
        lambda x: x[:, :, 1:],
        lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
        lambda x: x[:1].expand_as(x),
        lambda x: x.flip(3).transpose(2, 3),
        lambda x: x[0],
    ],
    ids=["empty", "nchw", "rows", "gaps", "expanded", "transposed", "unbatched"],
)
def test_other_layouts_and_sizes(layer, change) -> None:
    x, weight, bias = layer
    x = change(x)
    expected = conv2d(*in_float64(x, weight, bias), **SHAPE)
    for _ in range(2):
        out = F.conv2d(x, weight, bias, **SHAPE)
        assert out.shape == expected.shape
        if out.numel():
            close(out, expected)
    leaf = x.detach().requires_grad_()
    (mine,) = torch.autograd.grad(F.conv2d(leaf, weight, bias, **SHAPE).sum(), leaf)
    exact = leaf.detach().double().requires_grad_()
    right = conv2d(exact, weight.double(), bias.double(), **SHAPE)
    (theirs,) = torch.autograd.grad(right.sum(), exact)
    assert mine.shape == theirs.shape
    if mine.numel():
        close(mine, theirs)


def test_a_filter_of_any_layout_is_taken(layer) -> None:
    x, weight, bias = layer
    expected = conv2d(*in_float64(x, weight, bias), **SHAPE)
    gaps = torch.cat((weight, weight), 1)[:, : weight.shape[1]]
    with pytorch_refused():
        for other in (weight.contiguous(), gaps):
            close(F.conv2d(x, other, bias, **SHAPE), expected)
            leaf = other.detach().requires_grad_()
            (mine,) = torch.autograd.grad(F.conv2d(x, leaf, bias, **SHAPE).sum(), leaf)
            exact = weight.double().requires_grad_()
            right = conv2d(x.double(), exact, bias.double(), **SHAPE).sum()
            close(mine, torch.autograd.grad(right, exact)[0])


def test_a_bias_of_any_layout_is_taken_and_of_another_length_refused(layer) -> None:
    x, weight, bias = layer
    one = bias[:1].expand(bias.numel())  # a stride of 0
    for given in (bias, one, torch.stack((bias, bias), 1)[:, 0]):
        expected = conv2d(*in_float64(x, weight, given), **SHAPE)
        with pytorch_refused():
            close(F.conv2d(x, weight, given, **SHAPE), expected)
            close(confpred.conv2d(x, weight, given, activation=None, **SHAPE), expected)
            leaf = given.detach().requires_grad_()
            close(F.conv2d(x, weight, leaf, **SHAPE).detach(), expected)
    for wrong in (bias[:-1], torch.cat((bias, bias))):
        for call in (F.conv2d, confpred.conv2d):
            with pytest.raises(RuntimeError, match="bias"):
                call(x, weight, wrong, **SHAPE)


def test_channels_first_is_pytorchs_where_a_copy_does_not_pay(layer) -> None:
    x, weight, bias = layer
    x = x.contiguous()
    assert torch.equal(F.conv2d(x, weight, bias, **SHAPE), conv2d(x, weight, bias, **SHAPE))


def test_channels_first_is_converted_where_it_pays(layer, monkeypatch) -> None:
    monkeypatch.setattr(choosing, "converting_pays", lambda *_: True)
    x, weight, bias = layer
    with pytorch_refused(), torch.no_grad():
        out = F.conv2d(x.contiguous(), weight, bias, **SHAPE)
    assert out.is_contiguous()
    close(out, conv2d(*in_float64(x, weight, bias), **SHAPE))


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("geometry", [{"padding": 2}, {"stride": 2}, {"dilation": [2]}])
def test_one_dimension(geometry, pays, monkeypatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 120, device="cuda", dtype=torch.float16)
    weight = torch.randn(64, 1, 5, device="cuda", dtype=torch.float16) / 2
    bias = torch.randn(64, device="cuda", dtype=torch.float16)
    monkeypatch.setattr(choosing, "converting_pays", lambda *_: pays)
    with pytorch_refused() if pays else nullcontext(), torch.no_grad():
        out = F.conv1d(x, weight, bias, groups=64, **geometry)
    exact = exact_of(x, weight, bias)
    right = conv1d(*exact, groups=64, **geometry)
    close(out, right.detach())
    assert out.is_contiguous()
    given = [t.requires_grad_() for t in (x, weight, bias)]
    out = F.conv1d(*given, groups=64, **geometry)
    grad = torch.randn_like(out)
    theirs = torch.autograd.grad(right, exact, grad.double())
    for a, b in zip(torch.autograd.grad(out, given, grad), theirs, strict=True):
        close(a, b)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    "geometry", [{"padding": 1}, {"stride": 2, "padding": 1}, {"stride": 2, "output_padding": 1}]
)
def test_transposed(geometry, with_bias, ours) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 15, 14, device="cuda").half().to(memory_format=LAST)
    weight = torch.randn(64, 16, 3, 3, device="cuda").half().to(memory_format=LAST) / 12
    bias = torch.randn(64, device="cuda").half() if with_bias else None
    given = [t for t in (x, weight, bias) if t is not None]
    exact = exact_of(*given)
    right = conv_transpose2d(*exact, groups=4, **geometry)
    with pytorch_refused(), torch.no_grad():
        close(F.conv_transpose2d(*given, groups=4, **geometry), right.detach())
    assert [name.rpartition("_")[2] for name in ours.chosen] == ["dgrad"]
    with pytorch_refused():
        given = [t.requires_grad_() for t in given]
        out = F.conv_transpose2d(*given, groups=4, **geometry)
        grad = torch.randn_like(out)
        mine = torch.autograd.grad(out, given, grad)
    close(out.detach(), right.detach())
    for a, b in zip(mine, torch.autograd.grad(right, exact, grad.double()), strict=True):
        close(a, b)
    assert all(served_by(direction, ours) for direction in ("fprop", "dgrad", "wgrad"))
    assert None not in ours.chosen


def test_deterministic_gradients_repeat_to_the_bit(layer) -> None:
    given = [t.requires_grad_() for t in layer]
    torch.use_deterministic_algorithms(True)
    try:
        out = F.conv2d(*given, **SHAPE)
        grad = torch.randn_like(out)
        first, *others = (
            torch.autograd.grad(out, given, grad, retain_graph=True) for _ in range(20)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_many_threads_train_at_once(layer) -> None:
    _, weight, bias = layer
    inputs = [make_layer(SHAPE, 64, seed=seed)[0] for seed in range(6)]
    expected = []
    for x in inputs:
        exact = exact_of(x, weight, bias)
        expected.append(torch.autograd.grad(conv2d(*exact, **SHAPE).square().sum(), exact))

    def train(index: int) -> list[tuple[torch.Tensor, ...]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            given = [t.detach().requires_grad_() for t in (inputs[index], weight, bias)]
            found = []
            for _ in range(20):
                loss = F.conv2d(*given, **SHAPE).float().square().sum()
                found.append(torch.autograd.grad(loss, given))
            torch.cuda.current_stream().synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(inputs)) as threads:
        for found, right in zip(threads.map(train, range(len(inputs))), expected, strict=True):
            for grads in found:
                for a, b in zip(grads, right, strict=True):
                    close(a, b)


def test_disabling_gives_pytorchs_bits_back(layer) -> None:
    expected = conv2d(*layer, **SHAPE)
    with pytorch_refused():
        F.conv2d(*layer, **SHAPE)
    confpred.disable()
    try:
        assert not switch.is_enabled()
        assert torch.equal(F.conv2d(*layer, **SHAPE), expected)
    finally:
        confpred.enable(wait=True)


def test_one_weight_in_ever_other_modes(layer) -> None:
    """What was noted of the weight's last call is of use only to calls that are like it."""
    x, weight, offset = layer[0].float(), nn.Parameter(layer[1].float()), layer[2].float()
    modes = {
        "gradients": nullcontext,
        "none": torch.no_grad,
        "inference": torch.inference_mode,
        "float16": lambda: torch.autocast("cuda", torch.float16),
        "bfloat16": lambda: torch.autocast("cuda", torch.bfloat16),
    }
    images = (x, x[:, :, 1:], x.half(), x.contiguous(), x.clone().requires_grad_())
    turns = [(mode, image, bias) for mode in modes for image in images for bias in (None, offset)]
    random.Random(0).shuffle(turns)
    for mode, image, bias in [turn for turn in turns for _ in range(3)]:
        with modes[mode]():
            try:
                expected = conv2d(image, weight, bias, **SHAPE)
            except RuntimeError as error:
                with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
                    F.conv2d(image, weight, bias, **SHAPE)
                continue
            out = F.conv2d(image, weight, bias, **SHAPE)
        assert (out.dtype, out.requires_grad) == (expected.dtype, expected.requires_grad)
        close(out, expected.double())

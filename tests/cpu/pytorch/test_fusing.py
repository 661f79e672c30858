"""Inference: what becomes one operator, what stays as it is, and that both compute the same."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from activations import activate
from network_blocks import BLOCKS, CONV, FOLD, LAST, PLAIN, SHIFT, Around, images, made
from torch import Tensor, nn

from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import ACTIVATIONS, Problem
from confpred.problem.device import get_device
from confpred.pytorch import explain
from confpred.pytorch.backend import confpred as backend
from confpred.pytorch.run import choosing
from confpred.pytorch.run.convolve import Call

NORM = "aten._native_batch_norm_legit_no_training.default"


def chain(bias: bool, norm: bool, residual: bool, activation: str) -> nn.Module:
    """Return a convolution and what may follow it."""

    def forward(m: Around, x: Tensor) -> Tensor:
        y = m.norm(m.conv(x)) + x if residual else m.norm(m.conv(x))
        return activate(activation, y)

    conv = nn.Conv2d(8, 8, 3, padding=1, bias=bias, groups=2)
    return Around(forward, conv=conv, norm=nn.BatchNorm2d(8) if norm else nn.Identity())


def expression(function) -> nn.Module:
    """Return a function of an image, a convolution, another one and a norm."""
    conv, other = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
    return Around(lambda m, x: function(x, m.conv, m.other, m.norm), conv=conv, other=other,
                  norm=nn.BatchNorm2d(8))  # fmt: skip


def image(dtype: torch.dtype = torch.float32, channels: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 7, 5, generator=generator, dtype=dtype)
    return x.contiguous(memory_format=LAST)


def run(model: nn.Module, *inputs: Tensor, layout: torch.memory_format = LAST) -> None:
    """Compare a capture of `model` with `model`."""
    model = made(model)
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=layout)
    inputs = inputs or (image(),)
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
        expected = model(*inputs)
    torch.testing.assert_close(found, expected)
    for mine, other in zip(_tensors(found), _tensors(expected), strict=True):
        assert mine.stride() == other.stride()


def _tensors(found) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def called(node) -> Call:
    return Call.read(node.args[5])


@pytest.mark.parametrize(("norm", "residual", "wins", "activation"), [
    *((True, True, True, activation) for activation in ACTIVATIONS),
    *product([True, False], [True, False], [True, False], ["none"]),
    (True, False, False, "relu"), (False, True, True, "relu"), (False, False, True, "silu"),
])  # fmt: skip
def test_a_chain_is_one_operator(captured, activation, norm, residual, wins) -> None:
    captured.wins = lambda problem: wins
    run(chain(not norm or residual, norm, residual, activation))
    done = captured.of("inference")
    ((problem,),) = captured.asked
    assert (problem.activation, problem.residual, problem.bias) == (activation, residual, True)
    if not wins and not norm and not residual and activation == "none":
        assert done.targets() == [PLAIN]  # PyTorch's convolution adds the bias itself
        return
    assert done.targets() == [FOLD, CONV] if norm else [CONV]
    (node,) = done.calls(CONV)
    _, _, scale, _, added, _ = node.args
    assert (scale is not None) == (norm and not wins)
    assert (added is not None) == residual
    assert called(node).activation == activation
    hint, _ = called(node).hints
    assert hint is not None
    assert hint.problem == problem
    assert hint.candidate.provider == ("cudnn" if wins else "pytorch")


@pytest.mark.parametrize(("activation", "residual"), [
    *((activation, True) for activation in ACTIVATIONS), ("none", False), ("relu", False),
])  # fmt: skip
def test_a_norm_without_a_convolution_is_one_operator(captured, activation, residual) -> None:
    def function(x, conv, other, norm):
        y = norm(x.sin())
        y = x + y if residual else y
        return activate(activation, y)

    run(expression(function))
    done = captured.of("inference")
    assert captured.asked == []
    assert done.targets() == [FOLD, "aten.sin.default", SHIFT]
    assert done.calls(SHIFT)[0].args[4] == activation


@pytest.mark.parametrize(("kind", "wins"), [
    *((kind, True) for kind in BLOCKS), ("bottleneck", False), ("convnext", False),
])  # fmt: skip
def test_networks_are_the_same_number(captured, kind, wins) -> None:
    captured.wins = lambda problem: wins
    run(BLOCKS[kind](), images().contiguous(memory_format=LAST))
    done = captured.of("inference")
    assert done.count(NORM) == 0
    assert done.count(FOLD) == (kind not in ("convnext", "functional"))
    assert (done.count(CONV) > 0) == (wins or kind != "convnext")


@pytest.mark.parametrize("kind", ["bottleneck", "convnext"])
def test_networks_whose_channels_are_first_stay_pytorchs(captured, kind) -> None:
    run(BLOCKS[kind](), images(), layout=torch.contiguous_format)
    done = captured.of("inference")
    assert done.count(PLAIN) > 0
    if kind != "convnext":  # which permutes its tensors itself
        assert captured.asked == []
        assert done.count(CONV) == done.count(SHIFT) == 0


def test_all_norms_are_folded_in_one_launch(captured) -> None:
    run(BLOCKS["bottleneck"](), images().contiguous(memory_format=LAST))
    (fold,) = captured.of("inference").calls(FOLD)
    gammas, *_, eps, dtypes = fold.args
    assert len(gammas) == len(eps) == len(dtypes) == 4


def test_two_convolutions_that_are_summed(captured) -> None:
    """The later one adds the other's output: that one is there by then."""
    run(expression(lambda x, conv, other, norm: F.relu(norm(conv(x)) + other(x))))
    first, second = captured.of("inference").calls(CONV)
    assert called(first).activation == "none"
    assert first.args[4] is None
    assert called(second).activation == "relu"
    assert second.args[4] is first
    assert [p.residual for p in captured.asked[0]] == [False, True]


def test_a_chain_of_sums(captured) -> None:
    run(expression(lambda x, conv, other, norm: conv(x) + (conv(x.sin()) + (other(x) + x))))
    nodes = captured.of("inference").calls(CONV)
    assert all(node.args[4] is not None for node in nodes)
    assert captured.of("inference").count("aten.add.Tensor") == 0


LEFT_ALONE = {
    # name: what is computed, and the activations of the operators that remain
    "a value that is used again": (lambda x, c, o, n: (lambda y: F.relu(y) * y)(c(x)), ["none"]),
    "an activation, used again": (lambda x, c, o, n: (lambda y: y + y)(F.relu(c(x))), ["relu"]),
    "a value that is returned": (lambda x, c, o, n: (lambda y: (y, F.relu(y)))(c(x)), ["none"]),
    "a norm's input that is returned": (lambda x, c, o, n: (lambda y: (y, n(y)))(c(x)), ["none"]),
    "a norm's output, returned": (lambda x, c, o, n: (lambda y: (y, F.silu(y)))(n(c(x))), ["none"]),
    "a sum that is returned": (lambda x, c, o, n: (lambda y: (y, F.silu(y)))(c(x) + x), ["none"]),
    "a sum with itself": (lambda x, c, o, n: (lambda y: F.relu(y + y))(c(x)), ["none"]),
    "a sum with a factor": (lambda x, c, o, n: torch.add(c(x), x, alpha=2), ["none"]),
    "a sum with a factor on the output": (lambda x, c, o, n: torch.add(x, c(x), alpha=2), ["none"]),
    "a sum that is broadcast": (lambda x, c, o, n: c(x) + x.mean((2, 3), keepdim=True), ["none"]),
    "a sum into a larger tensor": (lambda x, c, o, n: c(x)[None] + x[None], ["none"]),
    "a sum with a number": (lambda x, c, o, n: c(x) + 1.5, ["none"]),
    "a sum with another dtype": (lambda x, c, o, n: c(x) + x.double(), ["none"]),
    "a product": (lambda x, c, o, n: c(x) * x, ["none"]),
    "another dtype before an activation": (lambda x, c, o, n: F.relu(c(x).double()), ["none"]),
    "another gelu": (lambda x, c, o, n: F.gelu(c(x), approximate="tanh"), ["none"]),
    "another clamp": (lambda x, c, o, n: F.hardtanh(c(x), 0.0, 5.0), ["none"]),
    "a clamp from -1": (lambda x, c, o, n: F.hardtanh(c(x)), ["none"]),
    "an activation without a name": (lambda x, c, o, n: F.elu(c(x)), ["none"]),
    "two activations": (lambda x, c, o, n: F.silu(F.relu(c(x))), ["relu"]),
    "a sum after an activation": (lambda x, c, o, n: F.relu(c(x)) + x, ["relu"]),
    "two sums": (lambda x, c, o, n: c(x) + x + x.sin(), ["none"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_is_not_the_same_is_not_fused(captured, kind) -> None:
    function, activations = LEFT_ALONE[kind]
    run(expression(function))
    nodes = captured.of("inference").calls(CONV)
    assert [called(node).activation for node in nodes] == activations
    sums = kind in ("a sum that is returned", "two sums")  # of one shape and dtype
    assert [node.args[4] is not None for node in nodes] == [sums]


@pytest.mark.parametrize(("function", "targets"), [
    (lambda x, conv, other, norm: norm(conv(x) + x), [FOLD, CONV, SHIFT]),  # after a sum
    (lambda x, conv, other, norm: norm(norm(conv(x))), [FOLD, CONV, SHIFT]),
    (lambda x, conv, other, norm: norm(conv(F.relu(norm(conv(x))))), [FOLD, CONV, CONV]),
])  # fmt: skip
def test_a_norm_is_folded_where_it_stands(captured, function, targets) -> None:
    run(expression(function))
    assert captured.of("inference").targets() == targets


def test_a_residual_of_another_layout_stays_a_sum(captured) -> None:
    """The sum has the strides of its first operand, which a view may count on."""
    conv = nn.Conv2d(8, 8, 1)
    model = Around(lambda m, x, residual: (residual + m.conv(x)).flatten(1), conv=conv)
    run(model, image(), image().contiguous())
    assert captured.of("inference").count("aten.add.Tensor") == 1


@pytest.mark.parametrize("wins", [True, False])
def test_a_transposed_convolution_is_a_gradient_of_an_image(captured, wins) -> None:
    """Operators behind it become a pass of their own."""
    captured.wins = lambda problem: wins
    run(nn.Sequential(nn.ConvTranspose2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8),
                      nn.ReLU()))  # fmt: skip
    ((problem,),) = captured.asked
    assert problem.direction == "dgrad"
    assert captured.of("inference").targets() == [FOLD, CONV if wins else PLAIN, SHIFT]


def test_lines_and_volumes_are_fused_as_images_are(captured) -> None:
    """A norm of vectors stays PyTorch's."""

    def forward(m: Around, x: Tensor) -> Tensor:
        y, z = m.line(x.flatten(2)), m.volume(x.reshape(2, 2, 4, 7, 5))
        return y.sum() + z.sum() + m.flat(x.mean((2, 3))).sum()

    line = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())
    volume = nn.Sequential(nn.Conv3d(2, 2, 1), nn.BatchNorm3d(2), nn.ReLU())
    run(Around(forward, line=line, volume=volume, flat=nn.BatchNorm1d(8)))
    done = captured.of("inference")
    assert {type(problem) for problem in captured.asked[0]} == {Problem, ConvNd}
    assert (done.count(NORM), done.count(CONV), done.count(SHIFT)) == (1, 2, 0)


def test_float64_stays_pytorchs(captured) -> None:
    run(chain(True, True, True, "relu").double(), image(torch.float64))
    assert captured.asked == []
    assert captured.of("inference").count(PLAIN) == 1


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(8), nn.GroupNorm(2, 8), nn.BatchNorm2d(8, track_running_stats=False)]
)
def test_other_norms_stay_pytorchs(captured, norm) -> None:
    run(nn.Sequential(nn.Conv2d(8, 8, 1), norm, nn.ReLU()))
    assert captured.of("inference").count(FOLD) == 0


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-3, 0.5])
def test_norms_of_all_kinds_are_folded(captured, affine, eps) -> None:
    model = chain(False, True, False, "relu")
    model.norm = nn.BatchNorm2d(8, eps=eps, affine=affine)
    for tensor in (model.norm.running_mean, model.norm.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)
    model.eval().to(memory_format=LAST)
    x = image()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (fold,) = captured.of("inference").calls(FOLD)
    assert fold.args[6] == [eps]
    assert (fold.args[0] == [None]) is not affine


def test_statistics_that_the_forward_writes_first_are_folded_after_that(captured) -> None:
    def forward(m: Around, x: Tensor) -> Tensor:
        m.norm.running_mean.add_(x.mean())
        return m.norm(m.conv(x))

    model = made(Around(forward, conv=nn.Conv2d(8, 8, 1), norm=nn.BatchNorm2d(8)))
    model, x = model.to(memory_format=LAST), image()
    before = model.norm.running_mean.clone()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for times in (1, 2):
            found = compiled(x)
            torch.testing.assert_close(model.norm.running_mean, before + times * x.mean())
            torch.testing.assert_close(found, model.norm(model.conv(x)))


def test_autocast_folds_the_weights_themselves(captured) -> None:
    model, x = made(chain(False, True, False, "relu")).to(memory_format=LAST), image()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = torch.compile(model, backend=backend)(x), model(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
    done = captured.of("inference")
    (fold,) = done.calls(FOLD)
    assert fold.args[5][0].op == "placeholder"
    assert fold.args[7] == ["bfloat16"]
    assert done.count("aten._to_copy.default") == 1  # the image
    assert captured.asked[0][0].dtype == "bfloat16"


def test_an_open_batch_is_captured_once(captured) -> None:
    model = made(chain(False, True, True, "silu")).to(memory_format=LAST)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = image().repeat(batch, 1, 1, 1).contiguous(memory_format=LAST)
            torch.testing.assert_close(compiled(x), model(x))
    assert captured.of("inference").targets().count(CONV) == 1


def test_problems_are_those_of_the_layers(captured) -> None:
    geometry = {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1), "groups": 4}
    run(nn.Sequential(nn.Conv2d(8, 16, (3, 5), **geometry), nn.ReLU()))
    epilogue = {"dtype": "float32", "bias": True, "activation": "relu"}
    assert captured.asked == [[Problem(2, 8, 7, 5, 16, 3, 5, **geometry, **epilogue)]]


@pytest.mark.parametrize(
    ("function", "fused"),
    [
        (lambda m, x: m.conv(x) + x, [("add",)]),
        (lambda m, x: (m.conv(x) + x).sigmoid(), [()]),
        (lambda m, x: m.other(m.conv(x) + x), [("add",), ()]),
        (lambda m, x: F.silu(m.conv(x)).mean((2, 3)), [()]),
        (lambda m, x: m.other(F.relu(m.conv(x))), [("relu",), ()]),
        (lambda m, x: F.silu(m.norm(m.conv(x))).mean((2, 3)), [(), ("norm",)]),
    ],
    ids=["a result", "a pass", "a convolution", "a mean", "ReLU is free", "a norm and a mean"],
)
def test_what_inductors_passes_compute_on_their_way_is_theirs(function, fused, monkeypatch) -> None:
    # Inductor compiles for a GPU, and there is none.
    monkeypatch.setattr(explain.Recorder, "_inductor_device", lambda self, _: self._device)
    conv, other = nn.Conv2d(192, 192, 3, padding=1), nn.Conv2d(192, 192, 1)
    layers = {"conv": conv, "other": other, "norm": nn.BatchNorm2d(192)}
    model = Around(function, **layers).to(memory_format=LAST)
    x = torch.empty(128, 192, 28, 28).to(memory_format=LAST)
    found = explain.capture(model, x, get_device("h100"), dtype=torch.float16)
    assert [site.fused for site in found.sites] == fused
    assert all(site.is_lowered for site in found.sites if site.direction == "fprop")


@pytest.mark.slow(reason="Inductor compiles programs in C++")
@pytest.mark.parametrize(
    ("dtype", "folds"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.float64, 0)]
)
def test_inductor_gets_norms_as_a_product_and_a_sum(captured, dtype, folds, monkeypatch) -> None:
    captured.wins = lambda problem: False
    monkeypatch.setattr(choosing, "device_of", lambda _: get_device("h100"))  # there is none
    model, x = made(chain(True, True, False, "silu")).to(memory_format=LAST).eval(), image(dtype)
    with torch.no_grad():
        exact = model.double()(x.double())
        found = torch.compile(model.to(dtype), backend=backend, options={"inductor": True})(x)
    assert (found - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
    done = captured.of("inference")
    assert (done.count(NORM), done.count(FOLD), done.count(CONV)) == (0, folds, 0)

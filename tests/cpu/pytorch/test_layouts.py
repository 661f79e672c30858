"""The layout of a graph in half precision: channels last inside, outside as it was."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_blocks import BACKWARD, BLOCKS, CLONE, CONV, LAST, PLAIN, Around, images, made
from slow import slow_but
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import confpred
from confpred.problem.device import get_device
from confpred.problem.norm import BatchNorm
from confpred.problem.norm_of_groups import Norm
from confpred.pytorch.backend import confpred as backend
from confpred.pytorch.rewrite import matches
from confpred.pytorch.run import choosing
from confpred.pytorch.run.loading import is_channels_last

HALF = torch.bfloat16


def test_layouts_that_could_be_both_are_not_channels_last() -> None:
    x = torch.empty(2, 8, 5, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert is_channels_last(last)
    for other in (x, torch.empty(2, 1, 5, 5), torch.empty(2, 8, 1, 1), last[:, :4], x[0]):
        assert not is_channels_last(other)


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_images_are_copied_once_and_outputs_keep_their_layout(captured, kind) -> None:
    model, x = made(BLOCKS[kind]()).to(HALF).blocks, torch.randn(2, 8, 9, 7).to(HALF)
    expected = model(x)
    found = torch.compile(model, backend=backend)(x)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    assert found.stride() == expected.stride()
    done = captured.of("inference")
    assert done.count(CONV) > 0
    assert all(p.dtype == "bfloat16" for p in captured.asked[0])
    for node in done.calls(CONV):
        val = node.args[0].meta["val"]
        assert val.is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test_float32_keeps_its_layout(captured) -> None:
    model, x = made(BLOCKS["bottleneck"]()), images()
    torch.compile(model, backend=backend)(x)
    assert captured.of("inference").count(CLONE) == 0


BOUND = {
    "as_strided": lambda y: y.as_strided((6,), (1,)) * 1,
    "a write by as_strided": lambda y: (y.as_strided((6,), (1,)).zero_(), y * 1)[1],
    "a view of another dtype": lambda y: (y.view(torch.int16) + 0).view(HALF) * 2,
    "random numbers": lambda y: y + torch.rand_like(y),
    "dropout": lambda y: F.dropout(y, 0.5),
    "a flat view": lambda y: y.flatten(1) * 2,
    "a view of channels": lambda y: y.view(2, 2, 2, 7, 5).transpose(1, 2).flatten(1, 2) * 1,
    "the strides": lambda y: y * y.stride(1),
    "a permutation": lambda y: y.permute(0, 2, 3, 1).reshape(2, -1) * 1,
    "a chunk": lambda y: torch.cat(y.chunk(2, 1)[::-1], 1),
    "pixels shuffled": lambda y: F.pixel_shuffle(y, 2),
    "the mean": lambda y: y.mean((2, 3)),
}


@pytest.mark.parametrize("kind", BOUND)
@torch.no_grad()
def test_what_depends_on_the_layout_is_right(captured, kind) -> None:
    function = BOUND[kind]
    model = made(Around(lambda m, x: function(m.conv(x)), conv=nn.Conv2d(4, 4, 3, padding=1)))
    model.to(HALF)
    x = torch.randn(2, 4, 7, 5).to(HALF)
    found = []
    for call in (torch.compile(model, backend=backend), model):
        torch.manual_seed(3)
        found.append(call(x))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
    assert found[0].stride() == found[1].stride()


# Volumes: channels last where that saves more time than the copies take.

BOUND_VOLUMES = {
    "nothing": lambda m, x: m.rest(x),
    "as_strided": lambda m, x: m.rest(x).as_strided((6,), (1,)) * 1,
    "a view of another dtype": lambda m, x: m.rest((x.view(torch.int16) + 0).view(HALF) + x),
    "random numbers": lambda m, x: x + torch.rand_like(m.rest(x)),
    "a flat view": lambda m, x: m.rest(x).flatten(1) * 2,
    "a permutation": lambda m, x: m.rest(x).permute(0, 2, 3, 4, 1).reshape(2, -1) * 1,
    "a chunk": lambda m, x: torch.cat(m.rest(x).chunk(2, 1)[::-1], 1),
    "an instance norm": lambda m, x: m.last(F.instance_norm(m.rest(x))),
    "a transposed layer": lambda m, x: m.up(m.rest(x)),
    "a pooling": lambda m, x: F.max_pool3d(m.rest(x), 2),
    "frames": lambda m, x: m.flat(m.rest(x).transpose(1, 2).flatten(0, 1)),
    "one channel": lambda m, x: m.rest(m.first(x[:, :1])),
}  # fmt: skip


@pytest.fixture
def volumes(captured, launches, monkeypatch) -> Any:
    """Captures for an H200, where any copy of a volume pays."""
    monkeypatch.setattr(choosing, "device_of", lambda ordinal: get_device("h200"))  # no GPU
    monkeypatch.setattr(matches, "LAUNCH_MS", 0.0)  # the volumes are small
    return captured


def chain(function: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv3d(4, 4, 3, padding=1) for _ in range(4))
    rest = nn.Sequential(next(layers), nn.ReLU(), next(layers), nn.ReLU(), next(layers))
    more = {"last": next(layers), "first": nn.Conv3d(1, 4, 3, padding=1)}
    more |= {"up": nn.ConvTranspose3d(4, 4, 2, 2), "flat": nn.Conv2d(4, 4, 3)}
    return made(Around(function, rest=rest, **more)).to(HALF)


FEW_VOLUMES = [
    ("nothing", False, False), ("as_strided", True, True), ("an instance norm", True, False),
    ("one channel", False, True), ("frames", False, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "training", "wins"),
    slow_but(
        FEW_VOLUMES, product(BOUND_VOLUMES, *[(False, True)] * 2), "it captures many networks"
    ),
)
def test_volumes_are_channels_last_inside(volumes, kind, training, wins) -> None:
    """By PyTorch's operators, and by kernels in both layouts."""
    volumes.wins = lambda problem: wins
    model, results = chain(BOUND_VOLUMES[kind]).train(training), []
    x = torch.randn(2, 4, 4, 6, 6).to(HALF)
    for call in (torch.compile(model, backend=backend), model):
        torch.manual_seed(3)
        with torch.set_grad_enabled(training):
            leaf = x.clone().requires_grad_(training)
            out = call(leaf)
            loss = out.square().sum()
            grads = torch.autograd.grad(loss, leaf) if loss.requires_grad else ()
        results.append([out.detach(), *grads])
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)
    strides = [[t.stride() for t in tensors] for tensors in results]
    assert strides[0] == strides[1]
    done = volumes.of("forward" if training else "inference")
    inputs = [node.args[0].meta["val"] for node in (*done.calls(PLAIN), *done.calls(CONV))]
    lies = [val.stride(1) == 1 for val in inputs if val.dim() == 5]
    assert lies
    # Kernels take one channel for channels first, and later layers follow where that costs nothing.
    assert all(lies) != (kind == "one channel" and wins)


@torch.no_grad()
def test_a_chain_of_volumes_is_copied_once(volumes) -> None:
    volumes.wins = lambda problem: False
    x = torch.randn(2, 4, 4, 6, 6).to(HALF)
    torch.compile(chain(BOUND_VOLUMES["nothing"]), backend=backend)(x)
    assert volumes.of("inference").count(CLONE) == 2


@torch.no_grad()
def test_open_sizes_of_volumes_stay_open(volumes) -> None:
    volumes.wins = lambda problem: False
    model = chain(BOUND_VOLUMES["nothing"])
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for size in (6, 8, 9):
        x = torch.randn(2, 4, 5, size, 7).to(HALF)
        torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.05)
    assert volumes.of("inference").count(CLONE) == 2


VOLUME = torch.empty(2, 64, 16, 56, 56, dtype=HALF)


def explained(*layers: nn.Module, x: Tensor | None = None) -> int:
    """Return how many copies are added to a network of `layers` on an H200."""
    model = nn.Sequential(*layers).to(HALF).eval()
    step = confpred.explain(model, VOLUME if x is None else x, "h200").step
    return step.added.get("aten.clone", 0)


def dense(taps: int = 3, groups: int = 1) -> nn.Conv3d:
    return nn.Conv3d(64, 64, taps, padding=taps // 2, groups=groups)


def test_volumes_keep_their_layout_where_copies_take_longer() -> None:
    assert explained(dense(), dense()) == 2
    assert explained(dense(1)) == 0
    # Reshapes around an instance norm copy, and so do PyTorch's group norms.
    for norm in (nn.InstanceNorm3d(64), nn.GroupNorm(8, 64)):
        assert explained(dense(), *(norm, dense(1)) * 5) == 0
    assert explained(dense(), x=torch.empty(1, 64, 4, 6, 6, dtype=HALF)) == 0


def test_volumes_lie_as_on_a_gpu_where_there_is_none() -> None:
    """On a CPU PyTorch returns volumes in float16 with their channels first."""
    model = nn.Sequential(*[layer for _ in range(3) for layer in (dense(), nn.BatchNorm3d(64))])
    found = [
        confpred.explain(model, VOLUME.float(), "h200", training=True, dtype=dtype).step
        for dtype in (HALF, torch.float16)
    ]
    assert found[0].ms_after == pytest.approx(found[1].ms_after, rel=0.03)


def test_volumes_keep_their_layout_where_pytorch_computes_a_grouped_layer() -> None:
    assert explained(dense(), dense(), dense(groups=64)) == 2, "a kernel computes it"
    assert explained(dense(), dense(), dense(groups=2)) == 0
    assert explained(dense(), dense(), dense(9, groups=64)) == 0


def attend(y: torch.Tensor) -> torch.Tensor:
    """Let channels attend to channels, as in networks that restore images."""
    heads = y.unflatten(1, (2, -1))
    return F.scaled_dot_product_attention(heads, heads + 1, heads - 1).flatten(1, 2)


IN_ORDER = {
    "group norm": lambda m, x: F.group_norm(m.conv(x), 2),
    "group norm before": lambda m, x: m.conv(F.group_norm(x * 2, 2)),
    "weight norm of images": lambda m, x: m.normed(
        m.normed(x.unflatten(-1, (3, 4)).to(HALF)).sin()
    ).float(),
    "attention": lambda m, x: attend(m.conv(x)),
    "distances": lambda m, x: torch.cdist(m.conv(x), m.conv(x) + 1),
    "complex numbers": lambda m, x: torch.view_as_complex(m.conv(x).unflatten(-1, (-1, 2))).abs(),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", IN_ORDER)
def test_operators_read_memory_as_it_lay(captured, launches, kind: str, last: bool) -> None:
    """They do not look at strides: what calls them made copies where those were needed."""
    captured.wins = lambda problem: not isinstance(problem, Norm)
    torch.manual_seed(0)
    normed = weight_norm(nn.Conv2d(8, 8, 3, padding=1, dtype=HALF))
    layers = {"conv": nn.Conv1d(8, 8, 3, padding=1), "normed": normed}
    model, found = Around(IN_ORDER[kind], **layers), []
    x = torch.randn(2, 12, 8).mT
    for call in (torch.compile(model, backend=backend), model):
        given = (x if last else x.contiguous()).clone().requires_grad_()
        out = call(given)
        model.zero_grad()
        out.square().mean().backward()
        grads = [t.grad for t in (given, *model.parameters())]
        found.append([out.detach(), grads, out.stride()])
    tolerance = 0.02 if "images" in kind else 1e-4
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    assert len(launches) >= 3


@pytest.mark.parametrize("kind", ["lines", "images in half precision"])
@torch.no_grad()
def test_results_share_memory_as_they_did(captured, launches, kind: str) -> None:
    """The caller writes to one of them, and the others change."""
    rank = 1 + (kind != "lines")
    conv = (nn.Conv1d, nn.Conv2d)[rank - 1](8, 8, 3, padding=1)
    model = Around(lambda m, x: (y := m.conv(x).tanh(), y[:, 1:3], y.flatten(1)), conv=conv)
    x, found = torch.randn(2, 7, 8).mT, []
    if rank == 2:
        x, model = torch.randn(2, 8, 6, 7).to(HALF), model.to(HALF)
    for call in (torch.compile(model, backend=backend), model):
        results = call(x)
        results[1].zero_()
        found.append([(t, t.stride()) for t in results])
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
    assert len(launches) == 1


def test_strides_that_are_open_sizes_are_those_of_the_capture(captured, launches) -> None:
    """A gradient of a write to a part makes a tensor with strides that the forward pass had."""
    captured.wins = lambda problem: getattr(problem, "layout", "") != "channels_first"
    conv = nn.Conv1d(8, 8, 4, padding=9, dilation=3)
    model, found = Around(lambda m, x: F.relu(m.conv(x)[..., :-9:2], inplace=True), conv=conv), []
    for call in (torch.compile(model, backend=backend, dynamic=True), model):
        x = torch.ones(2, 8, 24, requires_grad=True)
        call(x).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
    assert len(launches) >= 1


BACK = {
    "slices": lambda m, x: torch.cat([m.a(x), m.b(x)], 1),
    "channels first": lambda m, x: m.a(x).contiguous() + m.b(x).contiguous(),
    "a norm of slices": lambda m, x: torch.cat([m.norm(m.a(x)), m.b(x)], 1),
}


@pytest.mark.parametrize("wins", [False, True])
@pytest.mark.parametrize("kind", BACK)
def test_gradients_are_copied_by_the_graph(captured, launches, monkeypatch, kind, wins) -> None:
    """PyTorch's operators and kernels would copy them inside, more slowly than Inductor does."""
    monkeypatch.setattr(choosing, "is_known", lambda operation: True)  # without a model of norms
    captured.wins = lambda problem: wins or isinstance(problem, BatchNorm)
    torch.manual_seed(0)
    layers = {name: nn.Conv2d(8, 8, 3, bias=False) for name in "ab"}
    model, found = Around(BACK[kind], **layers).to(HALF).to(memory_format=LAST), []
    model.norm = nn.BatchNorm2d(8)  # its weights are float32, as under autocast
    for call in (model, torch.compile(model, backend=backend)):
        model.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(2, 9, 7, 8).movedim(-1, 1).to(HALF).requires_grad_()
        out = call(x)
        (out.float() * torch.randn(out.shape)).sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for plain, ours in zip(*found, strict=True):
        assert (ours - plain).norm() < 3e-2 * plain.norm()
    done, norm = captured.of("backward"), "confpred.batch_norm_backward.default"
    assert done.count(norm) == (kind == "a norm of slices")
    backward = BACKWARD if wins else "aten.convolution_backward.default"
    readers = [*done.calls(backward), *done.calls(norm)]
    assert len(done.calls(backward)) == 2
    read = [node.meta["val"] for reader in readers for node in reader.args[:2]]
    assert all(val.is_contiguous(memory_format=torch.channels_last) for val in read)
    assert done.count(CLONE) > 0


def test_gradients_beside_group_norms_are_served(captured, launches, monkeypatch) -> None:
    """Norms that confpred computes do not bring channels first back between two convolutions."""
    monkeypatch.setattr(choosing, "is_known", lambda operation: True)  # without a model of norms
    layers = [m for _ in range(3) for m in (nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())]
    model = nn.Sequential(*layers).to(HALF)
    out = torch.compile(model, backend=backend)(torch.randn(2, 8, 9, 9).to(HALF))
    out.float().square().sum().backward()
    assert captured.of("backward").count("confpred.norm_backward.default") == 3
    assert captured.of("backward").count(BACKWARD) == 2  # all but the first, which reads the input

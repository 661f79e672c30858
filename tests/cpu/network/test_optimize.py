"""`confpred.optimize`: the same numbers, whatever the network, and whatever happens to it later."""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from network_blocks import BLOCKS, Bottleneck, InvertedResidual, Network, images, made
from torch import nn

import confpred
from confpred.errors import ConfpredError, InvalidInput
from confpred.network import optimize as optimize_module
from confpred.network.forward import OptimizedForward
from confpred.network.problems import EITHER_LAYOUT, network_problems
from confpred.problem.device import get_device


def parts(model: nn.Module) -> dict[str, OptimizedForward]:
    """The optimized forwards of `model` by the names of their modules."""
    return {
        name: module.__dict__["forward"]
        for name, module in model.named_modules()
        if "forward" in module.__dict__
    }


def sites(model: nn.Module) -> list[tuple[str, bool, str, bool]]:
    """Name, norm, activation and residual of each fused call, once it has been built."""
    return [
        (
            ".".join(filter(None, (part, site.name))),
            site.norm is not None,
            site.activation,
            site.residual,
        )
        for part, forward in parts(model).items()
        for site in forward._program.sites.values()
    ]


def small() -> nn.Module:
    return made(Network(InvertedResidual(8), Bottleneck(8, 8, stride=2)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activation of each fused call that is made."""
    seen: list[str] = []
    from confpred.network import fused

    def counted(x, weight, bias, residual, geometry, activation, place):
        seen.append(activation)
        return forward(x, weight, bias, residual, geometry, activation, place)

    forward = fused.forward
    monkeypatch.setattr(fused, "forward", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_equals_the_original(kind: str, dtype: torch.dtype, calls: list[str]) -> None:
    model, x = made(BLOCKS[kind]()).to(dtype), images(dtype)
    expected = model(x)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert confpred.optimize(model) is model
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x=x), expected)
    assert len(calls) == 2 * len(sites(model))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    confpred.revert(model)
    assert parts(model) == {}
    assert torch.equal(model(x), expected)
    assert all(value.is_contiguous() for value in model.state_dict().values())
    assert not any(name.startswith("_confpred") for name in vars(model))


@torch.no_grad()
def test_what_is_fused() -> None:
    model = confpred.optimize(small())
    model(images())
    assert sites(model) == [
        ("stem", False, "none", False),
        ("blocks.0.conv_pw", True, "silu", False),
        ("blocks.0.conv_dw", True, "silu", False),
        ("blocks.0.se.reduce", False, "silu", False),
        ("blocks.0.se.expand", False, "none", False),
        ("blocks.0.conv_pwl", True, "none", True),
        ("blocks.1.conv1.0", True, "relu", False),
        ("blocks.1.conv2.0", True, "relu", False),
        ("blocks.1.conv3", True, "none", False),
        ("blocks.1.downsample.0", True, "relu", True),
    ]
    model = confpred.optimize(made(BLOCKS["functional"]()))
    model(images())
    assert sites(model) == [
        ("stem", False, "none", False),
        ("blocks.0.a", True, "hardswish", False),
        ("blocks.0.b", False, "relu", True),
        ("blocks.0.a", False, "none", False),  # the other GELU
    ]


@torch.no_grad()
def test_sums_into_a_branch_are_fused() -> None:
    model = confpred.optimize(made(BLOCKS["branches"]()))
    model(images())
    assert [(activation, residual) for _, _, activation, residual in sites(model)] == [
        ("none", False),  # the stem
        ("none", True),
        ("none", True),
        ("gelu", True),
    ]


class InPlace(nn.Module):
    """A convolution whose input is written to before the sum with its output is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        x = x + 0
        y = self.conv(x)
        x.mul_(2)
        x = F.relu(x, True)
        return (y + x).relu()


class Twice(nn.Module):
    """A value before the norm that is used again, and one convolution at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        y = self.conv(x)
        y = self.norm(y) + y
        y = self.conv(y).relu()
        return y + y


class IntoResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        x = x * 1
        again = x
        x += self.conv(x)
        return x + again


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)

    def forward(self, x):
        pooled = x.mean((2, 3), keepdim=True)
        return F.silu(self.conv(x) + pooled), F.relu(self.conv(x[:, :, :3, :3]) + x)


@pytest.mark.parametrize("kind", [InPlace, Twice, IntoResidual, Broadcast])
@torch.no_grad()
def test_what_must_not_be_fused_is_right(kind: type[nn.Module]) -> None:
    model = made(kind()).double()
    expected = model(images(torch.float64))
    confpred.optimize(model)
    torch.testing.assert_close(model(images(torch.float64)), expected)
    assert sites(model)


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = made(BLOCKS["bottleneck"]())

    def forward(self, x):
        return self.inner(x if x.sum() > 0 else -x)


class Deep(nn.Module):
    """An untraceable module inside, and an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), ByValue()

    def forward(self, x, mask=None):
        x = self.first(x)
        return self.second(x if mask is None else x * mask)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 1), None

    def forward(self, x):
        self.last = self.conv(x)
        return self.last.relu()


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(x) + torch.rand(1)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(x if isinstance(x, torch.Tensor) else x[0])


@torch.no_grad()
def test_what_cannot_be_traced_is_called_as_it_is() -> None:
    model, x = Deep().eval(), images()
    expected, masked = model(x), model(x, torch.zeros(1))
    confpred.optimize(model)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x, torch.zeros(1)), masked)
    assert list(parts(model)) == ["", "second.inner"]
    assert len(sites(model)) == 9

    model = confpred.optimize(Keeps().eval())
    torch.testing.assert_close(model(x), model.last.relu())
    assert list(parts(model)) == ["conv"]
    assert type(model.last) is torch.Tensor

    model = confpred.optimize(Makes().eval())
    assert not torch.equal(model(x), model(x))
    assert list(parts(model)) == ["conv"]

    model = Asks().eval()
    expected = model(x)
    torch.testing.assert_close(confpred.optimize(model)(x), expected)


@torch.no_grad()
def test_lists_of_tensors_and_dictionaries() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, xs):
            return {"out": [self.conv(x).relu() for x in xs]}

    model, xs = Many().eval(), [images(), images(batch=1)]
    expected = model(xs)
    torch.testing.assert_close(confpred.optimize(model)(xs), expected)
    assert list(parts(model)) == ["conv"]


CHANGES = {
    "load_state_dict": lambda m, o: m.load_state_dict(o.state_dict()),
    "in place": lambda m, o: m.blocks[0].conv_dw.weight.mul_(2),
    "norm in place": lambda m, o: m.blocks[0].bn2.running_var.add_(1),
    "data": lambda m, o: setattr(m.stem.weight, "data", o.stem.weight.data),
    "norm data": lambda m, o: setattr(m.blocks[0].bn3.bias, "data", torch.ones(8)),
    "parameter": lambda m, o: setattr(m.blocks[0].conv_pw, "weight", o.blocks[0].conv_pw.weight),
    "bias": lambda m, o: setattr(m.blocks[0].conv_pw, "bias", nn.Parameter(torch.ones(16))),
    "buffer": lambda m, o: setattr(m.blocks[0].bn1, "running_mean", torch.ones(16)),
    "dtype": lambda m, o: m.double(),
    "submodule": lambda m, o: setattr(m.blocks[0], "se", nn.Identity()),
    "head": lambda m, o: setattr(m, "head", nn.Identity()),
    "block": lambda m, o: m.blocks.append(nn.Conv2d(8, 8, 1)),
    "training step": lambda m, o: (m.train(), m(images()), m.eval()),
    "training step of a part": lambda m, o: (m.train(), m.blocks[0](m.stem(images())), m.eval()),
    "training norm": lambda m, o: m.blocks[0].bn2.train(),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_no_change_goes_unseen(change: str) -> None:
    model, other = small(), small()
    for parameter in other.parameters():
        parameter.add_(0.1)
    confpred.optimize(model)
    before = model(images())
    CHANGES[change](model, other)
    x = images(next(model.parameters()).dtype)
    found, plain = model(x), confpred.revert(copy.deepcopy(model))
    # A norm in training moves its statistics at each call, but what it returns stays the same.
    torch.testing.assert_close(found, plain(x))
    assert found.shape != before.shape or not torch.allclose(found.float(), before, rtol=1e-3)


def test_what_is_folded_at_one_call_is_used_at_the_next(calls: list[str]) -> None:
    model = confpred.optimize(small())
    with torch.no_grad():
        model(images())
        folds = dict(parts(model)[""]._folds)
        model(images())
    assert parts(model)[""]._folds == folds
    assert len(calls) == 2 * len(sites(model))


def test_training_and_gradients_are_the_originals(
    calls: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confpred.network import forward as forward_module

    monkeypatch.setattr(forward_module, "_warned", False)
    model, x = confpred.optimize(small()), images()
    plain = confpred.revert(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING, logger="confpred"):
        for _ in range(2):
            grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    torch.testing.assert_close(grads, expected)
    assert len(caplog.records) == 1
    assert "inference_mode" in caplog.text
    model.train(), plain.train()
    with torch.no_grad():
        torch.manual_seed(3)
        found = model(x)
        torch.manual_seed(3)
        torch.testing.assert_close(found, plain(x))
    assert calls == []
    model.eval(), plain.eval()
    torch.testing.assert_close(model.requires_grad_(False)(x), plain(x))
    assert calls
    calls.clear()
    model(x.requires_grad_())
    assert calls == []


def test_transforms_tracing_and_subclasses_are_the_originals(calls: list[str]) -> None:
    model, x = small().requires_grad_(False), images()
    expected = model(x)
    confpred.optimize(model)
    many = torch.func.vmap(model)(x.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(many, expected)
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert tangent.abs().sum() > 0

    class Tagged(torch.Tensor):
        pass

    assert type(model(x.as_subclass(Tagged))) is Tagged
    traced = torch.jit.trace(model, x, check_trace=False)
    torch.testing.assert_close(traced(x), expected)
    assert calls == []
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)


@torch.no_grad()
def test_functional_call_takes_the_parameters_it_is_given() -> None:
    model, x = confpred.optimize(small()), images()
    before = model(x)
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    plain = confpred.revert(copy.deepcopy(model))
    expected = torch.func.functional_call(plain, doubled, (x,))
    torch.testing.assert_close(torch.func.functional_call(model, doubled, (x,)), expected)
    torch.testing.assert_close(model(x), before)


@torch.no_grad()
def test_hooks_run_whenever_they_are_added(calls: list[str]) -> None:
    model, x, seen = small(), images(), []
    expected = model(x)
    model.blocks[1].conv3.register_forward_hook(lambda *_: seen.append("before"))
    model.register_forward_pre_hook(lambda *_: seen.append("root"))
    confpred.optimize(model)
    torch.testing.assert_close(model(x), expected)
    assert seen == ["root", "before"]
    fused = len(calls)
    handle = model.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    torch.testing.assert_close(model(x), expected)
    assert seen[2:] == ["root", "after", "before"]
    handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("all"))
    calls.clear()
    model(x)
    everywhere.remove()
    assert seen.count("all") > 30
    assert calls == []
    model(x)
    assert len(calls) <= fused


@torch.no_grad()
def test_copies_and_pickles_stand_alone(calls: list[str]) -> None:
    model, x = confpred.optimize(small()), images()
    expected = model(x)
    copied = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    model.stem.weight.zero_()
    for other in (copied, loaded, copy.deepcopy(copied.forward)._module()):
        if other is None:
            continue
        calls.clear()
        torch.testing.assert_close(other(x), expected)
        assert len(calls) == len(sites(other)) == 10
        assert parts(other)[""] is not parts(model)[""]
        confpred.revert(other)
        assert other.stem.weight.is_contiguous()


def test_an_optimized_model_is_freed_at_once() -> None:
    model = confpred.optimize(small())
    with torch.no_grad():
        model(images())
    weight = weakref.ref(model.blocks[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_refused_and_parametrised_convolutions_are_left_alone() -> None:
    model, x = small(), images()
    nn.utils.parametrizations.weight_norm(model.blocks[1].conv3)
    expected = model(x)
    confpred.optimize(model, filter_fn=lambda module, name: module.groups > 1 or name == "stem")
    torch.testing.assert_close(model(x), expected)
    names = ["stem", "blocks.0.conv_dw", "blocks.1.conv2.0"]
    assert [name for name, *_ in sites(model)] == names
    confpred.optimize(model)
    torch.testing.assert_close(model(x), expected)
    assert len(sites(model)) == 9


@torch.no_grad()
def test_other_layouts_and_kinds_of_convolution() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, groups=4),
    ).eval()
    expected = model(images())
    confpred.optimize(model, channels_last=False)
    found = model(images())
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    assert [name for name, *_ in sites(model)] == ["3"]
    torch.testing.assert_close(model(images()[0]), expected[0])  # no batch


def test_tensors_of_inference_mode_are_left_alone() -> None:
    model = small()
    with torch.inference_mode():
        confpred.optimize(model)
        _check_inference_tensors(model)


def _check_inference_tensors(model: nn.Module) -> None:
    assert len(parts(model)) == 1
    assert not model.stem.weight.is_inference()
    born = confpred.optimize(made(Network(InvertedResidual(8))))
    expected = born(images())
    born.stem.weight.add_(1)
    assert not torch.equal(born(images()), expected)


def test_mixed_precision_on_the_cpu() -> None:
    model, x = small(), images()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        found = confpred.optimize(model)(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


def is_ours(model: torch.nn.Module, layer: str) -> bool:
    """Whether the method of a layer is not its class's."""
    module = model.get_submodule(layer)
    return module.forward.__func__ is not type(module).forward


def test_training_gives_layers_and_root_a_forward() -> None:
    model, x = small().train(), images()
    reference = copy.deepcopy(model)
    confpred.optimize(model, training=True)
    kinds = (torch.nn.Conv2d, torch.nn.Linear, torch.nn.BatchNorm2d)
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    assert sorted(parts(model)) == sorted(["", *layers])
    copied = copy.deepcopy(model)
    for other in (model, copied):
        torch.manual_seed(5)
        grads = torch.autograd.grad(other(x).sum(), list(other.parameters()))
        torch.manual_seed(5)
        wanted = copy.deepcopy(reference)
        expected = torch.autograd.grad(wanted(x).sum(), list(wanted.parameters()))
        torch.testing.assert_close(grads, expected)
    assert copied.blocks[0].conv_dw.forward.__self__ is copied.blocks[0].conv_dw
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert [is_ours(m, "blocks.0.conv_dw") for m in (model, copied, loaded)] == [True, True, False]
    loaded(x)  # which its root sees to
    assert parts(loaded).keys() == parts(model).keys()
    assert is_ours(loaded, "blocks.0.conv_dw")
    assert parts(confpred.revert(loaded)) == {}
    assert parts(confpred.revert(model)) == {}
    assert parts(confpred.optimize(model, training=True, filter_fn=lambda *_: False)) == {}


@pytest.mark.parametrize("inputs", [images(), (images(),), [images()], {"x": images()}])
def test_examples_are_compared_with_the_original(inputs: object) -> None:
    model = confpred.optimize(small(), inputs)
    assert len(sites(model)) == 10


def test_a_wrong_number_is_found_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from confpred.network import fused

    monkeypatch.setattr(fused, "fold", lambda weight, bias, *norm: (weight, norm[3]))
    model = small()
    with pytest.raises(ConfpredError, match="largest difference is"):
        confpred.optimize(model, images())
    assert parts(model) == {}
    assert not model.training


def test_differences_are_told() -> None:
    differ = optimize_module._largest_difference
    one = torch.ones(3)
    bad = torch.tensor([1.0, float("nan"), 1.0])
    tolerance = {torch.float32: 1e-2}
    assert differ([one], [one + 1e-4], tolerance) is None
    assert "0.5" in differ([one], [one + 0.5], tolerance)
    assert "infinite" in differ([bad], [one], tolerance)
    assert differ([bad], [bad], tolerance) is None
    assert "shapes" in differ([one], [], tolerance)
    assert "float64" in differ([one], [one.double()], tolerance)
    assert "whole" in differ([one.int()], [one.int() + 1], tolerance)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((lambda x: x,), "model"),
        ((nn.Conv2d,), "model"),
        ((torch.compile(nn.Linear(1, 1)),), "model"),
        ((nn.Conv2d(3, 3, 1), "an image"), "example_inputs"),
    ],
)
def test_wrong_arguments_are_named(arguments, field) -> None:
    with pytest.raises(InvalidInput) as caught:
        confpred.optimize(*arguments)
    assert caught.value.field == field


def test_other_wrong_arguments_are_named() -> None:
    with pytest.raises(InvalidInput, match="filter_fn"):
        confpred.optimize(nn.Conv2d(3, 3, 1), filter_fn=3)
    with pytest.raises(InvalidInput, match="model"):
        confpred.revert("model")
    model = small()
    assert confpred.revert(model) is model


@torch.no_grad()
def test_tensors_without_memory() -> None:
    model = made(BLOCKS["bottleneck"]())
    expected = model.to("meta")(images().to("meta"))
    assert confpred.optimize(model)(images().to("meta")).shape == expected.shape
    assert confpred.explain(model, images().to("meta")).rows


def test_what_cannot_be_ours_is_not_compiled(monkeypatch) -> None:
    model, compiled = made(Network(InvertedResidual(8))).half(), []
    calls = list(network_problems(model, images(torch.half)))
    assert {call.hindrance for call in calls} == {None, EITHER_LAYOUT}
    monkeypatch.setattr(optimize_module, "_ordinal", lambda _: 0)
    monkeypatch.setattr(optimize_module.driver, "device_of", lambda _: get_device("h200"))
    monkeypatch.setattr(
        optimize_module, "compile_ahead", lambda choices, *_: compiled.extend(choices)
    )
    optimize_module._compile(model, calls)
    assert [c.problem for c in compiled] == [c.problem for c in calls if c.hindrance is None]
    optimize_module._compile(model, [])

"""`confpred.optimize` and `revert`: in place, and nothing but the speed of the model changes."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import weakref
from collections import Counter, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from network_blocks import BLOCKS, CONV, FOLD, LAST, Around, image, images, made
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import confpred
from confpred.errors import ConfpredError, InvalidInput
from confpred.pytorch import network
from confpred.pytorch.rewrite.following import ACTIVATIONS


def is_optimized(model: nn.Module) -> bool:
    return model._compiled_call_impl is not None


def small() -> nn.Module:
    return made(BLOCKS["bottleneck"]()).to(memory_format=LAST)


@pytest.mark.parametrize("kind", ["inverted residual", "functional"])
@torch.no_grad()
def test_equals_the_original_and_keeps_its_names(captured, kind) -> None:
    model, x = made(BLOCKS[kind]()).to(memory_format=LAST), image()
    expected = model(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules, own = [name for name, _ in model.named_modules()], set(vars(model))
    assert confpred.optimize(model, x) is model
    assert is_optimized(model)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x=x), expected)
    assert captured.passes
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [name for name, _ in model.named_modules()] == modules
    assert all(p.stride() == q.stride() for p, q in
               zip(after.values(), before.values(), strict=True))  # fmt: skip
    assert confpred.revert(model) is model
    assert not is_optimized(model)
    assert torch.equal(model(x), expected)
    assert set(vars(model)) - own <= {"_compiled_call_impl"}


@pytest.mark.parametrize("inputs", [
    images(), (images(),), [images(), torch.ones(1)], {"x": images()},
    {"factor": torch.ones(1), "x": images(), "flag": True},
])  # fmt: skip
@torch.no_grad()
def test_examples_are_tensors_tuples_and_dictionaries(captured, inputs) -> None:
    def forward(m, x: Tensor, factor: Tensor | None = None, *, flag: bool = False) -> dict:
        y = m.conv(x) if factor is None else m.conv(x) * factor
        return {"out": [y, -y] if flag else [y]}

    model = Around(forward, conv=nn.Conv2d(3, 3, 1))
    args, named = network.as_arguments(inputs)
    expected = model(*args, **named)
    confpred.optimize(model, inputs)
    count = len(captured.passes)
    torch.testing.assert_close(model(*args, **named), expected)
    assert len(captured.passes) == count == 1


@pytest.mark.parametrize(("arguments", "field"), [
    ({"model": lambda x: x}, "model"), ({"example_inputs": 3}, "example_inputs"),
    ({"example_inputs": "x"}, "example_inputs"), ({"grahps": False}, "options"),
    ({"verify": "all"}, "verify"), ({"max_regret": 0.1}, "max_regret"),
    ({"limits": 3}, "limits"), ({"graphs": None}, "graphs"),
])  # fmt: skip
def test_wrong_arguments_are_named_and_change_nothing(arguments, field) -> None:
    model = small()
    with pytest.raises(InvalidInput) as caught:
        confpred.optimize(**{"model": model, **arguments})
    assert caught.value.field == field
    assert not is_optimized(model)


def test_what_is_compiled_already_is_refused() -> None:
    for function in (confpred.optimize, confpred.revert):
        with pytest.raises(InvalidInput, match="not compiled yet"):
            function(torch.compile(small()))
    with pytest.raises(InvalidInput, match=r"torch\.nn\.Module"):
        confpred.revert(3)


@torch.no_grad()
def test_a_shallow_copy_is_not_optimized(captured) -> None:
    """Neither are other copies: `tests/hazards/programs.py`."""
    model, x = small(), image()
    other = copy.copy(confpred.optimize(model, x))
    assert (is_optimized(model), is_optimized(other)) == (True, False)
    torch.testing.assert_close(other(x), model(x))


class OwnState(nn.Conv2d):
    """A layer that says itself what of it is pickled and copied."""

    def __getstate__(self) -> dict[str, object]:
        return dict(vars(self))


def replica(model: nn.Module) -> nn.Module:
    """Return what `nn.DataParallel` makes for a further device, with parameters of its own."""
    other = model._replicate_for_data_parallel()
    other._parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return other


@pytest.mark.parametrize(("kind", "copied"), [
    (OwnState, copy.deepcopy),
    (OwnState, lambda layer: pickle.loads(pickle.dumps(layer))),  # noqa: S301
    (lambda *sizes: weight_norm(nn.Conv2d(*sizes)), copy.deepcopy), (nn.Conv2d, replica),
])  # fmt: skip
@torch.no_grad()
def test_a_copy_of_all_attributes_runs_with_its_own_weights(captured, kind, copied) -> None:
    """The copy of a model, and that of a part, which warns where it runs alone."""
    model, x = confpred.optimize(nn.Sequential(kind(3, 4, 3))), image()
    for layer in (model[0], confpred.optimize(kind(3, 4, 3))):
        other = copied(layer)
        other.bias = nn.Parameter(layer.bias + 1)
        torch.testing.assert_close(other(x), layer._call_impl(x) + 1)


class Plain(nn.Module):
    """A module without annotations of its own, in which TorchScript reads those of `nn.Module`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@torch.no_grad()
def test_torchscript_reads_an_optimized_a_called_and_a_reverted_model(captured) -> None:
    model, x = nn.Sequential(Plain()), image()
    expected = model(x)
    for change in (confpred.optimize, lambda called: called(x), confpred.revert):
        change(model)
        torch.testing.assert_close(torch.jit.script(model)(x), expected)


@torch.no_grad()
def test_a_wrong_number_is_found_and_undone(captured, monkeypatch) -> None:
    model, x = small(), image()
    expected = model(x)
    monkeypatch.setitem(ACTIVATIONS, torch.ops.aten.relu.default, {(): "silu"})
    with pytest.raises(ConfpredError, match=r"Network is unchanged: an output of norm \S+ is \S+"):
        confpred.optimize(model, x)
    assert not is_optimized(model)
    assert torch.equal(model(x), expected)


def test_a_wrong_gradient_is_found(captured, monkeypatch) -> None:
    from confpred.pytorch.run import convolve

    right = convolve.backward

    def wrong(*given):
        x, weight, bias = right(*given)
        return x, None if weight is None else -weight, bias

    monkeypatch.setattr(convolve, "backward", wrong)  # a kernel with a fault
    with pytest.raises(ConfpredError, match="is unchanged: an output of norm"):
        confpred.optimize(small().train(), image())


def conv_and_norm(function) -> Around:
    """Return a module whose forward is a function of what its two layers give."""
    layers = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8)}
    return Around(lambda m, x: function(m.norm(m.conv(x))), **layers).to(memory_format=LAST)


def test_a_forward_that_raises_leaves_the_model_as_it_was(captured) -> None:
    model = conv_and_norm(lambda y: y.view(-1, 7)).train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfpredError, match="Around is unchanged"):
        confpred.optimize(model, image())
    assert not is_optimized(model)
    torch.testing.assert_close(dict(model.state_dict()), dict(before))
    with pytest.raises(RuntimeError, match="invalid for input"):
        model(image())


def test_a_failure_leaves_an_optimized_model_optimized(captured) -> None:
    model, x = small(), image()
    with torch.no_grad():
        confpred.optimize(model, x)
        former = model._compiled_call_impl
        with pytest.raises(ConfpredError):
            confpred.optimize(model, torch.ones(2, 5, 4, 4))
        assert model._compiled_call_impl is former
        torch.testing.assert_close(model(x), confpred.revert(copy.deepcopy(model))(x))


@pytest.mark.parametrize("training", [True, False])
def test_buffers_gradients_and_random_numbers_stay(captured, training) -> None:
    model, x = conv_and_norm(F.dropout).train(training), image()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    random.seed(7)
    with torch.set_grad_enabled(training):
        confpred.optimize(model, x)
    drawn, python = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    assert torch.equal(drawn, torch.rand(3))
    assert python == random.random()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert model.training is training


@torch.no_grad()
def test_numbers_that_python_draws_stay(captured) -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    confpred.optimize(conv_and_norm(lambda y: y * random.random()).eval(), image())
    assert random.random() == expected


class Keeps(nn.Module):
    """Keeps numbers in containers of all kinds, and draws from generators."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.drawn = deque(maxlen=2), torch.Generator().manual_seed(5)
        self.by_name = {"means": [], "calls": Counter()}
        self.by_name["itself"] = self.by_name

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(x.mean())
        self.by_name["means"].append(x.mean())
        self.by_name["calls"]["all"] += 1
        return x * torch.rand(1, generator=self.drawn) * float(np.random.rand())


@torch.no_grad()
def test_containers_and_generators_stay(captured) -> None:
    found = []
    for examples in ((), (image(),)):
        np.random.seed(3)
        model = confpred.optimize(Keeps(), *examples)
        assert (len(model.last), model.by_name["means"], *model.by_name["calls"]) == (0, [])
        found.append((model(image()), model.by_name["calls"]["all"]))
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_a_network_of_pytorchs_modules_alone_is_captured(captured) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    model.to(memory_format=LAST)
    confpred.optimize(model, image())
    (done,) = captured.passes
    assert done.targets() == [FOLD, CONV]
    layer = confpred.optimize(nn.Conv2d(3, 4, 1).eval(), image())
    layer(image())
    assert len(captured.passes) == 2


@torch.no_grad()
def test_many_models_of_one_class_are_captured(captured) -> None:
    """Dynamo keeps a limited number of graphs for one function."""
    x = image()
    models = [nn.Sequential(nn.Conv2d(3, 2 + i, 1), nn.ReLU()).eval() for i in range(10)]
    for model in models:
        confpred.optimize(model, x)
    assert len(captured.passes) == len(models)
    for model in models:
        torch.testing.assert_close(model(x), model._call_impl(x))
    assert len(captured.passes) == len(models)


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "confpred"]


class Breaks(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x).relu()
        torch._dynamo.graph_break()
        x = self[0](x).relu()
        torch._dynamo.graph_break()
        return self[0](x)


@torch.no_grad()
def test_breaks_of_the_graph_are_named_once(captured, caplog) -> None:
    model, x = Breaks(nn.Conv2d(3, 3, 1)).to(memory_format=LAST), image()
    expected = model(x)
    with caplog.at_level(logging.WARNING, logger="confpred"):
        confpred.optimize(model, x)
        torch.testing.assert_close(model(x), expected)
    (said,) = warnings(caplog)
    assert said.startswith("Breaks is captured in parts, cut where: ")
    assert "\n" not in said
    assert len(captured.passes) == 3


@torch.no_grad()
def test_a_network_that_is_captured_whole_is_not_worth_a_word(captured, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="confpred"):
        confpred.optimize(small(), image())
    assert warnings(caplog) == []


@pytest.mark.filterwarnings("error")
def test_training_is_captured_where_warnings_are_errors(captured) -> None:
    """PyTorch 2.13 warns where a copy of a joint graph is made."""
    model = confpred.optimize(small().train())
    model(image()).sum().backward()
    assert {found.kind for found in captured.passes} == {"forward", "backward"}


@torch.no_grad()
def test_what_changes_with_any_rounding_is_told(captured, caplog, monkeypatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, torch.ops.aten.relu.default, {(): "silu"})
    with caplog.at_level(logging.WARNING, logger="confpred"):
        confpred.optimize(conv_and_norm(lambda y: (F.relu(y) * 1e7).sin()).eval(), image())
    (said,) = warnings(caplog)
    assert said.startswith("the outputs of Around cannot be compared")


@torch.no_grad()
def test_an_open_batch(captured) -> None:
    model = confpred.optimize(small(), image(), dynamic=True)
    for batch in (3, 5, 4):
        torch.testing.assert_close(model(image(batch)), model._call_impl(image(batch)))
    assert len(captured.passes) == 1


@torch.no_grad()
def test_sizes_that_change_are_captured_again(captured) -> None:
    model = confpred.optimize(small(), image())
    for batch in (1, 3, 5, 7, 1):
        torch.testing.assert_close(model(image(batch)), model._call_impl(image(batch)))
    assert len(captured.passes) <= 4


@torch.no_grad()
def test_a_model_has_no_open_sizes_because_another_had_other_inputs(captured) -> None:
    """A GAN's generator and its critic, or networks that are compared with one another."""
    for x in (image()[:, :, 0, 0], image(), image(3)):
        layer = nn.Linear(x.shape[1], 4) if x.dim() == 2 else nn.Conv2d(x.shape[1], 4, 3)
        model = confpred.optimize(nn.Sequential(layer), x)
        assert "open sizes" not in str(confpred.status(model))


def test_a_validation_with_another_batch_opens_no_size(captured) -> None:
    model = confpred.optimize(small())
    for training, batch in ((True, 2), (False, 5), (True, 2), (False, 5)):
        with torch.set_grad_enabled(training):
            model.train(training)(image(batch))
    found = confpred.status(model)
    assert "open sizes" not in str(found)
    assert (found.captures, found.parts) == (2, 1)


@torch.no_grad()
def test_hooks_that_are_added_later_run(captured) -> None:
    """Dynamo's guards do not look for them unless they are told to."""
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    model, x = small(), image()
    expected = model(x)
    confpred.optimize(model, x)
    assert torch._dynamo.config.skip_nnmodule_hook_guards is before
    model.register_forward_hook(lambda _, __, out: out * 2)
    torch.testing.assert_close(model(x), 2 * expected)


@torch.no_grad()
def test_the_original_is_freed(captured) -> None:
    model = confpred.optimize(small(), image())
    reference = weakref.ref(model)
    captured.passes.clear()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert reference() is None


def test_differences_are_told() -> None:
    one = torch.ones(3)
    tell = network._describe_difference
    assert tell([one], [one.clone()]) is None
    assert tell([one], [one + 1e-6]) is None
    assert "0.866 off" in tell([one], [one * 1.5])
    assert "other shapes" in tell([one], [one[:2]])
    assert "other shapes" in tell([one], [])
    assert "torch.float32 and not of torch.float64" in tell([one], [one.double()])
    assert "whole numbers" in tell([one.int()], [one.int() + 1])
    assert "infinite" in tell([one / 0], [one])
    assert tell([one / 0], [one / 0]) is None
    assert tell([one * float("nan")], [one * float("nan")]) is None
    turned = one * 1j
    assert tell([turned], [turned * (1 + 1e-6)]) is None
    assert "0.866 off" in tell([turned], [turned * 1.5])


def test_an_argument_may_have_any_name(captured) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, captured: float, self_: float = 0.0) -> Tensor:
            return x * captured + self_

    model = confpred.optimize(Named())
    assert model(torch.ones(2), captured=3.0, self_=1.0).tolist() == [4.0, 4.0]

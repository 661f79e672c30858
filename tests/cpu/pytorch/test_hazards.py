"""Hazards inside a forward and between calls of an optimized model: outputs, gradients and buffers
are those of eager mode, or there is a clear error. `tests/hazards` has the programs, which run here
where they say something on a CPU; the cases in this file are small, fast, and none of them there.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS, compare
from network_blocks import LAST, Around, image, made
from slow import slow_but
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize
from torch.utils import checkpoint

import confpred
from confpred.pytorch import inductor


@pytest.fixture(autouse=True)
def _captured(captured) -> None:
    """All tests here capture as on a GPU."""


class Net(nn.Module):
    """Convolutions, a norm and an activation, after a function of the model and an image."""

    def __init__(self, function: Callable[[Net, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.function = function
        self.scale: Any = 2.0

    def forward(self, x: Tensor) -> Any:
        if self.function is not None:
            x = self.function(self, x)
        x = F.relu(self.norm(self.conv(x))) * self.scale
        return self.last(x)


def net(function: Callable[[Net, Tensor], Any] | None = None, *, training: bool = False) -> Net:
    return made(Net(function)).train(training).to(memory_format=LAST)


def both(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return an optimized model, and a copy that is not."""
    plain = copy.deepcopy(model)
    return confpred.optimize(model), plain


def same(ours: nn.Module, plain: nn.Module, *inputs: Tensor, gradients: bool = False) -> None:
    """Compare one call and its inputs after it, and with gradients one backward pass."""
    mine, other = (_results(model, inputs, gradients) for model in (ours, plain))
    torch.testing.assert_close(mine, other)


def _results(model: nn.Module, inputs: tuple[Tensor, ...], gradients: bool) -> list[Any]:
    given = [x.detach().clone().requires_grad_(gradients) for x in inputs]
    torch.manual_seed(5)
    random.seed(5)
    with torch.set_grad_enabled(gradients):
        out = model(*given)
    grads: list[Tensor | None] = []
    if out.requires_grad:
        model.zero_grad()
        out.square().mean().backward()
        grads = [p.grad for p in model.parameters()] + [x.grad for x in given]
    found = [g for g in grads if g is not None]
    return [out.detach(), given, len(found), found, list(model.buffers())]


MAKES = {
    "zeros": lambda m, x: torch.cat([x, torch.zeros((x.shape[0], 3, *x.shape[2:]))], 0),
    "full of a value": lambda m, x: x + torch.full((1,), x.mean().item()),
    "tensor": lambda m, x: x * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1),
    "autocast off": lambda m, x: _with(torch.autocast("cpu", enabled=False), lambda: x @ x.mT @ x),
    "no_grad": lambda m, x: x + _with(torch.no_grad(), lambda: m.norm.weight.sum() * x),
    "asks for autocast": lambda m, x: x * (2 if torch.is_autocast_enabled("cpu") else 1),
    "asks for gradients": lambda m, x: x * (2 if torch.is_grad_enabled() else 1),
    "asks for the dtype": lambda m, x: x if x.dtype is torch.float32 else x * 2,
    "asks for a size": lambda m, x: x * (2 if x.shape[0] > 2 else 1),
    "in place": lambda m, x: (x + 1).mul_(2).add_(x),
    "into a slice": lambda m, x: _filled(x.clone()),
    "a conjugate view": lambda m, x: torch.complex(x, x).conj().imag,
    "a negative view": lambda m, x: torch._neg_view(x),
    "a gap": lambda m, x: torch.cat([x, x], 1)[:, ::2],
    "expanded": lambda m, x: x[:1].expand(3, -1, -1, -1),
    "one pixel": lambda m, x: x[:, :, :1, :1],
    "no image": lambda m, x: x[:0],
    "transposed": lambda m, x: x.mT,
    "float64 inside": lambda m, x: F.conv2d(x.double(), m.conv.weight.double()[:3]).float(),
    "random numbers of Python": lambda m, x: x * (1 + random.random()),
    "random numbers": lambda m, x: F.dropout(x + torch.rand_like(x), 0.5),
}  # fmt: skip


def _filled(x: Tensor) -> Tensor:
    x[:, 1:, ::2] = 3.0
    return x


def _with(context: Any, function: Callable[[], Tensor]) -> Tensor:
    with context:
        return function()


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_does(kind: str, training: bool) -> None:
    same(*both(net(MAKES[kind], training=training)), image(), gradients=training)


@pytest.mark.parametrize("function", [
    lambda m, x: x.mul_(2), lambda m, x: x.add_(m.scale), lambda m, x: _filled(x),
    lambda m, x: F.relu(x, inplace=True),
])  # fmt: skip
def test_what_a_forward_writes_to_its_input(function: Any) -> None:
    ours, plain = both(net(function))
    for _ in range(2):
        same(ours, plain, image())


def _swapped(weight: Tensor) -> None:
    """Double a weight by `swap_tensors`, which PyTorch before 2.13 refuses once it is captured."""
    double = nn.Parameter(weight.detach() * 2)
    with suppress(RuntimeError):
        torch.utils.swap_tensors(weight, double)
        return
    weight.data = double.data


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "scale", 3.5),
    "a tensor for a number": lambda m: setattr(m, "scale", torch.tensor(1.5)),
    "a function": lambda m: setattr(m, "function", lambda model, x: x * 2),
    "the forward": lambda m: setattr(m, "forward", lambda x: m.last(m.conv(x)).sin()),
    "a hook": lambda m: m.conv.register_forward_hook(lambda _, __, out: out * 2),
    "a hook of the root": lambda m: m.register_forward_hook(lambda _, __, out: out - 1),
    "a layer": lambda m: setattr(m, "conv", nn.Conv2d(3, 4, 1, bias=False).requires_grad_(False)),
    "a norm by nothing": lambda m: setattr(m, "norm", nn.Identity()),
    "eps": lambda m: setattr(m.norm, "eps", 0.5),
    "momentum": lambda m: setattr(m.norm, "momentum", 0.9),
    "stride": lambda m: setattr(m.last, "stride", (2, 2)),
    "data": lambda m: m.conv.weight.data.mul_(2),
    "data of a norm": lambda m: m.norm.running_var.data.add_(1),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "swap_tensors": lambda m: _swapped(m.conv.weight),
    "train": lambda m: m.train(),
    "train and eval": lambda m: (m.train(), m(image()), m.eval()),
    "a norm in training": lambda m: m.norm.train(),
    "float64": lambda m: m.double().float(),
    "frozen": lambda m: m.conv.requires_grad_(False),
    "parametrised": lambda m: parametrize.register_parametrization(m.conv, "weight", Doubled()),
}
#: Changes that inference does not show, or not all of.
OF_TRAINING = ("momentum", "train", "train and eval", "a norm in training", "frozen", "eps", "data")


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_between_calls_goes_unseen(change: str) -> None:
    ours, plain = both(net())
    gradients = change in OF_TRAINING

    def result() -> Tensor:
        same(ours, plain, image(), gradients=gradients)
        with torch.set_grad_enabled(gradients):
            found, _ = ours(image()), plain(image())
        return found.detach()

    before = result()
    for model in (ours, plain):
        torch.manual_seed(4)
        CHANGES[change](model)
    after = result()
    if change not in ("momentum", "float64", "frozen"):
        assert after.shape != before.shape or not torch.allclose(after, before, rtol=1e-3)
    confpred.revert(ours)
    result()


@pytest.mark.parametrize("frozen", ["conv", "norm", "last", "conv.weight", "conv.bias"])
def test_mixed_needs_of_gradients(frozen: str) -> None:
    model = net(training=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    same(*both(model), image(), gradients=True)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(training=True)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint.checkpoint(self.net, x * 1, use_reentrant=True)


def test_a_checkpoint_of_the_old_kind_inside() -> None:
    """PyTorch's capture updates statistics once, eager mode again when it computes again."""
    ours, plain = both(Checkpointed())
    same(ours, torch.compile(plain, backend="aot_eager"), image(), gradients=True)


def test_a_fork_after_use_computes() -> None:
    ours, plain = both(net())
    x = image()
    with torch.no_grad():
        expected = plain(x)
        ours(x)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        with torch.no_grad():
            right = torch.allclose(ours(x), expected, atol=1e-5)
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_transforms_of_torch_func() -> None:
    ours, plain = both(net())
    parameters = {n: p.detach() for n, p in plain.named_parameters()}
    buffers, x = dict(plain.named_buffers()), image()

    def loss(model: nn.Module) -> Callable[..., Tensor]:
        return lambda p: torch.func.functional_call(model, (p, buffers), (x,)).square().sum()

    found, expected = (torch.func.grad(loss(m))(parameters) for m in (ours, plain))
    torch.testing.assert_close(found, expected)
    many = torch.stack([x, x * 2])
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(ours)(many), torch.func.vmap(plain)(many))


@pytest.mark.parametrize("wrap", [parametrizations.orthogonal, parametrizations.spectral_norm])
def test_parametrised_layers(wrap: Any) -> None:
    model = net()
    wrap(model.conv)
    ours, plain = both(model.eval())
    for _ in range(2):
        same(ours, plain, image())


def test_meta_tensors_are_pytorchs() -> None:
    model = net().to("meta")
    assert confpred.optimize(model)(image().to("meta")).device.type == "meta"


#: Programs of half a second and less, which the fast tests run too.
FAST = (
    "a_graph_retained", "checkpointing_inside_the_forward", "exported", "gradients_of_gradients",
    "hooks_on_saved_tensors", "mixed_dtypes_into_conv2d", "parameters_of_a_functional_call",
    "reverted_at_any_time", "subclasses_of_tensors", "an_optimizer_that_has_state_already",
    "control_flow_operators", "gradients_viewed_flat", "methods_of_a_class_replaced",
    "one_norm_for_several_tensors", "one_value_a_channel", "operators_that_read_memory_in_order",
)  # fmt: skip
ON_THE_CPU = [name for name, found in HAZARDS.items() if not found.needs_gpu]


@pytest.mark.parametrize("name", slow_but(FAST, ON_THE_CPU, "it captures a hundred programs"))
def test_a_program_computes_the_same(captured, name: str) -> None:
    found = HAZARDS[name]
    compare(found, "cpu")
    ran = [target for done in captured.passes for target in done.targets()]
    if found.kernels and not found.refused:
        assert sum(target.startswith("confpred.") for target in ran) >= found.layers
    assert sum(target.startswith("confpred.batch_norm") for target in ran) >= found.norms


@pytest.mark.slow(reason="Inductor compiles programs in C++; all hazards are for a GPU")
@pytest.mark.parametrize("name", [
    "a_model_that_writes_its_input", "batches_of_none_and_one",
    "training_and_inference_in_turns", "views_with_odd_memory_into_models",
])  # fmt: skip
def test_a_program_computes_the_same_with_inductor(name: str) -> None:
    compare(HAZARDS[name], "cpu", inductor=True)


@pytest.mark.slow(reason="Inductor compiles a program in C++")
@torch.no_grad()
def test_inductor_writes_to_a_negative_view() -> None:
    found = []
    for optimized in (False, True):
        model = Around(lambda m, x: m.conv(x.add_(1)), conv=nn.Conv2d(3, 3, 1)).eval()
        nn.init.constant_(model.conv.weight, 0.5)
        nn.init.zeros_(model.conv.bias)
        if optimized:
            confpred.optimize(model, inductor=True)
        x = torch._neg_view(image())
        found.append((model(x), x))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow(reason="Inductor compiles a program in C++")
def test_inductor_takes_inputs_of_another_layout() -> None:
    """PyTorch 2.11 sees no change of a parameter's layout and calls the program of the old one."""
    with FakeTensorMode():
        like = torch.empty(2, 3, 5, 5).contiguous(memory_format=LAST)
        gm = make_fx(lambda x: (x.sin(),))(like)
    run = inductor.compiled(gm, [like], [0], [], None, "inference")
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(run([x])[0], x.sin())


def test_inductor_gets_no_empty_batch() -> None:
    """It expects another layout of such a gradient than PyTorch returns."""
    model = Net().eval()
    confpred.optimize(model, inductor=True)
    model(image(batch=0)).sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)

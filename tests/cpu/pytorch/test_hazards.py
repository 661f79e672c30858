"""Hazards inside a forward and between calls of an optimized model: outputs, gradients and buffers
are those of eager mode, or there is a clear error. `tests/hazards` has the programs, which run here
where they say something on a CPU; the cases in this file are small, fast, and none of them there.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS, compare, ranks
from network_blocks import LAST, Around, image, made
from slow import slow_but
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint

import confpred
from confpred.pytorch.rewrite import inductor


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
    "tensor": lambda m, x: x * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1),
    "into a slice": lambda m, x: _filled(x.clone()),
    "one pixel": lambda m, x: x[:, :, :1, :1],
    "transposed": lambda m, x: x.mT,
    "float64 inside": lambda m, x: F.conv2d(x.double(), m.conv.weight.double()[:3]).float(),
    "random numbers": lambda m, x: F.dropout(x + torch.rand_like(x), 0.5),
}  # fmt: skip


def _filled(x: Tensor) -> Tensor:
    x[:, 1:, ::2] = 3.0
    return x


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_does(kind: str, training: bool) -> None:
    same(*both(net(MAKES[kind], training=training)), image(), gradients=training)


@pytest.mark.parametrize("function", [
    lambda m, x: x.add_(m.scale), lambda m, x: _filled(x), lambda m, x: F.relu(x, inplace=True),
])  # fmt: skip
def test_what_a_forward_writes_to_its_input(function: Any) -> None:
    ours, plain = both(net(function))
    for _ in range(2):
        same(ours, plain, image())


@pytest.mark.parametrize("change", [
    lambda m: setattr(m.norm, "eps", 0.5), lambda m: setattr(m.norm, "momentum", 0.9),
    lambda m: setattr(m.last, "stride", (2, 2)), lambda m: m.norm.running_var.data.add_(1),
])  # fmt: skip
def test_no_change_of_a_layer_goes_unseen(change: Callable[[Any], Any]) -> None:
    ours, plain = both(net(training=True))
    same(ours, plain, image(), gradients=True)
    for model in (ours, plain):
        change(model)
    same(ours, plain, image(), gradients=True)


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


def test_meta_tensors_are_pytorchs() -> None:
    model = net().to("meta")
    assert confpred.optimize(model)(image().to("meta")).device.type == "meta"


#: Programs of a second or two, which the fast tests run too.
FAST = (
    "classes_and_submodules_swapped_later", "gradients_of_gradients", "tensors_made_from_values",
    "transforms_of_functions", "weights_written_through_data", "mixed_dtypes_into_conv2d",
    "parameters_of_a_functional_call",
    "control_flow_operators", "gradients_viewed_flat", "methods_of_a_class_replaced",
    "one_norm_for_several_tensors", "one_value_a_channel", "operators_that_read_memory_in_order",
)  # fmt: skip
#: Those of lines and volumes are in ``test_ranks.py``, where launches are seen.
ON_THE_CPU = [
    name for name, found in HAZARDS.items()
    if not found.needs_gpu and found.program.__module__ != ranks.__name__
]  # fmt: skip


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


@pytest.mark.slow(reason="graphs compile twice; all hazards were run so, by hand")
@pytest.mark.parametrize("name", [
    "gradients_of_gradients", "parameters_of_a_functional_call", "transforms_of_functions",
    "weights_written_through_data",
])  # fmt: skip
def test_a_program_computes_the_same_where_its_graphs_are_timed(name: str) -> None:
    compare(HAZARDS[name], "cpu", verify="network")


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
    program = inductor.compile_pass(gm, [like], [0], None, "inference")
    run = inductor.accept_any_layout(*program, [])
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(run([x])[0], x.sin())


def test_inductor_gets_no_empty_batch() -> None:
    """It expects another layout of such a gradient than PyTorch returns."""
    model = Net().eval()
    confpred.optimize(model, inductor=True)
    model(image(batch=0)).sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)

"""Hazards around an optimized model: gradients, dtypes, modes, threads and other tools.
The results are those of eager mode, or there is a clear error; see `test_hazards`."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_blocks import BLOCKS, made
from optimized_pairs import LAST, both, image, net, same
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

import confpred
from confpred.errors import ConfpredError


@pytest.fixture(autouse=True)
def _captured(captured) -> None:
    """All tests here capture as on a GPU."""


# --------------------------------------------------------------------------------- gradients


class Many(nn.Module):
    """One norm and one convolution at two places each, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.tied = nn.Conv2d(3, 3, 3, padding=1)
        self.tied.weight = self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        return self.tied(self.norm(self.conv(x)))


@pytest.mark.parametrize("training", [False, True])
def test_layers_that_are_called_twice_and_tied_weights(training: bool) -> None:
    ours, plain = both(made(Many()).train(training).to(memory_format=LAST))
    same(ours, plain, image(), gradients=True)
    same(ours, plain, image(), gradients=True)
    assert ours.norm.num_batches_tracked == (4 if training else 0)


def test_hooks_of_parameters_and_gradients() -> None:
    ours, plain = both(net(training=True))
    seen: list[list[float]] = []
    for model in (ours, plain):
        seen.append(found := [])
        model.conv.weight.register_hook(lambda g, f=found: f.append(float(g.sum())) or g * 2)
        model.norm.weight.register_post_accumulate_grad_hook(
            lambda p, f=found: f.append(float(p.grad.sum()))
        )
        model.last.register_full_backward_hook(
            lambda m, given, grads, f=found: f.append(float(grads[0].sum()))
        )
    same(ours, plain, image(), gradients=True)
    assert len(seen[0]) == len(seen[1]) == 3
    torch.testing.assert_close(sorted(seen[0]), sorted(seen[1]))


def test_accumulation_retained_graphs_and_other_strides() -> None:
    ours, plain = both(net(training=True))
    for model in (ours, plain):
        for _ in range(2):
            out = model(image())
            out.sum().backward(retain_graph=True)  # a gradient that is expanded
            out.contiguous().backward(
                torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
            )
            out = model(image())
            out.mT[..., 1:].square().sum().backward()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_anomaly_mode_and_saved_tensor_hooks() -> None:
    ours, plain = both(net(training=True))
    packed = []
    with (
        torch.autograd.set_detect_anomaly(True),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(1) or t.clone(), lambda t: t
        ),
    ):
        same(ours, plain, image(), gradients=True)
    assert packed


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(inside: bool, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(training=True)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint.checkpoint(self.net, x * 1, use_reentrant=reentrant)

    model = Checkpointed()
    plain = copy.deepcopy(model)
    confpred.optimize(model if inside else model.net)
    if not inside:
        same(model, plain, image(), gradients=True)
        return
    # PyTorch's capture updates statistics once, eager mode again when it computes again.
    captured = torch.compile(plain, backend="aot_eager")
    for _ in range(2):
        for m, call in ((model, model), (plain, captured)):
            m.zero_grad()
            call(image()).square().mean().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_gradients_of_gradients_are_refused_in_words() -> None:
    ours, x = confpred.optimize(net()), image().requires_grad_()
    (grad,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.square().sum().backward()


@pytest.mark.parametrize("frozen", ["conv", "norm", "last", "conv.weight", "conv.bias"])
def test_mixed_needs_of_gradients(frozen: str) -> None:
    model = net(training=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    same(*both(model), image(), gradients=True)


# --------------------------------------------------------------------- dtypes, modes, threads


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    ours, plain = both(net().to(dtype))
    with torch.no_grad():
        found, expected = ours(image(dtype=dtype)), plain(image(dtype=dtype))
    tolerance = {} if dtype is torch.float64 else {"rtol": 0.03, "atol": 0.1}
    torch.testing.assert_close(found, expected, **tolerance)
    for model in (ours, plain):
        model.float()
    same(ours, plain, image())


def test_mixed_dtypes_are_refused_as_pytorch_does() -> None:
    ours, plain = both(net())
    with pytest.raises(RuntimeError, match="type"):
        plain(image(dtype=torch.float64))
    with pytest.raises(RuntimeError, match="type"):
        ours(image(dtype=torch.float64))
    same(ours, plain, image())


def test_inference_mode_beside_no_grad() -> None:
    ours, plain = both(net())
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(ours(image()), plain(image()))
    with torch.inference_mode():
        x = image()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x))


def test_sizes_that_change() -> None:
    ours, plain = both(net())
    for batch, height in ((2, 19), (1, 19), (5, 19), (2, 11), (3, 7), (2, 19), (1, 1)):
        same(ours, plain, image(batch)[:, :, :height])


def test_calls_from_other_threads() -> None:
    ours, plain = both(net(training=True).eval())
    wrong: list[BaseException] = []

    def call() -> None:
        try:
            for batch in (2, 3):
                x = image(batch)  # once: threads share the seed
                with torch.no_grad():
                    torch.testing.assert_close(ours(x), plain(x))
                (mine,) = torch.autograd.grad(ours(x).sum(), ours.conv.weight)
                (other,) = torch.autograd.grad(plain(x).sum(), plain.conv.weight)
                torch.testing.assert_close(mine, other)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    call()
    assert not wrong, wrong


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


# ------------------------------------------------------------------------- beside other tools


def test_compilers_around_and_beside() -> None:
    ours, plain = both(net())
    outer = torch.compile(nn.Sequential(ours, nn.ReLU()), backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(outer(image()), F.relu(plain(image())))
        again = torch.compile(ours, backend="aot_eager")
        torch.testing.assert_close(again(image()), plain(image()))
        torch.testing.assert_close(ours(image()), plain(image()))


def test_export_and_torchscript() -> None:
    ours, plain = both(net())
    x = image()
    with torch.no_grad():
        exported = torch.export.export(ours, (x,)).module()
        torch.testing.assert_close(exported(x), plain(x))
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace a dynamo-optimized function"):
            torch.jit.trace(ours, x)
        torch.testing.assert_close(ours(x), plain(x))
        torch.testing.assert_close(torch.jit.trace(confpred.revert(ours), x)(x), plain(x))


def test_transforms_of_torch_func() -> None:
    ours, plain = both(net())
    parameters = {n: p.detach() for n, p in plain.named_parameters()}
    buffers, x = dict(plain.named_buffers()), image()

    def loss(model: nn.Module) -> Callable[..., Tensor]:
        return lambda p: torch.func.functional_call(model, (p, buffers), (x,)).square().sum()

    found, expected = (torch.func.grad(loss(m))(parameters) for m in (ours, plain))
    torch.testing.assert_close(found, expected)
    doubled = {n: p * 2 for n, p in parameters.items()}
    found, expected = (torch.func.functional_call(m, doubled, (x,)) for m in (ours, plain))
    torch.testing.assert_close(found, expected)
    many = torch.stack([x, x * 2])
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(ours)(many), torch.func.vmap(plain)(many))


class Tagged(Tensor):
    """A subclass without anything of its own."""


def test_subclasses_of_tensors() -> None:
    ours, plain = both(net())
    x = image().as_subclass(Tagged)
    with torch.no_grad():
        # PyTorch's check of custom operators, at the first call, takes no subclass.
        with pytest.raises(TypeError, match="Multiple dispatch failed"):
            ours(x)
        found, expected = ours(x), plain(x)
    torch.testing.assert_close(found.as_subclass(Tensor), expected.as_subclass(Tensor))


@pytest.mark.parametrize("wrap", [
    parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm,
])  # fmt: skip
def test_parametrised_layers(wrap: Any) -> None:
    model = net()
    wrap(model.conv)
    ours, plain = both(model.eval())
    for _ in range(2):
        same(ours, plain, image())


def test_meta_tensors_are_pytorchs() -> None:
    model = net().to("meta")
    assert confpred.optimize(model)(image().to("meta")).device.type == "meta"


def test_a_model_that_cannot_run_is_as_it_was() -> None:
    model = net()
    with pytest.raises(ConfpredError, match="Net is as it was"):
        confpred.optimize(model, torch.ones(2, 7, 9, 9))
    same(model, copy.deepcopy(model), image())


@pytest.mark.slow(reason="each block is captured in every mode")
@pytest.mark.parametrize("kind", BLOCKS)
def test_revert_and_modes_at_any_time(kind: str) -> None:
    model = made(BLOCKS[kind]()).to(memory_format=LAST)
    plain = copy.deepcopy(model)
    for turn in range(4):
        (confpred.revert if turn == 2 else confpred.optimize)(model)
        for m in (model, plain):
            m.train(turn % 2 == 1)
            for part in m.modules():
                if type(part).__name__ == "DropPath":
                    part.eval()
        same(model, plain, image())

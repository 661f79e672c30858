"""Inputs, outputs, switches and modes around a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import confpred
from hazards.base import LAST, Run, hazard, loss_of, switched


@hazard()
def outputs_kept_while_the_next_calls_run(run: Run) -> Any:
    model = run.optimize(run.network())
    kept = run.infer(model, 6)
    copies = [x.clone() for x in kept]
    run.infer(model, 4, seed=20)
    for x, then in zip(kept, copies, strict=True):
        assert torch.equal(x, then)
    model = run.optimize(run.network(train=True))
    kept = [run.step(model, run.floats(seed)) for seed in range(6)]
    copies = [x.clone() for x in kept]
    run.train(model)
    for x, then in zip(kept, copies, strict=True):
        assert torch.equal(x, then)
    return kept


@hazard()
def outputs_and_inputs_written_by_the_caller(run: Run) -> Any:
    model, found = run.optimize(run.network()), []
    x = run.images()
    with torch.no_grad():
        for seed in range(5):
            out = model(x)
            found.append(out.clone())
            out.mul_(0).add_(7)
            found.append(model(x).clone())
            x.copy_(run.images(seed + 10))
        found.append(model(x[1:3].mul_(2)))
    run.changed(found[0], found[-2])
    return found, x


@hazard(kernels=False)
def an_output_fed_back(run: Run) -> Any:
    model = run.optimize(run.network(nn.Conv2d, 3, 3, 3, 1, 1, 1, 1, False), None)
    x = run.images()
    with torch.no_grad():
        for _ in range(6):
            x = model(x)
    return x


SWITCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.backends.cudnn, "enabled", False),
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cudnn, "deterministic", True),
    (torch.backends.cudnn, "allow_tf32", False),
)


@hazard()
def switches_of_cudnn_turned_between_calls(run: Run) -> Any:
    model, trained = run.optimize(run.network()), run.optimize(run.network(train=True))
    found = [run.infer(model), run.train(trained)]
    for owner, name, value in SWITCHES:
        with switched(owner, name, value):
            found += [run.infer(model), run.train(trained)]
        found += [run.infer(model, 1), run.train(trained, steps=1)]
    return found


@hazard()
def captured_without_cudnn(run: Run) -> Any:
    model, trained = run.optimize(run.network()), run.optimize(run.network(train=True))
    with switched(torch.backends.cudnn, "enabled", False):
        found = [run.infer(model), run.train(trained)]
    return found, run.infer(model), run.train(trained)


@hazard()
def deterministic_algorithms_turned_between_calls(run: Run) -> Any:
    """While they are asked for, results repeat to the bit."""
    model = run.optimize(run.network(train=True))
    found = [run.train(model)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        grads = []
        for _ in range(6):
            model.zero_grad()
            run.step(model, run.floats())
            grads.append([p.grad.clone() for p in model.parameters() if p.dim() == 4])
        assert all(
            torch.equal(a, b) for other in grads for a, b in zip(grads[-1], other, strict=True)
        )
        found.append(grads[0])
    finally:
        torch.use_deterministic_algorithms(False)
    return found, run.train(model)


@hazard(needs_gpu=True)
def tf32_switched_off_is_exact(run: Run) -> Any:
    model = run.optimize(run.network().float())
    exact = run.network().double()
    for allowed in (True, False, True, False):
        with switched(torch.backends.cudnn, "allow_tf32", allowed), torch.no_grad():
            for seed in range(3):
                x = run.floats(seed)
                off = (model(x).double() - exact(x.double())).norm() / exact(x.double()).norm()
                assert allowed or off < 2e-5, off
    return off.item() < 2e-5


@hazard()
def negative_and_conjugate_views_into_models(run: Run) -> Any:
    model, found = run.optimize(run.network()), []
    trained = run.optimize(run.network(train=True))
    with torch.no_grad():
        for seed in range(4):
            x = run.floats(seed)
            view = torch.complex(x, x * 0.5).conj().imag
            assert view.is_neg()
            if run.dtype is torch.float32:
                found.append(model(view))
            found += [model(-x.to(run.dtype)), model(view.to(run.dtype))]
            found.append(model(torch._neg_view(x.to(run.dtype))))
    for seed in range(3):
        x = run.floats(seed)
        found.append(run.step(trained, torch.complex(x, x).conj().imag))
    return found


@hazard(kernels=False)
def negative_and_conjugate_views_into_conv2d(run: Run) -> Any:
    """Vary each operand, in inference and in training."""
    conv2d = confpred.conv2d if run.is_optimized else _plain_conv2d
    found = []
    operands = _operands(run)
    for name in (None, *operands):
        given = dict(operands)
        if name is not None:
            given[name] = torch._neg_view(given[name])
        with torch.no_grad():
            found += [conv2d(**given, padding=1, groups=8, activation=a) for a in (None, "silu")]
        leaves = {k: t.detach().requires_grad_() for k, t in given.items()}
        out = conv2d(**leaves, padding=1, groups=8, activation="relu")
        grad = torch._neg_view(out.detach())
        found += [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)]
    return found


def _operands(run: Run) -> dict[str, Tensor]:
    x = run.images(size=28).repeat(1, 22, 1, 1)[:, :64].contiguous(memory_format=LAST)
    torch.manual_seed(2)
    weight = (torch.randn(64, 8, 3, 3) / 8).to(run.device, run.dtype, memory_format=LAST)
    return {"x": x, "weight": weight, "bias": weight[:, 0, 0, 0].clone(), "residual": x + 1}


def _plain_conv2d(
    x: Tensor, weight: Tensor, bias: Any = None, *, activation: Any = None, residual: Any = None,
    **geometry: Any,
) -> Tensor:  # fmt: skip
    out = nn.functional.conv2d(x, weight, bias, **geometry)
    out = out if residual is None else out + residual
    return out if activation is None else getattr(nn.functional, activation)(out)


def views(x: Tensor) -> Iterator[Tensor]:
    """Yield tensors of `x`'s numbers that lie in memory as few do."""
    n, c, h, w = x.shape
    yield x
    yield x.contiguous()
    spare = x.new_empty(x.numel() + 1)[1:].view(n, h, w, c).permute(0, 3, 1, 2)
    yield spare.copy_(x)  # misaligned
    yield x[1:]
    yield torch.cat((x, x), 1)[:, :c]  # channel gaps
    yield torch.cat((x, x), 3)[..., :w]
    yield x.repeat(1, 1, 1, 2)[..., ::2]
    yield x[:1].expand(n, c, h, w)
    yield x[:, :1].expand(n, c, h, w)
    yield x[:, :, :1, :1].expand(n, c, h, w)
    yield x.transpose(2, 3)
    yield x.flip(2)
    yield x.new_zeros(()).expand(n, c, h, w)
    yield x[:1]


@hazard()
def views_with_odd_memory_into_models(run: Run) -> Any:
    model, found = run.optimize(run.network()), []
    with torch.no_grad():
        for seed in range(2):
            found += [model(view) for view in views(run.images(seed))]
    return found


@hazard()
def views_with_odd_memory_into_training(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    for view in views(run.floats()):
        if view.stride() != (0, 0, 0, 0):  # a batch norm of constants has no gradient to speak of
            found.append(run.step(model, view.detach().requires_grad_()))
    return found


@hazard(kernels=False)
def views_with_odd_memory_into_conv2d(run: Run) -> Any:
    conv2d = confpred.conv2d if run.is_optimized else _plain_conv2d
    given, found = _operands(run), []
    with torch.no_grad():
        for x, residual in zip(views(given["x"]), views(given["residual"]), strict=True):
            operands = {**given, "x": x, "residual": residual}
            found.append(conv2d(**operands, padding=1, groups=8, activation="relu"))
        for weight in views(given["weight"]):
            if weight.shape == given["weight"].shape:
                operands = {**given, "weight": weight}
                found.append(conv2d(**operands, padding=1, groups=8))
        odd = given["bias"].new_empty(65)[1:].copy_(given["bias"])
        for bias in (odd, odd[:1].expand(64), given["bias"].repeat(2)[::2]):
            found.append(conv2d(**{**given, "bias": bias}, padding=1, groups=8))
    return found


@hazard()
def batches_of_none_and_one(run: Run) -> Any:
    model, found = run.optimize(run.network()), []
    with torch.no_grad():
        for batch in (4, 1, 0, 1, 4, 0, 2, 1):
            found.append(model(run.images(batch=batch)))
    found.append(run.error(lambda: model(run.images()[:, :2])))
    return found


@hazard()
def more_sizes_than_graphs(run: Run) -> Any:
    """Vary batches and images, in inference and in training."""
    model, found = run.optimize(run.network()), []
    trained = run.optimize(run.network(train=True))
    with torch.no_grad():
        for _ in range(2):
            for batch in range(2, 14):
                found.append(model(run.images(batch=batch)))
            for size in (24, 36, 33, 47):
                found.append(model(run.images(size=size)))
    for _ in range(2):
        for batch in range(4, 15):
            found.append(run.step(trained, run.floats(batch=batch)))
    return found


class Odd(nn.Module):
    """Layers at the edge of what a convolution may be."""

    def __init__(self, padding: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 1)
        self.wide = nn.Conv2d(32, 32, (1, 7), padding=(0, 3), groups=32, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.large = nn.Conv2d(32, 32, 5, padding=padding, dilation=2, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(torch.relu(self.norm(self.wide(self.first(x)))))


@hazard(kernels=False)
def images_of_a_row_and_windows_beyond_the_image(run: Run) -> Any:
    model, found = run.optimize(run.network(Odd, 4)), []
    with torch.no_grad():
        for h, w in ((1, 40), (40, 1), (1, 1), (2, 3), (20, 20)):
            for seed in range(3):
                found.append(model(run.images(seed, size=40)[:, :, :h, :w]))
    narrow = run.optimize(run.network(Odd, 1))
    for size in (4, 6, 20):  # windows of 9 on 6, on 8 and on 22
        for _ in range(2):
            small = run.images(size=size)
            found.append(run.error(lambda small=small: narrow(small)))
    assert found[-6:] == ["RuntimeError"] * 4 + ["none"] * 2
    return found


@hazard(kernels=False)
def every_dtype(run: Run) -> Any:
    model, found = run.optimize(run.network()), []
    dtypes = (torch.float32, torch.float64) + (torch.float16,) * (run.device == "cuda")
    with torch.no_grad():
        for dtype in dtypes:
            model.to(dtype)
            found += [model(run.images(seed, dtype=dtype)) for seed in range(3)]
        model.bfloat16()
        outs = [model(run.images(seed, dtype=torch.bfloat16)) for seed in range(3)]
    exact = run.network().double()
    for seed, out in enumerate(outs):
        right = exact(run.images(seed).double()).detach()
        assert (out.double() - right).norm() < 5e-2 * right.norm()
    return found


@hazard()
def mixed_dtypes(run: Run) -> Any:
    """Refused as PyTorch does."""
    model, found = run.optimize(run.network()), []
    others = {torch.float16, torch.bfloat16, torch.float32, torch.float64} - {run.dtype}
    for dtype in sorted(others, key=str):
        x = run.images(dtype=dtype)
        found.append(run.error(lambda x=x: model(x)))
        found += run.infer(model)
    assert found.count("RuntimeError") == 3
    return found


@hazard(kernels=False)
def mixed_dtypes_into_conv2d(run: Run) -> Any:
    conv2d = confpred.conv2d if run.is_optimized else _plain_conv2d
    given, found = _operands(run), []
    for name in ("x", "weight", "bias"):
        operands = {**given, name: given[name].double()}
        found.append(run.error(lambda operands=operands: conv2d(**operands, padding=1, groups=8)))
    assert found == ["RuntimeError"] * 3
    return found


@hazard()
def autocast_nested_off_and_to_other_dtypes(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    x = run.floats()
    half = torch.float16 if run.device == "cuda" else torch.bfloat16
    for _ in range(3):
        for dtype in (half, torch.bfloat16):
            with torch.autocast(run.device, dtype):
                outs = [model(x)]
                with torch.autocast(run.device, enabled=False):
                    outs.append(model(x))
                    # Eager mode mixes up the dtypes of weights that it keeps.
                    with torch.autocast(run.device, half, cache_enabled=False):
                        outs.append(model(x))
                outs.append(model(x))
            outs.append(model(x))
            model.zero_grad()
            loss_of(outs[0]).backward()
            found.append([(o.dtype, o.detach().float().mul(8).round().shape) for o in outs])
            with torch.no_grad():
                exact = outs[1]
                for out in outs:
                    assert (out - exact).norm() < 6e-2 * exact.norm()
    return [str(x) for x in found]


@hazard()
def inference_mode_beside_no_grad(run: Run) -> Any:
    model, found = run.optimize(run.network()), []
    with torch.inference_mode():
        made = run.images(3)
    modes: tuple[Callable[[], Any], ...] = (torch.inference_mode, torch.no_grad) * 3
    for mode in modes:
        with mode():
            outs = [model(run.images(seed)) for seed in range(2)]
            found += [x.clone() for x in (*outs, model(made))]
            found.append(outs[0].is_inference())
    return [x.clone() if isinstance(x, Tensor) else x for x in found]


@hazard()
def weights_made_in_inference_mode(run: Run) -> Any:
    with torch.inference_mode():
        model = run.optimize(run.network())
        found = [model(run.images(seed)).clone() for seed in range(3)]
        model.grouped.weight.mul_(3)
        found += [model(run.images(seed)).clone() for seed in range(3)]
    run.changed(found[:3], found[3:])
    return [x.clone() for x in found]


@hazard(needs_gpu=True, kernels=False)
def more_elements_than_31_bits_count(run: Run) -> Any:
    """Use a depthwise layer whose input and output take 4.3 GB each."""
    model = run.optimize(run.network(nn.Conv2d, 64, 64, 3, 1, 1, 1, 64))
    x = torch.empty(33, 64, 1024, 1024, device=run.device, dtype=run.dtype, memory_format=LAST)
    x.normal_()
    assert x.numel() > 2**31
    with torch.no_grad():
        parts = (x,) if run.is_optimized else x.split(1)
        out = torch.cat([model(part) for part in parts]) if len(parts) > 1 else model(x)
    found = [
        out[0].clone(),
        out[-1].clone(),
        torch.stack([image.float().abs().mean() for image in out]),
    ]
    del out, x
    torch.cuda.empty_cache()
    return found


@hazard(needs_gpu=True)
def memory_that_was_poisoned(run: Run) -> Any:
    """All free memory is NaN when a model is captured, and between its calls."""
    model, trained = run.optimize(run.network()), run.optimize(run.network(train=True))
    found = []
    for _ in range(3):
        poison = [torch.full((2**20 * s,), float("nan"), device=run.device) for s in (1, 2, 8, 32)]
        del poison
        found += [run.infer(model, 2), run.train(trained, steps=2)]
    return found


@hazard()
def a_dictionary_of_arguments(run: Run) -> Any:
    model = run.network()
    run.optimize(model, {"x": run.images()})
    found = run.infer(model)
    with torch.no_grad():
        return found, [model(x=run.images(seed)) for seed in range(3)]


@hazard()
def example_inputs_change_nothing(run: Run) -> Any:
    """Buffers, random numbers, gradients and the inputs are as before `optimize`."""
    model = run.network(train=True)
    x = run.floats()
    then = x.clone()
    torch.manual_seed(11)
    run.optimize(model, x)
    drawn = torch.rand(3, device=run.device)
    assert torch.equal(x, then)
    assert all(p.grad is None for p in model.parameters())
    return drawn, list(model.buffers()), run.train(model)


@hazard()
def freezing_keeps_what_was_folded(run: Run) -> Any:
    """A model that was optimized with ``freeze=True`` does not see a write, as its documentation
    says; `revert` does."""
    model = run.network()
    run.optimize(model, freeze=True)
    found = [run.infer(model)]
    former = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.grouped_norm.weight.mul_(5)
        model.grouped_norm.bias.add_(2)
    after = run.infer(model)
    if run.is_optimized:
        if run.device == "cuda":
            for a, b in zip(found[0], after, strict=True):
                assert (a - b).norm() <= 2e-3 * b.norm()  # not seen
        confpred.revert(model)
    found.append(run.infer(model))
    run.changed(found[0], found[1])
    with torch.no_grad():
        for parameter, then in zip(model.parameters(), former, strict=True):
            parameter.copy_(then)
    run.optimize(model, freeze=True)
    return found, run.infer(model)

"""Weights that change: by optimizers, by hand, by loading, by conversion."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from hazards.base import Run, gradients, hazard


def _halves(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 4]


@hazard()
def weights_written_through_data(run: Run) -> Any:
    model = run.optimize(run.network())
    found = [run.infer(model)]
    for weight in _halves(model):
        weight.data.mul_(1.5)
    found.append(run.infer(model))
    for weight in _halves(model):
        weight.data = weight.data * 1.5  # lies elsewhere
    found.append(run.infer(model))
    run.changed(*found)
    return found


@hazard()
def weights_and_statistics_copied_to(run: Run) -> Any:
    model = run.optimize(run.network())
    found = [run.infer(model)]
    with torch.no_grad():
        for weight in _halves(model):
            weight.copy_(weight * 1.5)
    found.append(run.infer(model))
    with torch.no_grad():
        model.grouped_norm.running_var.mul_(4)
        model.stem_norm.running_mean.add_(1)
    found.append(run.infer(model))
    with torch.no_grad():
        model.depthwise_norm.weight.neg_()
        model.grouped_norm.bias.add_(1)
        model.grouped.bias.sub_(1)
    found.append(run.infer(model))
    with torch.inference_mode():
        model.head.weight.mul_(2)
    found.append(run.infer(model))
    run.changed(*found)
    return found


@hazard()
def an_average_of_weights_swapped_in_and_out(run: Run) -> Any:
    model = run.optimize(run.network())
    average = [p.detach() * 1.3 for p in model.parameters()]
    found = [run.infer(model)]
    for _ in range(3):
        for parameter, kept in zip(model.parameters(), average, strict=True):
            before = parameter.data.clone()
            parameter.data.copy_(kept)
            kept.copy_(before)
        found.append(run.infer(model, 2))
        run.changed(found[-2][:2], found[-1])
    return found


@hazard()
def states_loaded(run: Run) -> Any:
    """Also by assignment, after which the parameters are others."""
    model = run.optimize(run.network())
    found = [run.infer(model)]
    state = {k: v * 1.4 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    found.append(run.infer(model))
    state = {k: v * 1.4 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    found.append(run.infer(model))
    run.changed(*found)
    return found, list(model.state_dict())


@hazard(refused=None if torch.__version__ >= "2.13" else "has weakref associated")
def parameters_swapped(run: Run) -> Any:
    """Older versions of PyTorch refuse to swap what a guard refers to."""
    model = run.optimize(run.network())
    found = [run.infer(model)]
    torch.utils.swap_tensors(model.grouped.weight, nn.Parameter(model.grouped.weight.detach() * 3))
    found.append(run.infer(model))
    run.changed(*found)
    return found


@hazard()
def parameters_exchanged(run: Run) -> Any:
    """By a new parameter, and by ``set_``."""
    model = run.optimize(run.network())
    found = [run.infer(model)]
    model.grouped.weight = nn.Parameter(model.grouped.weight.detach() * 3)
    found.append(run.infer(model))
    model.depthwise.weight = nn.Parameter(model.depthwise.weight.detach() * -3)
    found.append(run.infer(model))
    with torch.no_grad():
        model.pointwise.weight.set_(model.pointwise.weight.detach() * -2)
    found.append(run.infer(model))
    run.changed(*found)
    return found


def _trained(run: Run, make: Any, train: bool = True) -> Any:
    """Return what steps of an optimizer give, with inference between them."""
    model = run.network(train=True)
    run.optimize(model.train(train))
    optimizer, found, images = make(model.parameters()), [], run.floats(9)
    for round_ in range(3):
        found.append(run.train(model, optimizer, 2, seed=10 * round_))
        model.eval()
        with run.autocast(), torch.no_grad():
            outs = [model(images) for _ in range(3)]
        assert torch.equal(outs[0], outs[2]) or run.is_optimized
        found.append(outs)
        model.train(train)
    run.changed(found[1], found[-1])
    return found


@hazard()
def an_optimizer_with_foreach(run: Run) -> Any:
    return _trained(run, lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, foreach=True))


@hazard()
def an_optimizer_with_fused(run: Run) -> Any:
    """Its kernel raises no version of a weight."""
    return _trained(run, lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, fused=True))


@hazard()
def fused_adam_on_folded_filters(run: Run) -> Any:
    return _trained(run, lambda p: torch.optim.AdamW(p, 0.02, eps=1e-3, fused=True))


@hazard()
def training_in_evaluation_mode(run: Run) -> Any:
    """Batch norms are frozen: folded filters change with each step."""
    return _trained(run, lambda p: torch.optim.SGD(p, 0.3, momentum=0.9), train=False)


@hazard()
def an_optimizer_that_has_state_already(run: Run) -> Any:
    model = run.network(train=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3, fused=True)
    run.train(model, optimizer, 2)
    strides = [p.stride() for p in model.parameters()]
    run.optimize(model)
    found = run.train(model, optimizer, 3)
    assert [p.stride() for p in model.parameters()] == strides
    return found, list(model.parameters())


@hazard()
def parameters_frozen_and_thawed(run: Run) -> Any:
    model, found = run.network(train=True), []
    run.optimize(model)
    for names in ((), ("grouped.weight", "stem.weight"), ("depthwise.weight", "grouped.bias"), ()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in names)
            parameter.grad = None
        found.append(run.train(model, steps=2))
        assert [n for n, p in model.named_parameters() if p.grad is None] == sorted(
            names, key=[n for n, _ in model.named_parameters()].index
        )
    return found


@hazard()
def converted_at_any_time(run: Run) -> Any:
    """``float``, ``double``, ``bfloat16``, other layouts, and back."""
    model, found = run.optimize(run.network()), []
    for dtype in (run.dtype, torch.float32, torch.bfloat16, torch.float64, run.dtype):
        model.to(dtype)
        with torch.no_grad():
            outs = [model(run.images(seed, dtype=dtype)) for seed in range(2)]
        found.append(outs if dtype is not torch.bfloat16 else [o.dtype for o in outs])
    for layout in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=layout)
        found.append(run.infer(model))
    return found


@hazard()
def modes_turned_at_any_time(run: Run) -> Any:
    model, found = run.network(train=True), []
    run.optimize(model)
    for train in (True, False, True, False):
        model.train(train)
        found.append(run.train(model, steps=2))
        with run.autocast(), torch.no_grad():
            found.append([model(run.floats(seed)) for seed in range(2)])
    model.grouped_norm.train()  # one alone
    found.append(run.train(model, steps=2))
    return found


@hazard()
def reverted_at_any_time(run: Run) -> Any:
    """Also between a forward and its backward."""
    import confpred

    model, found = run.network(train=True), []
    run.optimize(model)
    for _ in range(2):
        found.append(run.train(model, steps=2))
        with run.autocast():
            out = model(run.floats())
        confpred.revert(model)
        out.float().square().mean().backward()
        found += [gradients(model), run.train(model, steps=1)]
        assert model._compiled_call_impl is None
        run.optimize(model)
    return found


class _Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(weight.float(), 0.02, 0, -128, 127).to(
            weight.dtype
        )


@hazard()
def parametrised_and_quantised_weights(run: Run) -> Any:
    model = run.network(train=True)
    parametrizations.weight_norm(model.grouped)
    run.optimize(model)
    found = [run.train(model)]
    parametrize.register_parametrization(model.depthwise, "weight", _Scaled())
    model.zero_grad()
    found.append(run.train(model))
    parametrize.remove_parametrizations(model.grouped, "weight")
    model.zero_grad()
    found.append(run.train(model))
    model.eval()
    with torch.no_grad(), run.autocast():
        found.append([model(run.floats(seed)) for seed in range(3)])
    return found


@hazard()
def parameters_of_a_functional_call(run: Run) -> Any:
    model = run.optimize(run.network())
    others = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    found = [run.infer(model)]
    with torch.no_grad():
        for _ in range(3):
            found.append([torch.func.functional_call(model, others, (run.images(1),))])
    run.changed(found[0][:1], found[1])
    return found, run.infer(model)


@hazard()
def copies_live_alone(run: Run) -> Any:
    """A deep copy is the original as it was, and neither sees a write to the other."""
    model = run.optimize(run.network())
    found = [run.infer(model)]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    found += [run.infer(model), run.infer(other), run.infer(run.optimize(other))]
    run.changed(found[1], found[2])
    return found

"""Hazards of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hazards.base import Net, Run, gradients, hazard, loss_of


@hazard()
def gradients_accumulated_over_steps(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    for seed in range(5):
        run.step(model, run.floats(seed))
        found.append(gradients(model))
    run.changed(found[0], found[4])
    model.zero_grad(set_to_none=False)
    for seed in range(3):
        run.step(model, run.floats(seed))
    return found, gradients(model)


@hazard()
def two_forwards_before_two_backwards(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    for round_ in range(4):
        with run.autocast():
            outs = [model(run.floats(2 * round_ + i)) for i in range(2)]
        for out in outs[:: 1 if round_ % 2 else -1]:
            loss_of(out).backward()
            found.append(gradients(model))
            model.zero_grad()
        found += [out.detach() for out in outs]
    return found


@hazard()
def forwards_whose_backward_never_comes(run: Run) -> Any:
    """Many, in training: memory stays bounded."""
    model = run.optimize(run.network(train=True))
    run.train(model, steps=3)
    sizes = []
    for count in (4, 30):
        for seed in range(count):
            with run.autocast():
                out = model(run.floats(seed))
        if run.device == "cuda":
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_reserved())
    if sizes:
        assert sizes[1] - sizes[0] < 64 * 2**20, sizes
    model.zero_grad()
    return out.detach(), run.train(model)


@hazard()
def evaluation_without_no_grad(run: Run) -> Any:
    model = run.optimize(run.network())
    outs = [model(run.images(seed)) for seed in range(5)]
    loss_of(outs[3]).backward()
    found = [o.detach() for o in outs], gradients(model)
    return found, [model(run.images(seed)).detach() for seed in range(3)]


@hazard()
def a_graph_retained(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    for seed in range(4):
        model.zero_grad()
        with run.autocast():
            out = model(run.floats(seed))
        loss = loss_of(out)
        loss.backward(retain_graph=True)
        found.append(gradients(model))
        loss.backward()
        found.append(gradients(model))
        found.append(run.error(loss.backward))
    run.changed(found[-3], found[-2])
    return found


@hazard(refused="double backward")
def gradients_of_gradients(run: Run) -> Any:
    model = run.optimize(run.network(train=True))
    x = run.floats().requires_grad_()
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    return gradients(model)


@hazard()
def checkpointing(run: Run) -> Any:
    """Around an optimized model, in both ways of PyTorch."""
    model, found = run.optimize(run.network(train=True)), []
    for reentrant in (False, True):
        for seed in range(3):
            x = run.floats(seed).requires_grad_()
            with run.autocast():
                out = checkpoint(model, x, use_reentrant=reentrant)
            loss_of(out).backward()
            found += [out.detach(), x.grad]
        found.append(gradients(model))
    return found


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.features, x, use_reentrant=False)
        return self.head(y.mean((2, 3)))


@hazard()
def checkpointing_inside_the_forward(run: Run) -> Any:
    return run.train(run.optimize(run.network(Checkpointed, train=True)))[:2]


@hazard()
def anomaly_mode(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    for detects in (True, False, True):
        with torch.autograd.set_detect_anomaly(detects):
            found.append(run.train(model))
    return found


@hazard()
def hooks_on_saved_tensors(run: Run) -> Any:
    model = run.optimize(run.network(train=True))
    found = [run.train(model)]
    with torch.autograd.graph.save_on_cpu():
        found.append(run.train(model))
    return found, run.train(model)


@hazard()
def mixed_needs_of_gradients(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    for needs_input in (True, False, True):
        for needs_weights in (True, False):
            if not needs_input and not needs_weights:
                continue
            for parameter in model.parameters():
                parameter.requires_grad_(needs_weights)
                parameter.grad = None
            for seed in range(3):
                x = run.floats(seed).requires_grad_(needs_input)
                run.step(model, x)
                found.append(x.grad)
            found.append(gradients(model))
    return found


class Features(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


@hazard()
def gradients_that_arrive_with_other_strides(run: Run) -> Any:
    model, found = run.optimize(run.network(Features, train=True)), []
    changes = (
        lambda g: g.contiguous(),
        lambda g: g.contiguous(memory_format=torch.channels_last),
        lambda g: g[:1].expand_as(g),
        lambda g: g.flatten()[:1].expand(g.numel()).view(g.shape),
        lambda g: torch.cat((g, g), 1)[:, : g.shape[1]],
        lambda g: torch.complex(g.float(), -g.float()).conj().imag.to(g.dtype),
    )
    for repeat in range(3):
        for change in changes:
            model.zero_grad()
            with run.autocast():
                out = model(run.floats(repeat))
            numbers = torch.Generator().manual_seed(repeat)
            grad = torch.randn(out.shape, generator=numbers).to(out.device, out.dtype)
            out.backward(change(grad))
            found.append(gradients(model))
    return found


@hazard()
def hooks_on_parameters_and_gradients(run: Run) -> Any:
    model, seen = run.optimize(run.network(train=True)), []
    found = [run.train(model)]
    model.grouped.weight.register_hook(lambda g: g * 3)
    model.depthwise.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    model.stem.register_full_backward_hook(lambda module, given, grads: None)
    model.zero_grad()
    found.append(run.train(model))
    return found, [float(norm) for norm in seen], model.grouped.weight.grad


class HooksInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * 2)
        return self.head(y.mean((2, 3)))


@hazard()
def hooks_on_what_is_inside(run: Run) -> Any:
    return run.train(run.optimize(run.network(HooksInside, train=True)))


@hazard()
def training_and_inference_in_turns(run: Run) -> Any:
    """Under ``no_grad`` and ``inference_mode``, between a forward and its backward too."""
    model, found = run.optimize(run.network(train=True)), []
    for seed in range(4):
        with run.autocast():
            out = model(run.floats(seed))
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), run.autocast():
                found.append(model(run.floats(seed + 1)).clone())
        model.train()
        loss_of(out).backward()
        found += [out.detach(), gradients(model)]
    return [x.clone() if isinstance(x, Tensor) else x for x in found]


@hazard(refused="functorch", kernels=False)
def transforms_of_functions(run: Run) -> Any:
    """``torch.func.grad`` through an optimized model, and ``vmap`` over it."""
    model = run.optimize(run.network())
    weights = {name: p.detach().float() for name, p in model.named_parameters()}
    buffers = {name: b.float() if b.is_floating_point() else b for name, b in model.named_buffers()}

    def loss(weights: Any, x: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, (weights, buffers), (x,)))

    found = [torch.func.grad(loss)(weights, run.floats(seed)) for seed in range(2)]
    each = torch.func.vmap(loss, (None, 0))
    with torch.backends.cudnn.flags(enabled=False):  # its batch norm has no rule for `vmap`
        return found, each(weights, torch.stack([run.floats(1), run.floats(2)]))


@hazard()
def a_penalty_on_several_outputs(run: Run) -> Any:
    """Only some outputs get a gradient; a captured graph gives zeros where eager mode has none."""

    class Several(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.features(x)
            return self.head(y.mean((2, 3))), y

    model, found = run.optimize(run.network(Several, train=True)), []
    for used in ((0,), (1,), (0, 1)):
        for seed in range(3):
            model.zero_grad()
            with run.autocast():
                outs = model(run.floats(seed))
            sum(loss_of(outs[i]) for i in used).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None and p.grad.any()]
            found += [torch.cat([g.flatten() for g in grads]), [o.detach() for o in outs]]
    return found


@hazard()
def gradients_clipped_and_scaled(run: Run) -> Any:
    model = run.optimize(run.network(train=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(run.device, init_scale=64.0, enabled=run.device == "cuda")
    norms = []
    for seed in range(4):
        with run.autocast():
            loss = loss_of(model(run.floats(seed)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, list(model.parameters())

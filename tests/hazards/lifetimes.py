"""Hazards of tensors that one call saves and a later one needs: backward passes in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hazards.base import LAST, Net, Run, gradients, hazard, loss_of, switched


class Generator(nn.Module):
    """Images from images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(64)
        self.last = nn.Conv2d(64, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return torch.tanh(self.last(F.relu(self.depthwise_norm(self.depthwise(x)))))


def _adversarial_step(run: Run, maker: nn.Module, judge: nn.Module, seed: int) -> Any:
    """Return gradients of both networks: a step of PyTorch's tutorial of DCGAN, in float32, as
    float16 leaves half of the largest error that is allowed."""

    def of(score: Tensor, sign: int) -> Tensor:
        return F.softplus(sign * score).mean()

    judge.zero_grad()
    of(judge(run.floats(seed)), -1).backward()
    made = maker(run.floats(100 + seed))
    of(judge(made.detach()), 1).backward()
    found = [gradients(judge)]
    maker.zero_grad()
    of(judge(made), -1).backward()
    return [*found, gradients(maker)]


@hazard(layers=8, replays=12)
def two_adversaries_from_the_first_step(run: Run) -> Any:
    maker, judge = (run.optimize(run.network(kind, train=True)) for kind in (Generator, Net))
    return [_adversarial_step(run, maker, judge, seed) for seed in range(6)]


@hazard(layers=8, replays=12)
def two_adversaries_after_ordinary_steps(run: Run) -> Any:
    maker, judge = (run.optimize(run.network(kind, train=True)) for kind in (Generator, Net))
    found: list[Any] = [run.train(judge), run.train(maker)]
    for model in (maker, judge):
        model.zero_grad()
    return found, [_adversarial_step(run, maker, judge, seed) for seed in range(6)]


@hazard(layers=8, replays=4)
def one_forward_one_backward(run: Run) -> Any:
    """A pipeline's schedule, from the first step on."""
    model, found = run.optimize(run.network(train=True)), []

    def ahead(seed: int) -> Tensor:
        with run.autocast():
            out: Tensor = model(run.floats(seed))
        return out

    waiting = [ahead(1), ahead(2)]
    for seed in range(3, 12):
        loss_of(waiting.pop(0)).backward()
        found.append(gradients(model))
        model.zero_grad()
        waiting.append(ahead(seed))
    run.changed(found[0][1], found[1][1])
    return found


@hazard(layers=8, replays=4)
def siamese_calls_with_one_backward(run: Run) -> Any:
    """With evaluation in between, and another network that has a part in common."""
    model, found = run.optimize(run.network(train=True)), []
    for step in range(5):
        with run.autocast():
            outs = [model(run.floats(3 * step + i)) for i in range(3)]
        model.eval()
        with torch.no_grad(), run.autocast():
            found.append(model(run.floats(step)).clone())
        model.train()
        sum(loss_of(out) for out in outs).backward()  # type: ignore[union-attr]
        found += [gradients(model), *(out.detach() for out in outs)]
        model.zero_grad()
    return found


class Headed(nn.Module):
    """A head of its own on a trunk that another network has, too."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(10, 4).to(next(trunk.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x))
        return out


@hazard(layers=16, replays=8)
def two_networks_that_share_a_part(run: Run) -> Any:
    trunk = run.network(train=True)
    models, found = [run.optimize(Headed(trunk).train()) for _ in range(2)], []
    for step in range(5):
        with run.autocast():
            outs = [model(run.floats(step)) for model in models]
        (loss_of(outs[0]) + 2 * loss_of(outs[1])).backward()
        found.append(gradients(trunk))
        trunk.zero_grad()
    return found


@hazard(layers=8)
def a_graph_retained_after_one_that_was_not(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    for seed in range(4):
        run.step(model, run.floats(seed))
        with run.autocast():
            loss = loss_of(model(run.floats(seed + 7)))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(gradients(model))
        model.zero_grad()
    return found


class Flat(nn.Module):
    """Layers whose filters and images lie in memory channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.grouped = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.grouped(F.relu(self.dense(x))))


@hazard(layers=4, replays=2)
def gradients_viewed_flat(run: Run) -> Any:
    """Half precision, channels first: what `torch.autograd.grad` returns lies as in eager mode. All
    numbers are whole, with the same sums in any order: some CPUs round in between."""
    model = run.network(Flat, train=True).to(memory_format=torch.contiguous_format)
    for parameter in model.parameters():
        parameter.data.sign_()
    model, found = run.optimize(model), []
    for seed in range(4):
        x = run.floats(seed).contiguous().sign_().requires_grad_()
        with run.autocast(torch.bfloat16):
            out = model(x)
        grads = torch.autograd.grad(out.sum(), [x, *model.parameters()])
        found += [out.detach(), *(grad.view(-1) for grad in grads)]
    return found


@hazard(needs_gpu=True, layers=8, replays=4)
def out_of_memory_then_a_smaller_batch(run: Run) -> Any:
    """As a finder of batch sizes does, before and after steps that fit."""
    found = []
    for warmed in (False, True):
        model = run.optimize(run.network(train=True))
        if warmed:
            found.append(run.train(model))
        _shrunk(run, lambda batch, m=model: run.step(m, run.floats(1, batch=batch, size=64)))
        model.zero_grad()
        model.load_state_dict(run.network().state_dict())  # who fails where differs
        found.append(run.train(model))
    return found


def _shrunk(run: Run, step: Callable[[int], Any]) -> None:
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    limit = torch.cuda.memory_reserved() + 2 * 2**30
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        errors = [run.error(lambda batch=batch: step(batch)) for batch in (8192, 8192, 16, 16, 16)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert errors == ["RuntimeError"] * 2 + ["none"] * 3, errors


@hazard(layers=2)
def first_calls_from_threads(run: Run) -> Any:
    """All at once, with what is computed once."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    found = []
    for options in ({"freeze": True}, {}):
        model = run.optimize(run.network(), **options)
        barrier = threading.Barrier(6)

        def work(seed: int, model: Any = model, barrier: Any = barrier) -> Any:
            barrier.wait()
            outs = run.infer(model, 2, seed)
            if run.device == "cuda":
                torch.cuda.synchronize()
            return outs

        with ThreadPoolExecutor(6) as pool:
            found.append(list(pool.map(work, range(6))))
        found.append(run.infer(model))
    return found


@hazard(kernels=False)
def forward_mode(run: Run) -> Any:
    """Dual tensors go through the model as it is."""
    from torch.autograd import forward_ad

    model, x = run.optimize(run.network().float()), run.floats()
    found = [model(x).detach()]
    with forward_ad.dual_level(), switched(torch.backends.cudnn, "enabled", False):
        out = model(forward_ad.make_dual(x, torch.ones_like(x)))
        found += list(forward_ad.unpack_dual(out))
    return [x.detach() for x in found], model(x.contiguous(memory_format=LAST)).detach()

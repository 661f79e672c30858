"""Hazards inside a forward: make tensors, ask for modes, keep things, change, fail."""

from __future__ import annotations

import random
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hazards.base import Net, Run, hazard, loss_of


class MakesTensors(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.zeros((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device)
        x = x * torch.arange(x.shape[-1], device=x.device).to(x.dtype)
        x = x + torch.as_tensor(x)
        y = self.features(x / x.shape[-1])
        return y + torch.full(y.shape[:2], 0.5, device=x.device, dtype=x.dtype)[..., None, None]


@hazard()
def tensors_made_from_shapes(run: Run) -> Any:
    return run.infer(run.optimize(run.network(MakesTensors)))


class FillsWithValues(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return y + torch.full(y.shape, y.mean(), device=y.device, dtype=y.dtype)


@hazard()
def tensors_made_from_values(run: Run) -> Any:
    """The value is read by the host: the graph breaks."""
    return run.infer(run.optimize(run.network(FillsWithValues)))


class SwitchesAutocastOff(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        with torch.autocast(x.device.type, enabled=False):
            return y.float().mul(3e4).square().sum((2, 3))  # beyond float16


@hazard()
def autocast_switched_off_inside(run: Run) -> Any:
    model = run.optimize(run.network(SwitchesAutocastOff).float())
    with run.autocast(), torch.no_grad():
        outs = [model(run.floats(seed)) for seed in range(3)]
    assert all(out.isfinite().all() and out.max() > 1e6 for out in outs)
    return outs


class SwitchesGradients(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            y = self.features(x)
        with torch.enable_grad():
            z = self.head(y.mean((2, 3)))
        return y, z


@hazard()
def gradients_switched_inside(run: Run) -> Any:
    model = run.optimize(run.network(SwitchesGradients, train=True))
    found = []
    for outer in (True, False, True):
        for seed in range(3):
            with torch.set_grad_enabled(outer), run.autocast():
                y, z = model(run.floats(seed))
            loss_of(z).backward()
            found += [y, z.requires_grad, z.detach()]
    return found, [p.grad is not None for p in model.parameters()]


class AsksForModes(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        if torch.is_grad_enabled():
            y = y * 2
        if torch.is_autocast_enabled(x.device.type):
            y = y + 3
        return y


@hazard()
def a_forward_that_asks_for_modes(run: Run) -> Any:
    model, found = run.optimize(run.network(AsksForModes, train=True).eval()), []
    for grad in (True, False, True):
        for cast in (False, True):
            with (
                torch.set_grad_enabled(grad),
                torch.autocast(run.device, torch.bfloat16, enabled=cast),
            ):
                found += [model(run.floats(seed)).detach() for seed in range(3)]
    return found


class KeepsTensors(Net):
    def __init__(self) -> None:
        super().__init__()
        self.by_size: dict[Any, Tensor] = {}
        self.seen: list[Tensor] = []
        self.latest: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        key = (y.shape[-1], y.device)
        if key not in self.by_size:
            self.by_size[key] = torch.arange(y.shape[-1], device=y.device, dtype=y.dtype)
        if self.latest is not None:
            y = y + self.latest.mean()
        self.latest = y
        self.seen.append(y.mean((1, 2, 3)))
        return y * self.by_size[key]


@hazard()
def tensors_kept_from_one_call_to_the_next(run: Run) -> Any:
    model, found = run.optimize(run.network(KeepsTensors)), []
    with torch.no_grad():
        for size in (32, 32, 24, 32):
            model.latest = None
            found += [model(run.images(seed, size=size)) for seed in range(2)]
    assert all(type(t) is Tensor for t in (*model.seen, *model.by_size.values(), model.latest))
    return found, model.seen, model.latest, list(model.by_size.values())


class ReadsNumbers(Net):
    scale, flag, mode = 1.0, False, "plain"

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x) * self.scale
        if self.flag:
            y = y + 1
        return -y if self.mode == "negative" else y


@hazard()
def numbers_flags_and_texts_changed_later(run: Run) -> Any:
    model = run.optimize(run.network(ReadsNumbers))
    found = [run.infer(model)]
    for name, value in (("scale", 3.0), ("flag", True), ("mode", "negative"), ("scale", 0.5)):
        setattr(model, name, value)
        found.append(run.infer(model))
        run.changed(found[-2], found[-1])
    return found


class DrawsNumbers(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) * (1 + random.random())


@hazard()
def random_numbers_of_python(run: Run) -> Any:
    model = run.optimize(run.network(DrawsNumbers))
    random.seed(3)
    with torch.no_grad():
        found = [model(run.images()) for _ in range(4)]
    assert len({x.sum().item() for x in found}) == 4
    return found


class Inspects(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        if x.dtype is torch.float32:
            y = y + 1
        if hasattr(x, "told"):
            y = y + 2
        if str(x.device).startswith("cuda"):
            y = y + 3
        return y * 2 if isinstance(x, Tensor) and x.is_contiguous() else y


@hazard()
def a_forward_that_inspects_its_input(run: Run) -> Any:
    model, found = run.optimize(run.network(Inspects)), []
    with torch.no_grad():
        for dtype in (run.dtype, torch.float32):
            model.to(dtype)
            found += [model(run.images(seed, dtype=dtype)) for seed in range(2)]
            found += [model(run.images(seed, dtype=dtype).contiguous()) for seed in range(2)]
        x = run.images(dtype=torch.float32)
        x.told = True
        found.append(model(x))
    return found


@hazard()
def forwards_replaced_later(run: Run) -> Any:
    """Replace a forward: of the model, as trainers do, of a layer, and its ``_conv_forward``."""
    model = run.optimize(run.network())
    found = [run.infer(model)]
    plain = model.forward
    model.forward = lambda x: plain(x) * 3 + 1
    found.append(run.infer(model))
    grouped = model.grouped.forward
    model.grouped.forward = lambda x: grouped(x) * 4
    found.append(run.infer(model))
    model.depthwise._conv_forward = types.MethodType(
        lambda self, x, weight, bias: F.conv2d(x, weight * 5, bias, padding=1, groups=64),
        model.depthwise,
    )
    found.append(run.infer(model))
    del model.forward
    found.append(run.infer(model))
    run.changed(*found)
    return found


class Doubled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 6


@hazard()
def classes_and_submodules_swapped_later(run: Run) -> Any:
    model = run.optimize(run.network())
    found = [run.infer(model)]
    model.grouped.__class__ = Doubled
    found.append(run.infer(model))
    torch.manual_seed(5)
    other = nn.Conv2d(64, 64, 5, padding=2, groups=64)
    model.depthwise = other.to(run.device, run.dtype, memory_format=torch.channels_last)
    found.append(run.infer(model))
    model.stem_norm = nn.Identity()
    found.append(run.infer(model))
    run.changed(*found)
    return found


@hazard()
def hooks_added_and_removed_later(run: Run) -> Any:
    model, seen = run.optimize(run.network()), []
    found = [run.infer(model)]
    handles = [
        model.register_forward_hook(lambda module, given, out: out * 2),
        model.grouped.register_forward_pre_hook(lambda module, given: (given[0] * 3,)),
        model.depthwise.register_forward_hook(lambda *_: seen.append(1)),
    ]
    found.append(run.infer(model))
    run.changed(*found)
    assert len(seen) == 3
    for handle in handles:
        handle.remove()
    return found, run.infer(model)


class Fails(Net):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        if self.fails:
            raise ValueError("told to")
        return y


@hazard()
def an_exception_inside_the_forward(run: Run) -> Any:
    model = run.optimize(run.network(Fails))
    found = [run.infer(model)]
    for _ in range(2):
        model.fails = True
        found.append(run.error(lambda: model(run.images())))
        model.fails = False
        found.append(run.infer(model))
    wrong = torch.zeros(1, 4, 8, 8, device=run.device, dtype=run.dtype)
    found.append(run.error(lambda: model(wrong)))
    return found, run.infer(model), found[1]


@hazard()
def an_exception_inside_optimize(run: Run) -> Any:
    model = run.network(Fails)
    model.fails = True
    if run.is_optimized:
        assert run.error(lambda: run.optimize(model, run.images())) != "none"
        assert model._compiled_call_impl is None
    model.fails = False
    found = run.infer(model)
    return found, run.infer(run.optimize(model, run.images()))


class WritesItsInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        y = self.features(x)
        x += 1
        return y


@hazard()
def a_model_that_writes_its_input(run: Run) -> Any:
    model, found = run.optimize(run.network(WritesItsInput)), []
    with torch.no_grad():
        for seed in range(3):
            for x in (run.images(seed), run.images(seed).contiguous(), run.images(seed)[1:]):
                found += [model(x), x.clone(), model(x), x.clone()]
    return found


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        for _ in range(2):
            x = F.relu(self.grouped_norm(self.grouped(self.depthwise(x))) + x)
            x = self.grouped_norm(x)
        return self.head(x.mean((2, 3)))


@hazard()
def layers_called_several_times(run: Run) -> Any:
    """A batch norm counts each call as a batch."""
    model = run.optimize(run.network(Twice, train=True))
    found = run.train(model)
    assert model.grouped_norm.num_batches_tracked.item() == 12
    model.eval()
    with run.autocast(), torch.no_grad():
        return found, [model(run.floats(seed)) for seed in range(3)]


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(64, 64, 3, padding=1, groups=8)
        self.again.weight = self.grouped.weight

    def features(self, x: Tensor) -> Tensor:
        return self.again(super().features(x))


@hazard()
def tied_weights(run: Run) -> Any:
    model = run.optimize(run.network(Tied, train=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = run.train(model, optimizer)
    assert model.again.weight is model.grouped.weight
    return found, model.grouped.weight


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem_norm(self.stem(x)))
        if y.float().mean().item() > 0:  # read by the host
            y = self.depthwise_norm(self.depthwise(y))
        torch._dynamo.graph_break()
        return F.relu(self.grouped_norm(self.grouped(y)) + y)


@hazard()
def graph_breaks(run: Run) -> Any:
    found = run.infer(run.optimize(run.network(Breaks)))
    model = run.optimize(run.network(Breaks, train=True))
    return found, run.train(model)


class Drops(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.features(x) * 0 + 1, 0.5, self.training)


@hazard()
def dropout_draws_anew(run: Run) -> Any:
    """In each replay; the same again from the same seed."""
    model, found = run.optimize(run.network(Drops, train=True)), []
    x = run.floats()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            outs = [model(x).detach() for _ in range(5)]
            for i, out in enumerate(outs):
                assert out.eq(0).float().mean().sub(0.5).abs() < 0.02
                assert all(not torch.equal(out, other) for other in outs[:i])
            again = []
            for _ in range(2):
                torch.manual_seed(7)
                again.append(torch.stack([model(x).detach() for _ in range(2)]))
            assert torch.equal(*again)
        found.append(len(outs))
    return found


class ReturnsMuch(Net):
    def forward(self, x: Tensor, scale: Any = None, *, more: bool = False) -> dict[str, Any]:
        y = self.features(x)
        y = y if scale is None else y * scale
        return {"x": x, "part": x[:, 1], "y": y, "view": y[:, :, 0], "weight": self.head.weight,
                "more": [y + 1] if more else None, "size": y.shape[0], "name": "net"}  # fmt: skip


@hazard()
def outputs_of_many_kinds(run: Run) -> Any:
    """Inputs, views of them, parameters, numbers and texts; arguments by name."""
    model, found = run.optimize(run.network(ReturnsMuch)), []
    with torch.no_grad():
        for more in (False, True, False):
            for scale in (None, 2.0, torch.full((), 3.0, device=run.device, dtype=run.dtype)):
                x = run.images()
                out = model(x, scale, more=more)
                assert out["x"] is x
                assert out["weight"] is model.head.weight
                assert out["part"].data_ptr() == x[:, 1].data_ptr()
                shared = out["view"].data_ptr() == out["y"].data_ptr()
                out.pop("weight")
                found.append((out, shared))
    return found


@hazard()
def an_optimized_part_of_a_network(run: Run) -> Any:
    """And the whole optimized after it."""
    model = nn.Sequential(run.network(), nn.ReLU(), nn.Linear(10, 4).to(run.device, run.dtype))
    with torch.no_grad():
        model[2].weight.copy_(torch.linspace(-1, 1, 40).view(4, 10))
        model[2].bias.zero_()
    run.optimize(model[0])
    found = run.infer(model)
    run.optimize(model)
    return found, run.infer(model), run.infer(model[0])

"""Batch norms of training as one operator a direction: which are found, and that the graph computes
what PyTorch does. The operators run by PyTorch's own here; `tests/gpu` launches the kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from network_blocks import AFTER, WIDTH, Around, NormBlock, step
from torch import Tensor, nn
from torch._dynamo.backends.debugging import boxed_nop

from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.predict.choice import Choice
from confpred.problem.norm import BatchNorm
from confpred.pytorch import backend
from confpred.pytorch.rewrite import norm_layers, normalising

FASTER = Candidate("batch_norm_two_pass", 0)
#: Fused form of each: activation and whether a residual is in it.
FUSED = {
    "none": ("none", False), "relu": ("relu", False), "relu in place": ("relu", False),
    "silu": ("silu", False), "silu in place": ("silu", False),
    "hardswish in place": ("hardswish", False), "relu6 in place": ("relu6", False),
    "leaky ReLU in place": ("leaky_relu", False), "leaky ReLU": ("leaky_relu_20", False),
    "add, leaky ReLU in place": ("leaky_relu_10", True), "of no kernel's slope": ("none", False),
    "gelu": ("gelu", False), "hardswish": ("hardswish", False),
    "relu6": ("relu6", False), "add": ("none", True), "add, relu": ("relu", True),
    "add from the left, silu": ("silu", True), "add, silu in place": ("silu", True),
    "clone, add": ("relu", True), "add its clone": ("none", False),
    "channels first, silu": ("none", False), "read twice": ("none", False),
    "of no kernel": ("none", False),
}  # fmt: skip


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH, 6, 5, dtype=dtype).to(memory_format=torch.channels_last)
    return x.requires_grad_()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[BatchNorm]:
    """Return the problems of batch norms that a capture asks about; all are chosen for."""
    asked: list[BatchNorm] = []

    def choose(problems: Sequence[Any]) -> list[Choice | None]:
        found: list[Choice | None] = []
        for problem in problems:
            if isinstance(problem, BatchNorm):
                asked.append(problem)
                made = Choice(problem, "h100", "predicted", FASTER, 1.0, pytorch_ms=2.0)
                found.append(made)
            else:
                found.append(None)
        return found

    # No GPU has measured these layers.
    monkeypatch.setattr(backend.Compiler, "chooser", lambda *_: choose)
    # As beside a model of batch norms.
    monkeypatch.setattr(backend.choosing, "is_known", lambda operation: True)
    torch._dynamo.reset()
    return asked


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs that Inductor would compile run as they are."""
    run: Any = lambda gm, *_: (boxed_nop(gm, []), {})  # noqa: E731
    monkeypatch.setattr(backend.inductor, "compile_pass", run)  # no C++ is compiled


def captured(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    made: Callable[[Tensor], Tensor] = torch.compile(
        model, backend="confpred", options={"graphs": False, **options}, dynamic=False
    )
    return made


def compare(model: nn.Module, x: Tensor | None = None, steps: int = 1, **options: Any) -> None:
    """Compare steps of a capture, and the buffers after each, with those of eager mode."""
    theirs = copy.deepcopy(model)
    given, call = images() if x is None else x, captured(model, **options)
    for _ in range(steps):
        mine, other = (
            step(ahead, [p for p in of.parameters() if p.requires_grad], given)
            for ahead, of in ((call, model), (theirs, theirs))
        )
        for a, b in zip([*mine, *model.buffers()], [*other, *theirs.buffers()], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


#: An activation in place, and by itself, is one operator of a graph: one of the two is captured. A
#: leaky ReLU in place saves its result.
ONCE = [n for n in AFTER if f"{n} in place" not in AFTER or "leaky" in n]


@pytest.mark.parametrize(("name", "inductor"), [
    *((name, False) for name in ONCE),
    pytest.param("add, silu in place", True, marks=pytest.mark.slow(reason="C++ is compiled")),
])  # fmt: skip
def test_a_step_is_what_pytorch_computes(
    name: str, inductor: bool, served: list[BatchNorm]
) -> None:
    model = NormBlock(AFTER[name]).to(memory_format=torch.channels_last)
    compare(model, steps=2, inductor=inductor)
    ahead, back = served
    assert (ahead.activation, ahead.residual) == FUSED[name]
    assert ahead.direction == "forward"
    assert back.direction == "backward"
    assert (ahead.n, ahead.h, ahead.w, ahead.c) == (4, 6, 5, WIDTH)


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"momentum": 0.3}, {"eps": 0.1}],
    ids=lambda each: next(iter(each)),
)
def test_options_of_the_layer_are_followed(options: dict[str, Any], served: Any) -> None:
    compare(NormBlock(AFTER["add, relu"], **options).to(memory_format=torch.channels_last))
    assert len(served) == 2
    assert served[0].affine == options.get("affine", True)


@pytest.mark.parametrize(("name", "affine", "learns"), [
    *((name, True, True) for name in ("none", "relu", "silu", "add", "add, relu")),
    ("silu", True, False), ("add, relu", False, True),
])  # fmt: skip
def test_a_frozen_layer_is_served(
    name: str, affine: bool, learns: bool, served: list[BatchNorm]
) -> None:
    """It normalises by the running statistics, as fine-tuning does, and leaves them as they are."""
    model = NormBlock(AFTER[name], affine=affine).to(memory_format=torch.channels_last)
    torch.manual_seed(3)
    for value in (*model.norm.parameters(), *model.norm.buffers()):
        if value.is_floating_point():
            torch.nn.init.uniform_(value, 0.5, 2.0)
    model.norm.eval().requires_grad_(learns)
    compare(model)
    assert [problem.frozen for problem in served] == [True, True]
    assert (served[0].activation, served[0].residual) == FUSED[name]


def both(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.relu(m.norm(m.conv(x)) + m.other(x)))


def test_of_two_norms_that_are_added_one_has_the_sum(
    served: list[BatchNorm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a residual network halves its images: no norm of PyTorch's is left."""
    left: list[Any] = []

    def seen(graph: torch.fx.Graph) -> None:
        targets = (norm_layers.BATCH_NORM_FORWARD, norm_layers.BATCH_NORM_BACKWARD)
        left.extend(node for node in graph.nodes if node.target in targets)

    # Looks at the graph before its last pass.
    monkeypatch.setattr(backend.passes, "restore_eager_batch_norms", seen)
    block = NormBlock(AFTER["relu"])
    parts = {"conv": block.conv, "norm": block.norm, "last": block.last}
    model = Around(both, **parts, other=nn.BatchNorm2d(WIDTH)).to(memory_format=torch.channels_last)
    compare(model)
    assert sorted((p.activation, p.residual) for p in served[::2]) == [
        ("none", False), ("relu", True)
    ]  # fmt: skip
    assert left == []


def twice(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.relu(m.norm(m.conv(torch.relu(m.norm(m.conv(x)))))))


def read(m: Any, x: Tensor) -> Tensor:
    before = 2 * m.norm.running_mean
    out = m.last(torch.relu(m.norm(m.conv(x))))
    return out + before.sum() + m.norm.running_mean.sum()


@pytest.mark.parametrize("forward", [twice, read])
def test_running_statistics_of_a_layer_that_is(forward: Any, served: list[BatchNorm]) -> None:
    """Used twice in a step, or read before and after it."""
    block = NormBlock(AFTER["relu"])
    model = Around(forward, conv=block.conv, norm=block.norm, last=block.last)
    compare(model.to(memory_format=torch.channels_last), steps=3)
    assert served


def test_a_layer_that_does_not_learn_has_the_same_gradients(served: list[BatchNorm]) -> None:
    model = NormBlock(AFTER["silu"]).to(memory_format=torch.channels_last)
    model.norm.requires_grad_(False)
    compare(model)
    assert len(served) == 2


@pytest.mark.parametrize("kind", ["no statistics", "channels first", "float64"])
def test_what_is_left_to_pytorch(kind: str, served: list[BatchNorm]) -> None:
    model = NormBlock(AFTER["relu"], track_running_stats=kind != "no statistics")
    x = images()
    if kind != "channels first":
        model = model.to(memory_format=torch.channels_last)
    else:
        x = x.detach().contiguous().requires_grad_()
    if kind == "float64":
        model, x = model.double(), x.detach().double().requires_grad_()
    compare(model, x)
    assert served == []


def test_a_gradient_by_statistics_that_no_norm_computed_is_left_alone(served: Any) -> None:
    """A pass that fails would be an error here (`conftest.nothing_captured`)."""

    class GivenStatistics(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            still, gradient = x.detach(), torch.ops.aten.native_batch_norm_backward.default
            read = still, still, self.weight.detach(), self.running_mean, self.running_var
            saved = self.running_mean, self.running_var
            grad, _, _ = gradient(*read, *saved, True, 1e-5, [True, True, True])
            return grad + super().forward(x)

    compare(GivenStatistics(WIDTH))


def test_both_directions_are_replaced_together() -> None:
    problem = BatchNorm(4, 6, 5, WIDTH)
    ours = Choice(problem, "h100", "predicted", FASTER, 1.0, pytorch_ms=1.5)
    slow = Choice(problem, "h100", "predicted", FASTER, 2.0, pytorch_ms=1.0)
    theirs = Choice(problem, "h100", "predicted", PYTORCH_OPERATOR, 1.0, pytorch_ms=1.0)
    guessed = Choice(problem, "h100", "heuristic", FASTER, 1.0, pytorch_ms=9.0)
    assert normalising._gain_ms(ours, ours) == 1.0
    assert normalising._gain_ms(ours, slow) < 0.0
    assert normalising._gain_ms(ours, theirs) == 0.0
    assert normalising._gain_ms(ours, guessed) == 0.0


def kept(model: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return what a step keeps for its backward pass, a tensor for each memory."""
    found: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(x)
    return list(found.values())


def test_less_is_saved_for_the_backward_pass(served: list[BatchNorm]) -> None:
    """The argument of SiLU is computed again."""

    def saved(model: Callable[[Tensor], Tensor], x: Tensor) -> int:
        return sum(t.untyped_storage().nbytes() for t in kept(model, x))

    model = NormBlock(AFTER["silu"]).to(memory_format=torch.channels_last)
    x = images()
    image_bytes = x.numel() * x.element_size()
    assert saved(captured(model), x) <= saved(copy.deepcopy(model), x) - image_bytes


def images_kept(model: nn.Module) -> int:
    """Return how many tensors of the shape of its input a step keeps for its backward pass."""
    x = images()
    return [t.shape for t in kept(captured(model, inductor=True), x)].count(x.shape)


#: Activations before a gate that a norm's operator computes too.
BEFORE_GATES = ("none", "relu", "silu", "gelu", "hardswish", "relu6", "leaky ReLU")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", BEFORE_GATES)
def test_what_a_gate_multiplies_is_not_kept(
    name: str, affine: bool, served: list[BatchNorm], uncompiled: None
) -> None:
    """The gate's gradient computes it again from the input of the norm, which is kept anyway."""

    def gated(y: Tensor, x: Tensor) -> Tensor:
        y = AFTER[name](y, x)
        return y * torch.sigmoid(y.mean((2, 3), keepdim=True))

    model = NormBlock(gated, affine=affine).to(memory_format=torch.channels_last)
    for vector in model.norm.parameters():
        nn.init.uniform_(vector, -2.0, 2.0)
    compare(model, inductor=True)
    assert images_kept(model) == 3  # the inputs of the two convolutions and of the norm
    assert {problem.activation for problem in served} == {FUSED[name][0]}


def attended(model: Any, x: Tensor) -> Tensor:
    """A gate by maxima, which a layer reads: their gradient compares them with the result."""
    y = model.norm(x)
    return y * torch.sigmoid(model.gate(y.amax((2, 3), keepdim=True)))


def counting(model: Any, x: Tensor) -> Tensor:
    """A gate behind the sum of a norm and of a buffer that the call writes to."""
    y = model.norm(x) + model.count
    model.count.add_(1)
    return y * torch.sigmoid(y.mean((2, 3), keepdim=True))


def branched(model: Any, x: Tensor) -> Tensor:
    """A gate beside a layer, which reads the norm's result from memory."""
    y = model.norm(x)
    return y * torch.sigmoid(y.mean((2, 3), keepdim=True)) + model.gate(y)


@pytest.mark.parametrize("function", [attended, counting, branched])
def test_gates_have_their_gradients(function: Any, served: Any, uncompiled: None) -> None:
    """A formula in the place of the norm's saved result has another last bit, and reads the present
    values of buffers."""
    layers: dict[str, nn.Module] = {"norm": nn.BatchNorm2d(WIDTH)}
    if function is not counting:
        layers["gate"] = nn.Conv2d(WIDTH, WIDTH, 1)
    model = Around(function, **layers)
    model.register_buffer("count", torch.zeros(1, WIDTH, 1, 1))
    nn.init.normal_(model.norm.weight)
    compare(model, inductor=True)
    assert function is not branched or images_kept(model) == 2  # inputs of norm and layer

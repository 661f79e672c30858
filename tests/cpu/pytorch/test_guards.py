"""A guard tells calls of another kind from those that it was made of."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import confpred
from confpred.pytorch import autograd, choosing, quiet, routing, switch
from confpred.pytorch.fallback import PYTORCH_CONV2D
from confpred.pytorch.guards import guard


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def image(
    *, n: int = 2, size: int = 6, dtype: torch.dtype = torch.float32, last: bool = True
) -> Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.zeros(n, 8, size, size, dtype=dtype).to(memory_format=layout)


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(8, 1, 3, 3))


def test_agrees_with_tensors_alike() -> None:
    agrees = guard(image(), weight())
    assert agrees(image(), weight())


@pytest.mark.parametrize(
    "other",
    [
        image(size=7),
        image(last=False),
        image(dtype=torch.float16),
        image().requires_grad_(),
        image()[:1],
        image().as_subclass(Subclass),
        torch.nn.Parameter(image()),
        image().to("meta"),
        image().to_sparse(),
    ],
    ids=["size", "layout", "dtype", "grad", "batch", "subclass", "parameter", "device", "sparse"],
)
def test_disagrees_with_another_tensor(other: Tensor) -> None:
    filters = weight()
    agrees = guard(image(), filters)
    assert not agrees(other, filters)


@pytest.mark.parametrize(
    "mode",
    [partial(torch.autocast, "cpu", torch.bfloat16), torch.inference_mode, Watching],
    ids=["autocast", "inference mode", "dispatch mode"],
)
def test_disagrees_in_another_mode(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    x, filters = image(), weight()
    agrees = guard(x, filters)
    with mode():
        assert not agrees(x, filters)
    assert agrees(x, filters)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_disagrees_where_a_tracer_or_a_transform_looks_on() -> None:
    x, filters = image(), weight()
    agrees = guard(x, filters)
    seen: list[bool] = []

    def ask(t: Tensor) -> Tensor:
        seen.append(agrees(x, filters))
        return t * 1

    torch.jit.trace(ask, (torch.zeros(1),), check_trace=False)
    torch.func.vmap(ask)(torch.zeros(3, 1))
    torch.func.grad(lambda t: ask(t).sum())(torch.zeros(3))
    assert seen == [False, False, False]


def test_keeps_no_tensor_alive() -> None:
    x, filters = image(), weight()
    agrees = guard(x, filters)
    gone = weakref.ref(x), weakref.ref(filters)
    del x, filters
    assert [reference() for reference in gone] == [None, None]
    assert agrees(image(), weight())


def test_without_pytorchs_guards_nothing_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confpred.pytorch.guards._TensorGuards", None)
    x, filters = image(), weight()
    assert not guard(x, filters)(x, filters)


def test_what_is_remembered_anew_is_asked_for_again() -> None:
    for anew in (lambda: choosing.remember("key", None), choosing.forget):
        choosing.latest[1] = object()
        layer = torch.nn.Conv2d(8, 8, 3)
        quiet.rest(layer)
        anew()
        assert not choosing.latest
        assert not quiet.rests(layer.__dict__)


class Lookups(dict[Any, Any]):
    """What serves calls, and how often it was looked up."""

    count = 0

    def __getitem__(self, key: Any) -> Any:
        self.count += 1
        return super().__getitem__(key)


def left(layer: torch.nn.Module) -> int:
    """How many more calls of `layer` go straight on."""
    found = layer.__dict__.get(quiet.MARK, 0) - quiet.woken
    return found if 0 < found <= quiet.CALLS else 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lookups]:
    """What serves dense layers, all of whose tensors are taken for plain ones on a GPU."""
    found = Lookups()
    for module in (choosing, routing):
        monkeypatch.setattr(module, "served", found)
    monkeypatch.setattr(routing, "_is_cuda", lambda _: True)
    monkeypatch.setattr(routing, "_is_plain", lambda *_: True)
    choosing.forget()
    yield found
    choosing.forget()


def test_a_layer_that_is_ours_in_graphs_alone_is_looked_up_there(served, monkeypatch) -> None:
    capturing, ours = [False], []
    for module in (choosing, autograd):
        monkeypatch.setattr(module, "is_capturing", lambda: capturing[0])
    serve = autograd.InGraphs(lambda x, *_: ours.append(x) or x, torch.conv2d)
    monkeypatch.setattr(routing, "_find_conv2d", lambda key, *_: choosing.remember(key, serve))
    monkeypatch.setattr(switch, "PYTORCH_CAPTURE_BEGIN", lambda _: None)
    module, x = torch.nn.Conv2d(8, 8, 3), image()
    with confpred.enabled():
        for step, looked_up in ((3, 2), (2 * quiet.CALLS, 0)):
            before = served.count
            for _ in range(step):
                module(x)
            assert served.count - before == looked_up
            assert not ours
        capturing[0] = True
        torch.cuda.CUDAGraph.capture_begin(None)
        for _ in range(3):
            assert module(x) is x
        capturing[0] = False
        before = served.count
        module(x)
        assert served.count == before
    assert len(ours) == 3


@pytest.mark.parametrize("by_module", [False, True])
def test_a_layer_that_stays_pytorchs_is_not_looked_up_again(by_module, served, monkeypatch) -> None:
    """Until its input is of another kind, or gradients of its filter are or are not asked for, for
    more than some calls of a module."""
    monkeypatch.setattr(routing, "_find_conv2d", lambda key, *_: choosing.remember(key, None))
    module = torch.nn.Conv2d(8, 8, 3, bias=False)

    def looked_up(x: Tensor) -> int:
        before = served.count
        if by_module:
            module(x)
        else:
            routing.conv2d(x, module.weight)
        return served.count - before

    def while_quiet(x: Tensor) -> None:
        """The calls of a layer that nobody looks at."""
        for _ in range(left(module)):
            assert looked_up(x) == 0
        assert not left(module)

    with confpred.enabled():
        for x in (image(), image(size=7), image().requires_grad_()):
            while_quiet(x)
            assert [looked_up(x) for _ in range(4)] == [1, 1, 0, 0]  # found, noted
            assert bool(left(module)) is by_module
        with torch.no_grad():
            while_quiet(image())
            assert [looked_up(image()) for _ in range(4)] == [1, 1, 0, 0]
        for wanted in (True, False, True):
            module.weight.requires_grad_(wanted)
            while_quiet(image())
            assert [looked_up(image()) for _ in range(2)] == [1, 0]


def test_a_layer_that_stays_pytorchs_is_looked_at_now_and_then(served, monkeypatch) -> None:
    monkeypatch.setattr(routing, "_find_conv2d", lambda key, *_: choosing.remember(key, None))
    agreeing: list[Tensor] = []
    monkeypatch.setattr(choosing, "guard", lambda *_: lambda x: not agreeing.append(x))
    module, x = torch.nn.Conv2d(8, 8, 3), image()
    with confpred.enabled():
        for _ in range(2 + 3 * (1 + quiet.CALLS)):
            module(x)
    assert len(agreeing) == 3


@pytest.mark.parametrize("mark", [1, 10**6, -5])
def test_a_count_of_another_process_means_little(mark, served, monkeypatch) -> None:
    """As of a model from a file that some other version wrote."""
    monkeypatch.setattr(routing, "_find_conv2d", lambda key, *_: choosing.remember(key, None))
    module, x = torch.nn.Conv2d(8, 8, 3), image()
    with confpred.enabled():
        module.__dict__[quiet.MARK] = mark
        for _ in range(quiet.CALLS + 1):
            module(x)
    assert served.count


def test_what_a_layer_counts_is_in_neither_copies_nor_files(served, monkeypatch) -> None:
    monkeypatch.setattr(routing, "_find_conv2d", lambda key, *_: choosing.remember(key, None))
    module, x = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3)), image()
    (layer,) = module
    before = set(vars(layer))
    with confpred.enabled():
        for _ in range(4):
            module(x)
        assert set(vars(layer)) == {*before, quiet.MARK}
        (copied,), again = copy.deepcopy(module), pickle.loads(pickle.dumps(module))  # noqa: S301
        for other in (copied, again[0]):
            assert set(vars(other)) == before
            assert torch.equal(other(x), layer(x))
        scripted = torch.jit.script(copied)
        assert torch.equal(scripted(x), module(x))
        assert left(layer), "it rests still"
    assert set(vars(layer)) == before
    assert "__getstate__" not in vars(torch.nn.Conv2d)


def test_a_layer_rests_though_it_was_pending_at_first(served, monkeypatch) -> None:
    """As where other threads find the kernels, and find none that pays."""
    monkeypatch.setattr(
        routing, "_find_conv2d", lambda key, *_: choosing.remember(key, PYTORCH_CONV2D)
    )
    module, x = torch.nn.Conv2d(8, 8, 3), image()
    with confpred.enabled(), torch.no_grad():
        for _ in range(4):
            module(x)
        assert not left(module)
        for key in list(served):
            choosing.remember(key, None)
        for _ in range(3):
            module(x)
        assert left(module)


def test_shapes_that_alternate_are_both_noticed(served, monkeypatch) -> None:
    """Each is served as it should be, though the other one's layer is PyTorch's."""
    ours: list[int] = []

    def find(key: Any, x: Tensor, *_: object) -> Any:
        serve = (lambda x, *_: ours.append(len(x)) or x) if len(x) == 4 else None
        return choosing.remember(key, serve)

    monkeypatch.setattr(routing, "_find_conv2d", find)
    module = torch.nn.Conv2d(8, 8, 3)
    with confpred.enabled(), torch.no_grad():
        for _ in range(2 + quiet.CALLS):
            module(image(n=2))
        for _ in range(10):
            module(image(n=4))
            module(image(n=2))
    assert len(ours) >= 10 - quiet.CALLS // 2 - 1


def test_a_layer_of_several_shapes_is_noted_once_for_each(served, monkeypatch) -> None:
    """As of a head that is shared by maps of several sizes."""
    monkeypatch.setattr(routing, "_find_conv2d", lambda key, *_: choosing.remember(key, None))
    noted: list[Any] = []
    real = routing.note
    monkeypatch.setattr(routing, "note", lambda *g, **k: noted.append(g) or real(*g, **k))
    module, sizes = torch.nn.Conv2d(8, 8, 3), (5, 6, 7)
    with confpred.enabled(), torch.no_grad():
        for _ in range(20):
            for size in sizes:
                module(image(size=size))
    assert len(noted) <= 2 * len(sizes)

"""Who holds a saved tensor of a CUDA graph; the graphs themselves are tested on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from confpred.pytorch.run.graphs import Graphed, GraphMemory, Recording
from confpred.pytorch.run.memory import Copier, SavedTensors


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0].sum(), None


def recorded(saved: Tensor) -> Tensor:
    return Saves.apply(torch.ones(2, requires_grad=True), saved)


@pytest.mark.parametrize("hold", [
    lambda x: x, lambda x: [x], lambda x: x.detach(), lambda x: x.view(6), lambda x: x[1:],
    lambda x: x.untyped_storage(), recorded, lambda x: x.T.data, lambda x: (lambda: x),
    lambda x: (recorded(x), recorded(x))[1],
])  # fmt: skip
def test_a_saved_tensor_that_is_held(hold: Callable[[Tensor], Any]) -> None:
    base = torch.arange(6.0)
    saved = SavedTensors([base.view(2, 3), torch.ones(4), base[2:]])
    for index in range(3):
        for _ in range(2):
            assert not saved.are_held()
            holder = hold(list(saved)[index]) if index < 1 else [list(saved)[index]]
            assert saved.are_held()
            del holder
    assert not saved.are_held()


def test_what_autograd_holds_is_seen_without_pythons_count() -> None:
    """Newer PyTorch counts a tensor that C++ holds for Python, too; older does not."""
    saved = SavedTensors([torch.ones(2, 3)])
    _, before, _ = saved._counts()
    out = recorded(next(iter(saved)))
    _, after, _ = saved._counts()
    assert after != before
    del out
    assert saved._counts()[1] == before


def test_what_is_computed_from_them_holds_nothing() -> None:
    saved = SavedTensors([torch.ones(2, 3)])
    (x,) = saved
    found = [x.clone(), x + 1, copy.deepcopy(x), x.sum()]
    del x
    assert not saved.are_held()
    assert len(found) == 4


def test_a_backward_pass_frees_them() -> None:
    saved = SavedTensors([torch.ones(2, 3)])
    out = recorded(next(iter(saved)))
    assert saved.are_held()
    out.sum().backward(retain_graph=True)
    assert saved.are_held()
    out.sum().backward()
    assert not saved.are_held()


def test_they_lie_in_the_memory_that_they_are_made_from() -> None:
    base = torch.arange(6.0)
    results = [base.view(2, 3), base[2:], torch.ones(0)]
    first, second, empty = saved = list(SavedTensors(results))
    base.mul_(2)
    for mine, other in zip(saved, results, strict=True):
        assert torch.equal(mine, other)
        assert mine.stride() == other.stride()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert empty.numel() == 0


def test_a_result_that_repeats_its_memory_is_copied_with_it() -> None:
    graphed = Graphed(
        list, memory=GraphMemory(), device=0, static=(), written=(), visible=None,
        kind="inference", reasons=set(), dtypes={},
    )  # fmt: skip
    recording = Recording(None, ())
    repeated = torch.arange(2.0)[:1].expand(2)  # as many elements as its memory has
    overlapping = torch.arange(3.0).unfold(0, 2, 1)  # more elements than its memory has
    graphed._locate_results(recording, [], [repeated, torch.ones(3), overlapping], {})
    strides = [{i: x.stride() for i, x in like.items()} for _, like in recording.shared]
    assert strides == [{0: (0,)}, {2: (1, 1)}]
    assert [copier.places for copier in recording.copiers.values()] == [[1]]


def test_results_are_converted_as_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dict.fromkeys(range(3), torch.float32)
    graphed = Graphed(
        list, memory=GraphMemory(), device=0, static=(), written=(), visible=None,
        kind="backward", reasons=set(), dtypes=wanted,
    )  # fmt: skip
    recording = Recording(SimpleNamespace(replay=lambda: None), ())
    whole = torch.arange(6.0).half().view(2, 3).t()
    shared = torch.arange(4.0).half()
    made = [whole, shared[:2], shared[2:], torch.ones(2), torch.ones(2).half()]
    graphed._locate_results(recording, [], made, {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)  # there is none here
    for results in (recording.replay([], GraphMemory(), 0), graphed._plain(made)):
        assert [x.dtype for x in results] == [torch.float32] * 4 + [torch.float16]
        assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(results, made, strict=True))
        assert results[0].stride() == whole.stride()
        kept = [x.data_ptr() for x in made]
        assert not any(x.data_ptr() in kept for x in results[:3])


def test_small_copies_share_an_allocation() -> None:
    tensors = [
        torch.arange(3.0), torch.randn(2, 5, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(300, 300), torch.tensor(4.0), torch.ones(0, 2), torch.randn(4, 2).t(),
    ]  # fmt: skip
    copier = Copier(torch.float16)
    for place, x in enumerate(tensors):
        copier.add(place, x)
    first, second = copier.copies(), copier.copies()
    for x, copied, again in zip(tensors, first, second, strict=True):
        assert torch.equal(copied, x.half())
        assert copied.stride() == x.stride()
        assert copied.data_ptr() != again.data_ptr() or not x.numel()
    storages = [x.untyped_storage().data_ptr() for x in first]
    assert len(set(storages)) == 2
    assert storages.count(storages[2]) == 1, "large ones are kept by nobody who has another"
    addresses = [x.data_ptr() - storages[0] for i, x in enumerate(first) if i != 2 and x.numel()]
    assert [address % 512 for address in addresses] == [0, 0, 0, 0]
    assert len(set(addresses)) == 4


def test_copies_change_alone() -> None:
    """A gradient that was saved for another backward pass stays valid while others are zeroed."""
    copier = Copier(torch.float32)
    for place in range(2):
        copier.add(place, torch.ones(3))
    kept, other = copier.copies()
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * kept).sum()
    other.zero_()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1, 1]
    assert not kept._is_view()

"""Memory that launches share, and memory that is kept: whose it is, and when it is made anew."""

from __future__ import annotations

import pytest
import torch
from allocations import OfThisThread

from confpred.pytorch import workspace as module
from confpred.pytorch.workspace import lasting, workspace

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _none_yet(monkeypatch) -> None:
    monkeypatch.setattr(module, "_workspaces", {})


def test_what_lasts_is_not_of_the_pool_that_this_thread_allocates_from() -> None:
    with OfThisThread() as pool, torch.inference_mode():
        kept = lasting(lambda: torch.empty(64))
        passing = torch.empty(64)
        assert pool.alive() == {passing.data_ptr()}
        del passing
    assert not pool.alive()
    assert kept.fill_(1).sum() == 64


def test_an_error_of_the_allocation_is_the_callers() -> None:
    with pytest.raises(RuntimeError, match="negative dimension"):
        lasting(lambda: torch.empty(-1))


def test_launches_on_a_stream_share_a_workspace_that_grows() -> None:
    with OfThisThread() as pool:
        first = workspace(64, 128, CPU, 7)
        assert workspace(32, 128, CPU, 7) is first
        assert workspace(64, 128, CPU, 8) is not first
        first.zeroed.fill_(
            3
        )  # what a launch leaves is zero; this is to see that another one is new
        larger = workspace(0, 256, CPU, 7)
    assert (len(larger.zeroed), len(larger.scratch)) == (64, 256)
    assert not larger.zeroed.any()
    assert workspace(64, 256, CPU, 7) is larger
    assert not pool.alive()


def test_a_captured_graph_has_a_workspace_of_its_own_in_its_pool(monkeypatch) -> None:
    shared = workspace(64, 128, CPU, 7)
    monkeypatch.setattr(module, "is_capturing", lambda: True)
    with OfThisThread() as pool:
        space = workspace(64, 128, CPU, 7)
        assert space is not shared
        assert not space.zeroed.any()
        assert pool.alive() == {space.zeroed.data_ptr(), space.scratch.data_ptr()}
        del space
        assert not pool.alive()

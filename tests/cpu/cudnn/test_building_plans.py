"""How plans are built, kept and launched; cuDNN's front end and the driver only note what is asked
of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from confpred.cuda.cache import KernelCache
from confpred.cudnn import plans as plans_module
from confpred.cudnn.plans import Plans
from confpred.errors import LaunchError
from confpred.problem.conv2d import Problem
from confpred.problem.operation import SCRATCH, LibraryPlan

LAYER = Problem(2, 32, 20, 20, 32, 3, 3, padding=1)
PLAN = LibraryPlan("cudnn", "9.19", {"engine": 1})
NAMES = ("out", "in", "filter", SCRATCH)


class Noting:
    """cuDNN's front end, an operation graph of its, and the driver's `outside_capture`.

    Attributes:
        asked: what was asked for, and whether that was outside of a capture.
    """

    __version__ = "1.0"
    cudnnGraphNotSupportedError = NotImplementedError  # noqa: N815
    has_handles = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self._outside = False
        self.graph = self

    @contextmanager
    def outside_capture(self) -> Iterator[None]:
        before, self._outside = self._outside, True
        try:
            yield
        finally:
            self._outside = before

    def note(self, what: str) -> None:
        self.asked.append((what, self._outside))

    def backend_version(self) -> int:
        return 91900

    def create_handle(self) -> int:
        if not self.has_handles:
            raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")
        self.note("handle")
        return 7

    def set_stream(self, *, handle: int, stream: int) -> None:
        self.note(f"stream {stream}")

    def place(self, _: Any) -> int:
        return 0

    def build_plan_at_index(self, _: int) -> None:
        self.note("build")

    def get_workspace_size_plan_at_index(self, _: int) -> int:
        return 256

    def serialize(self) -> list[int]:
        return [1, 2, 3]

    def pygraph(self, **_: Any) -> Noting:
        return self

    def deserialize(self, _: int, content: list[int]) -> None:
        self.note(f"kept {content}")

    def _execute_plan_at_index(self, given: Any, workspace: int, *_: int) -> None:
        assert workspace == 4
        assert sorted(given.values()) == [1, 2, 3]
        self.note("launch")


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Noting:
    found = Noting()
    monkeypatch.setattr(plans_module, "front_end", lambda: found)
    monkeypatch.setattr(plans_module, "release", lambda: 919)
    monkeypatch.setattr(plans_module, "Graph", lambda *_, **__: found)
    monkeypatch.setattr(plans_module, "_of_thread", type("Thread", (), {})())
    monkeypatch.setattr(plans_module.driver, "outside_capture", found.outside_capture)
    monkeypatch.setattr(plans_module.driver, "describe", lambda _: ("a board", "1.0"))
    return found


def test_what_a_capture_forbids_is_done_outside_of_it(cudnn: Noting, tmp_path: Path) -> None:
    """All but launches of a plan that has been launched before."""
    built = Plans(LAYER, 0, KernelCache(tmp_path)).build(PLAN)
    assert cudnn.asked == [("handle", True), ("build", True)]
    enqueue = built.bind(NAMES)
    for stream in (5, 5, 6):
        enqueue(stream, (1, 2, 3, 4))
    assert cudnn.asked[2:] == [
        *(("stream 5", False), ("launch", True)),
        ("launch", False),
        *(("stream 6", False), ("launch", False)),
    ]


def test_a_plan_that_was_slow_to_build_is_loaded_outside_of_a_capture(
    cudnn: Noting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans_module, "_SLOW_S", -1.0)
    for _ in range(2):
        Plans(LAYER, 0, KernelCache(tmp_path)).build(PLAN)
    assert cudnn.asked == [("handle", True), ("build", True), ("kept [1, 2, 3]", True)]


def test_all_heuristics_are_asked_where_the_usual_ones_do_not_offer_a_plan(
    cudnn: Noting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def listed(_: Any, heuristics: tuple[str, ...], **__: Any) -> Noting:
        asked.append(heuristics)
        place = 0 if "B" in heuristics else None
        monkeypatch.setattr(Noting, "place", lambda *_: place)
        return cudnn

    monkeypatch.setattr(plans_module, "Graph", listed)
    Plans(LAYER, 0, KernelCache(tmp_path)).build(PLAN)
    assert asked == [plans_module.USUAL, plans_module.EVERY]


def test_without_a_handle_there_are_no_plans(cudnn: Noting, tmp_path: Path) -> None:
    cudnn.has_handles = False
    with pytest.raises(LaunchError, match="no handle: CUDNN_STATUS_NOT_INITIALIZED"):
        Plans(LAYER, 0, KernelCache(tmp_path))

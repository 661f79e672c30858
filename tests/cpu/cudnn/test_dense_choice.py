"""Dense layers chosen among cuDNN's plans, by a model of made-up times; nothing is launched."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
import torch

from confpred.cudnn.family import FAMILY
from confpred.data.parquet import schema
from confpred.errors import LaunchError
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.launch import runner
from confpred.launch.assignment import Assignment
from confpred.predict.choice import Choice
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import LibraryPlan
from confpred.pytorch import backend
from confpred.pytorch.run import choosing, loading
from confpred.pytorch.run.options import Options
from confpred.training.dataset import read_dataset
from confpred.training.train import train

NEW = Problem(24, 160, 20, 20, 96, 3, 3, padding=1)
DEVICE = synthetic.DEVICE


def rows() -> Iterator[dict[str, object]]:
    """Yield the first forty plans of each of 48 layers, of six networks; engine and tile decide."""
    for index in range(48):
        c, size = 32 << index % 4, (56, 28, 14)[index % 3]
        problem = Problem(1 + index, c, size, size, c, 3, 3, padding=1)
        legal = np.flatnonzero(FAMILY.legal(problem, DEVICE))[:40]
        features = FAMILY.features(problem, DEVICE, legal)
        engine, tile = (features[:, FAMILY.feature_names.index(n)] for n in ("engine", "tile_size"))
        floor_ms = DEVICE.roofline_s(problem) * 1e3
        times = floor_ms * (1.5 + (engine % 7) / 10 + np.abs(tile - 20) / 50)
        for row, ms in zip(legal, times, strict=True):
            yield measurement(problem, index, Candidate(FAMILY.name, int(row)), float(ms))
        yield measurement(problem, index, PYTORCH_OPERATOR, float(times.min() * 1.4))


def measurement(problem: Problem, index: int, candidate: Candidate, ms: float) -> dict[str, object]:
    return synthetic.row_of(problem, (f"net{index % 6}",), candidate, ms, source="cudnn 9.19")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    folder = tmp_path_factory.mktemp("dense")
    pq.write_table(pa.Table.from_pylist(list(rows()), schema(CONVOLUTION)), folder / "d.parquet")
    train(read_dataset([folder / "d.parquet"]), folder / "dense-1", hyper=synthetic.SMALL)
    return Predictor.load(folder / "dense-1")


class Refusing:
    """Plans of which cuDNN builds none but that of `row`."""

    row: int | None = None
    release = "9.19"

    def __init__(self, problem: Problem, ordinal: int) -> None:
        self.tried: list[LibraryPlan] = []

    def is_of_this_release(self, plan: LibraryPlan) -> bool:
        return plan.version == self.release

    def build(self, plan: LibraryPlan) -> object:
        self.tried.append(plan)
        if self.row is None or plan != FAMILY.launch(NEW, self.row).plan:
            raise LaunchError("cuDNN does not offer the plan for this problem")
        return self

    workspace_bytes = 0

    def bind(self, names: object) -> object:
        return lambda stream, addresses: None


@pytest.fixture
def on_gpu(dense: Predictor, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Refusing]]:
    """Yield a machine whose device 0 is known, and whose cuDNN is `Refusing`."""
    plans = type("Plans", (Refusing,), {})
    monkeypatch.setattr(choosing.driver, "device_of", lambda _: DEVICE)
    monkeypatch.setattr(choosing.torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(runner, "Plans", plans)
    monkeypatch.setattr(choosing, "_predictors", {})
    choosing.use_predictor(dense)
    yield plans
    choosing.forget()


def test_a_dense_layer_gets_a_plan_where_no_cudnn_is(dense: Predictor) -> None:
    choice = dense.choose(NEW, DEVICE)
    assert (choice.provider, choice.source) == (FAMILY.name, "predicted")
    assert not choice.is_guess
    assert choice.config is not None
    assert {"release", "engine"} <= choice.config.keys()


def test_the_next_plan_serves_where_the_first_is_not_offered(
    dense: Predictor, on_gpu: type[Refusing]
) -> None:
    ranking = [c.candidate for c in dense.rank(NEW, DEVICE, 8)]
    on_gpu.row = ranking[3].config_id
    choice = choosing.choose(NEW, 0)
    assert choice is not None
    assert choice.candidate == ranking[0]
    ready = loading.load(Assignment.of(choice), 0)
    assert ready is loading.load(Assignment.of(choice), 0)  # not built again
    assert ready is not None
    assert ready.assignment.candidate == ranking[3]
    on_gpu.row = None
    choosing.forget()
    assert loading.load(Assignment.of(choice), 0) is None  # PyTorch's own operator


def test_a_choice_becomes_the_plan_that_is_built(dense: Predictor, on_gpu: type[Refusing]) -> None:
    """The graph that is kept names it: the next process ranks nothing, and builds no other."""
    ranking = dense.rank(NEW, DEVICE, 8)
    on_gpu.row = ranking[3].config_id
    assert loading.compile_ahead([ranking[0]], 0) == {ranking[0]: ranking[3]}
    seen: list[Choice] = []
    with choosing.watch_choices(seen.append):
        assert backend.chooser(0, Options())([NEW]) == [ranking[3]]
    assert seen[-1] == ranking[3]  # a plan has the last choice that it sees
    choosing.use_predictor(Predictor({}))  # as in the next process, without a model
    assert loading.compile_ahead([ranking[3]], 0) == {ranking[3]: ranking[3]}
    on_gpu.row = None
    choosing.use_predictor(dense)
    assert loading.compile_ahead([ranking[0]], 0) == {ranking[0]: ranking[0]}  # PyTorch's operator


def test_plans_of_another_cudnn_are_not_tried(
    on_gpu: type[Refusing], caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu.release = "9.20"
    choice = choosing.choose(NEW, 0)
    assert choice is not None
    with caplog.at_level(logging.WARNING):
        assert loading.load(Assignment.of(choice), 0) is None
        assert loading.load(Assignment.of(choice), 0) is None
    assert len(caplog.records) == 1


def test_a_limit_of_the_workspace_holds_for_what_a_plan_turns_out_to_need(
    dense: Predictor, on_gpu: type[Refusing]
) -> None:
    choice = choosing.choose(NEW, 0)
    assert choice is not None
    on_gpu.row, on_gpu.workspace_bytes = choice.candidate.config_id, 2**20
    assert loading.load(Assignment.of(choice), 0, Limits(workspace_bytes=2**20)) is not None
    less = Limits(workspace_bytes=2**20 - 1)
    assert loading.load(Assignment.of(choice), 0, less) is None
    choosing.use_predictor(dense.within(less))
    assert loading.load(Assignment.of(choice), 0) is None


def test_tf32_is_asked_for_only_where_pytorch_allows_it(on_gpu: type[Refusing]) -> None:
    single = replace(NEW, dtype="float32")
    before = torch.backends.cudnn.allow_tf32
    try:
        for allowed in (True, False):
            torch.backends.cudnn.allow_tf32 = allowed
            assert choosing.limits_for(single, UNLIMITED).tf32 is allowed
            assert choosing.limits_for(NEW, UNLIMITED).tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_each_problem_of_a_graph_gets_its_choice(on_gpu: type[Refusing]) -> None:
    problems = [NEW, replace(NEW, n=1), NEW, replace(NEW, dtype="float32")]
    found = choosing.choose_many(problems, DEVICE)
    assert [c.problem for c in found if c is not None] == problems
    assert found == [choosing.choose(p, 0) for p in problems]

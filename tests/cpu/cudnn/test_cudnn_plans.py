"""cuDNN's plans without cuDNN: their names, their table, and which of them may serve a problem."""

from __future__ import annotations

import builtins
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from confpred.cudnn import plans
from confpred.cudnn.family import FAMILY, largest_error
from confpred.cudnn.plans import front_end
from confpred.cudnn.table import (
    COLUMNS,
    ENGINE,
    FILE,
    FILE_ND,
    KINDS,
    KNOBS,
    NOTES,
    RELEASE,
    config_of,
    kind_of,
    read_lines,
    release_of,
    release_text,
    table,
    table_of,
)
from confpred.data.measurements import problem_of_row
from confpred.data.parquet import problem_columns, read
from confpred.data.suites import Entry, Suite
from confpred.errors import InvalidInput, MissingExtra
from confpred.families.protocol import ABSENT, Candidate, Family, LibraryFamily, config_dict
from confpred.families.registry import config_ids
from confpred.predict.choice import Choice
from confpred.predict.plan import named_candidate, plan_of, read_plan, write_plan
from confpred.problem.conv2d import ACTIVATIONS, CONVOLUTION, Problem
from confpred.problem.device import get_device
from confpred.problem.limits import Limits
from confpred.sampler import tasks
from confpred.training.dataset import data_files

H200 = get_device("h200")
DENSE = Problem(8, 64, 56, 56, 64, 3, 3, padding=1)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("eng22_k2=5_k13=1", {"engine": 22, "tile_size": 5, "tilek": 1}),
        ("eng0", {"engine": 0}),
        ("eng23_k12=-1", {"engine": 23, "split_k_buf": -1}),
        ("eng23_k2=5_k17=32", {"engine": 23, "tile_size": 5}),  # slices are left to cuDNN
        *((name, None) for name in ("", "eng", "eng1_k99=0", "ConvFwd_eng1", "eng1_k2")),
    ],
)
def test_a_plan_is_known_by_its_engine_and_knobs(name: str, config: dict | None) -> None:
    assert config_of(name) == config


def test_a_front_end_that_finds_no_cudnn_has_no_plans(monkeypatch) -> None:
    """They would be measured, fail, and be kept as failures."""

    def finds_none() -> int:
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    for name in ("front_end", "is_missing"):
        monkeypatch.setattr(plans, name, getattr(plans, name).__wrapped__)  # of each module below
    for version, lacks in ((finds_none, True), (lambda: 91900, False)):
        monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=version))
        names = ("cudnn", "cudnn_nd", "grouped_fprop")
        assert [plans.lacks_library(name) for name in names] == [lacks, lacks, False]


def test_a_release_is_major_and_minor() -> None:
    assert (release_of(91900), release_of(90101)) == (919, 901)
    assert (release_text(919), release_text(901)) == ("9.19", "9.1")


@pytest.mark.parametrize("file", [FILE, FILE_ND], ids=lambda file: file.stem)
def test_the_table_holds_each_plan_once(file: Path) -> None:
    lines = read_lines(file)
    keys = Counter(tuple(line[name] for name in (RELEASE, ENGINE, *KNOBS)) for line in lines)
    assert len(lines) > 1000
    assert keys.most_common(1)[0][1] == 1
    for line in lines:
        assert tuple(line) == COLUMNS
        assert line[RELEASE]
        assert line[ENGINE]
        assert all(line[note] in ("0", "1") for note in NOTES)
        assert all(line[KINDS].split("|"))


def test_a_line_becomes_a_config_its_notes_and_its_kinds() -> None:
    line = dict.fromkeys(COLUMNS, "") | {RELEASE: "919", ENGINE: "3", "tilek": "-1"}
    line |= {"tensor_core": "1", "repeatable": "0", KINDS: "a|b"}
    made = table_of([line])
    assert (made.configs["tilek"][0], made.configs["stages"][0]) == (-1, ABSENT)
    assert (made.notes["tensor_core"][0], made.notes["repeatable"][0]) == (True, False)
    assert set(made.kinds) == {"a", "b"}


def test_the_kind_of_a_problem_is_all_but_its_sizes() -> None:
    assert kind_of(DENSE) == "fprop float16 dense window"
    fused = Problem(1, 32, 8, 8, 32, 1, 1, stride=2, bias=True, residual=True, activation="relu")
    assert kind_of(fused) == "fprop float16 dense 1x1 stride bias residual relu"
    depthwise = Problem(1, 32, 9, 9, 32, 3, 3, groups=32, dilation=2, direction="dgrad")
    assert kind_of(depthwise) == "dgrad float16 depthwise window dilation"


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_plans_of_a_kind_are_described_and_launched(direction: str, dtype: str) -> None:
    problem = Problem(8, 64, 56, 56, 64, 3, 3, padding=1, direction=direction, dtype=dtype)
    assert isinstance(FAMILY, Family)
    assert isinstance(FAMILY, LibraryFamily)
    rows = np.flatnonzero(FAMILY.legal(problem, H200))
    assert len(rows) > 20
    features = FAMILY.features(problem, H200, rows)
    assert features.shape == (len(rows), len(FAMILY.feature_names))
    assert features.dtype == np.float32
    assert len(set(FAMILY.feature_names)) == len(FAMILY.feature_names)
    assert np.isfinite(features).all()
    assert (FAMILY.estimate_s(problem, H200, rows) > 0).all()
    odd = replace(problem, n=1, c=3, h=5, w=7, k=5, stride=(2, 2))
    assert np.isfinite(FAMILY.features(odd, H200, np.arange(len(FAMILY.configs)))).all()
    for row in rows[:40]:
        launch = FAMILY.launch(problem, int(row))
        assert launch.steps == ()
        assert launch.plan is not None
        assert launch.plan.source == "cudnn 9.19"
        words = {"release": 919, **launch.plan.config}
        assert words == config_dict(FAMILY, int(row))
        core = bool(table().notes["tensor_core"][row])
        assert launch.plan.tf32 == (core and dtype == "float32")


def of_kind(kind: str, n: int) -> Problem:
    """Return a problem of this kind, of `n` images."""
    direction, dtype, grouping, window, *rest = kind.split()
    size = 1 if window == "1x1" else 3
    activation = next((name for name in rest if name in ACTIVATIONS), "none")
    problem = Problem(
        n, 32, 15, 15, 32, size, size,
        stride=2 if "stride" in rest else 1,
        dilation=2 if "dilation" in rest else 1,
        groups={"dense": 1, "grouped": 4, "depthwise": 32}[grouping],
        dtype=dtype, direction=direction,
        bias="bias" in rest, residual="residual" in rest, activation=activation,
    )  # fmt: skip
    assert kind_of(problem) == kind
    return problem


def test_a_recorded_plan_names_any_of_the_plans(tmp_path: Path) -> None:
    """A config is written without the knobs that the plan does not have, and found again; those of
    engines that are never offered are found, and refused for that."""
    choices = []
    for row, line in enumerate(read_lines(FILE)):
        problems = [of_kind(kind, 1 + row) for kind in line[KINDS].split("|")]
        offered = [problem for problem in problems if FAMILY.legal(problem, H200)[row]]
        if offered:
            candidate = Candidate(FAMILY.name, row)
            choices.append(Choice(offered[0], H200.key, "predicted", candidate, 0.5))
        else:
            with pytest.raises(InvalidInput, match="one that is legal for the problem"):
                named_candidate(problems[0], H200, FAMILY.name, config_dict(FAMILY, row))
    assert len(choices) > 1500
    path = tmp_path / "plan.json"
    write_plan(path, plan_of(choices))
    found = read_plan(path, H200).choices
    assert [c.candidate for c in found] == [c.candidate for c in choices]


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.pop("engine"),
        lambda config: config.update(use_tex=1),
        lambda config: config.update(use_tex=ABSENT),
        lambda config: config.update(colour=1),
    ],
)
def test_a_config_that_is_not_spelled_out_is_none(change: Callable[..., Any]) -> None:
    row = int(np.flatnonzero(FAMILY.legal(DENSE, H200))[0])
    config = config_dict(FAMILY, row)
    assert "use_tex" not in config
    assert named_candidate(DENSE, H200, FAMILY.name, config).config_id == row
    change(config)
    with pytest.raises(InvalidInput, match="a config of cudnn"):
        named_candidate(DENSE, H200, FAMILY.name, config)


def test_what_must_repeat_to_the_bit_does() -> None:
    sizes = (8, 64, 56, 56, 64, 3, 3)
    free = FAMILY.legal(Problem(*sizes, padding=1, direction="wgrad"), H200)
    strict = Problem(*sizes, padding=1, direction="wgrad", deterministic=True)
    repeatable = FAMILY.legal(strict, H200)
    assert repeatable.any()
    assert not (repeatable & ~free).any()
    for problem in (strict, replace(strict, direction="dgrad", deterministic=False)):
        assert table().notes["repeatable"][FAMILY.legal(problem, H200)].all()


@pytest.mark.parametrize(("direction", "engines"), [("wgrad", {20, 47}), ("dgrad", {2})])
def test_engines_that_are_not_exact_are_not_offered(direction: str, engines: set[int]) -> None:
    problem = Problem(8, 64, 56, 56, 64, 3, 3, padding=1, direction=direction)
    known = table().kinds[kind_of(problem)]
    assert engines <= set(FAMILY.configs["engine"][known].tolist())
    offered = FAMILY.legal(problem, H200)
    assert not engines & set(FAMILY.configs["engine"][offered].tolist())
    assert not (offered & ~known).any()


@pytest.mark.parametrize("name", ["h200", "holdout/dense/h200"])
def test_no_measured_plan_is_off_by_more_than_it_tells(name: str, repository: Path) -> None:
    measured = ["family", "config", "status", "error"]
    columns = [*problem_columns(CONVOLUTION), *measured]
    parts = data_files([repository / "datasets" / name])
    given = pa.concat_tables(read(part, CONVOLUTION, columns) for part in parts)
    given = given.filter(pc.field("family") == FAMILY.name)
    known, core = config_ids(FAMILY.name), table().notes["tensor_core"]
    legal = cache(lambda problem: FAMILY.legal(problem, H200))
    compared = 0
    for line in given.to_pylist():
        row, problem = known[line["config"]], problem_of_row(line, Problem)
        if line["status"] not in ("ok", "wrong_result") or not legal(problem)[row]:
            continue
        compared += 1
        tf32 = problem.dtype == "float32" and bool(core[row])
        assert line["error"] <= largest_error(problem, tf32=tf32), line
    assert compared > 5000


@pytest.mark.parametrize(
    ("c", "k", "have"),
    [(192, 256, False), (256, 192, False), (64, 64, False), (128, 128, True), (128, 256, True)],
)
def test_groups_of_a_multiple_of_64_channels_have_plans(c: int, k: int, have: bool) -> None:
    problem = Problem(8, c, 28, 28, k, 3, 3, padding=1, groups=2)
    assert FAMILY.legal(problem, H200).any() == have


def test_engines_that_are_slow_in_groups_are_not_offered_for_them() -> None:
    dense = Problem(8, 256, 28, 28, 256, 3, 3, padding=1)
    for engine in (0, 46):
        plans = FAMILY.configs[ENGINE] == engine
        assert (plans & FAMILY.legal(dense, H200)).any()
        assert (plans & table().kinds[kind_of(replace(dense, groups=2))]).any()
        assert not (plans & FAMILY.legal(replace(dense, groups=2), H200)).any()


@pytest.mark.parametrize("name", ["h200", "holdout/any_width/h200"])
def test_no_plan_that_is_left_out_was_nearly_the_fastest(name: str, repository: Path) -> None:
    layer = problem_columns(CONVOLUTION)
    parts = data_files([repository / "datasets" / name])
    columns = [*layer, "family", "config", "status", "time_ms"]
    given = pa.concat_tables(read(part, CONVOLUTION, columns) for part in parts)
    given = given.filter((pc.field("status") == "ok") & (pc.field("groups") > 1))
    fastest = given.group_by(layer).aggregate([("time_ms", "min")])
    plans = given.filter(pc.field("family") == FAMILY.name).join(fastest, layer, join_type="inner")
    known, ratios = config_ids(FAMILY.name), []
    legal = cache(lambda problem: FAMILY.legal(problem, H200))
    for line in plans.to_pylist():
        allowed = legal(problem_of_row(line, Problem))
        if allowed.any() and not allowed[known[line["config"]]]:
            ratios.append(line["time_ms"] / line["time_ms_min"])
    assert len(ratios) > 200
    assert min(ratios) > 1.25


@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
def test_plans_that_may_be_off_by_more_than_is_allowed_are_left_out(direction: str) -> None:
    """By whoever lists candidates, and by whoever loads a launch."""
    problem = Problem(8, 64, 56, 56, 64, 3, 3, padding=1, dtype="float32", direction=direction)
    exact, rounded = (largest_error(problem, tf32=tf32) for tf32 in (False, True))
    rows = np.flatnonzero(FAMILY.legal(problem, H200))
    core = table().notes["tensor_core"][rows]
    assert core.any()
    assert not core.all()
    for limits, expected in (
        (Limits(), core | True),
        (Limits(max_error=rounded), core | True),
        (Limits(max_error=rounded * 0.99), ~core),
        (Limits(max_error=exact), ~core),
        (Limits(max_error=exact * 0.99), core & False),
    ):
        assert (FAMILY.allowed(problem, rows, limits) == expected).all()
        for row, allowed in zip(rows[:20].tolist(), expected, strict=False):
            assert limits.allow(problem, FAMILY.launch(problem, row)) == allowed


def test_a_filters_gradient_is_off_by_more_the_more_it_sums() -> None:
    """So that a limit which small layers keep leaves out plans for large ones."""
    small, large = (
        Problem(n, 64, 56, 56, 64, 3, 3, padding=1, direction="wgrad") for n in (1, 256)
    )
    assert largest_error(small, tf32=False) < 1e-3 < largest_error(large, tf32=False)
    limits = Limits(max_error=1e-3)
    for problem, kept in ((small, True), (large, False)):
        rows = np.flatnonzero(FAMILY.legal(problem, H200))
        assert (FAMILY.allowed(problem, rows, limits) == kept).all()


def test_gradients_of_filter_and_bias_together_have_no_plan() -> None:
    problem = Problem(8, 64, 56, 56, 64, 3, 3, padding=1, direction="wgrad", bias=True)
    assert not FAMILY.legal(problem, H200).any()
    assert not FAMILY.listed(problem, H200).any()  # cuDNN is not even asked


def test_without_the_front_end_plans_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_cudnn(name: str, *others: Any, **named: Any) -> Any:
        if name == "cudnn":
            raise ImportError("No module named 'cudnn'")
        return imported(name, *others, **named)

    monkeypatch.setattr(builtins, "__import__", without_cudnn)
    front_end.cache_clear()
    with pytest.raises(MissingExtra, match=r"nvidia-cudnn-frontend.*\[gpu\]"):
        FAMILY.listed(DENSE, H200)


def test_only_what_is_listed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of a problem has more plans than cuDNN offers for the problem itself."""
    legal = np.flatnonzero(FAMILY.legal(DENSE, H200))
    listed = np.zeros(len(FAMILY.configs), np.bool_)
    listed[legal[:3]] = True
    monkeypatch.setattr(type(FAMILY), "listed", lambda *_: listed)
    suite = Suite("dense", (Entry(DENSE),))
    (task,) = tasks.plan(suite, H200, tasks.Choosing(families=(FAMILY.name,), pytorch=False), {})
    assert list(task.config_ids) == legal[:3].tolist()
    assert task.source_digest == "cudnn 9.19"


def test_plans_are_measured_where_they_are_asked_for_by_name() -> None:
    """Nothing of a suite of dense layers is left to a run that names no family: there may be no
    cuDNN to list plans."""
    suite = Suite("dense", (Entry(replace(DENSE, c=65, k=130)),))
    assert tasks.plan(suite, H200, tasks.Choosing(pytorch=False), {}) == []

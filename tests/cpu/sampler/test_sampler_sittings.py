"""All of a problem in one sitting, anchors in every sitting, and what is prepared without a GPU."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import fleet_jobs
import numpy as np
import pytest
import sampler_jobs
import sampler_run
from command_line import confpred
from sampler_run import rows

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import merge
from confpred.data.suites import Entry, Suite, write_suite
from confpred.errors import DataError, InvalidInput, InvalidProblem
from confpred.families.protocol import PYTORCH, Candidate
from confpred.families.registry import all_families, config_words
from confpred.measure.timing import REPLAY_SECONDS, REPLAYS
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.sampler.forecast import PYTORCH_S, ROW_S, forecast, measuring_s
from confpred.sampler.run import Tally
from confpred.sampler.tasks import (
    BENCHMARK,
    FORMAT,
    HEURISTICS,
    Choosing,
    RowKey,
    Task,
    plan,
    read_anchors,
    units_of,
)

DEVICE = get_device("h100")
LAYERS = [Problem(n, 64, 14, 14, 64, 3, 3, padding=1, groups=64) for n in range(2, 10)]
SUITE = Suite("depthwise", tuple(Entry(layer) for layer in LAYERS))
FAMILY = all_families()["grouped_fprop"]
BOTH = (BENCHMARK, HEURISTICS)


def run(folder: Path, gpus: int = 1, **settings) -> Tally:
    chosen = {"configs": 2, "processes": 0, "measure": sampler_jobs.WHERE} | settings
    return sampler_run.run(SUITE, folder, *["h100"] * gpus, **chosen)


def by_problem(found: list[dict]) -> dict[Problem, list[dict]]:
    together: dict[Problem, list[dict]] = {}
    for row in found:
        together.setdefault(problem_of_row(row, Problem), []).append(row)
    return together


def left(measured=None, **settings) -> list[Task]:
    return plan(SUITE, DEVICE, Choosing(**{"configs": 4} | settings), measured or {})


def test_pytorchs_operator_is_planned_in_each_mode_that_is_missing():
    def modes(measured, wanted=BOTH):
        found = left(measured, cudnn_modes=wanted)
        return [t.cudnn_mode for t in found if (t.provider, t.problem) == (PYTORCH, LAYERS[0])]

    where = RowKey(LAYERS[0], PYTORCH, "")
    assert modes({}) == [BENCHMARK, HEURISTICS]
    assert modes({}, (HEURISTICS,)) == [HEURISTICS]
    assert modes({where: {BENCHMARK}}) == [HEURISTICS]
    assert modes({where: {HEURISTICS}}) == [BENCHMARK]
    assert modes({where: {""}}) == [HEURISTICS]  # rows of old, which do not say the mode
    assert modes({where: {BENCHMARK, HEURISTICS}}) == []


def test_heuristics_are_timed_by_a_process_that_has_never_tried_algorithms(tmp_path):
    run(tmp_path, pytorch=True, cudnn_modes=BOTH)
    for of_problem in by_problem(rows(tmp_path)).values():
        processes = {(row["family"], row["cudnn_mode"]): row["message"] for row in of_problem}
        tried = processes.pop((PYTORCH, HEURISTICS))
        assert set(processes.values()) == {processes[PYTORCH, BENCHMARK]} != {tried}
    tally = run(tmp_path, pytorch=True, cudnn_modes=BOTH)
    assert (tally.total_rows, tally.finished) == (0, True)


def test_picked_configs_come_beside_the_random_ones():
    def by_row(family, problem, candidates):
        return candidates[::-1] if family.name == "grouped_fprop" else None

    alone = {(t.problem, t.provider): set(t.config_ids) for t in left(pytorch=False)}
    for task in left(pytorch=False, picked=3, pick=by_row):
        rows, first = set(task.config_ids), alone[task.problem, task.provider]
        family = all_families()[task.provider]
        legal = np.flatnonzero(family.legal(task.problem, DEVICE))
        others = [row for row in legal if row not in first]
        assert first < rows
        assert len(rows) == 7
        assert rows <= set(legal.tolist())
        if task.provider == "grouped_fprop":
            assert rows - first == set(others[-3:])
    by_chance = left(pytorch=False, picked=3)
    assert {len(task.config_ids) for task in by_chance} == {7}
    assert by_chance == left(pytorch=False, picked=3)
    everything = left(pytorch=False, configs=None)
    assert left(pytorch=False, configs=None, picked=3, pick=by_row) == everything


def test_all_families_of_a_problem_are_one_unit_for_one_gpu(tmp_path):
    tasks = left(pytorch=True)
    units = units_of(tasks)
    assert [task for unit in units for task in unit.tasks] == tasks
    assert [unit.problem for unit in units] == list(dict.fromkeys(task.problem for task in tasks))
    run(tmp_path, gpus=2, pytorch=True, measure=fleet_jobs.MEASURE)
    found = by_problem(rows(tmp_path)).values()
    assert {len({row["run_id"] for row in of_problem}) for of_problem in found} == {1}
    assert len({row["run_id"] for of_problem in found for row in of_problem}) == 2


def test_a_run_of_any_length_leaves_whole_problems(tmp_path):
    tally = run(tmp_path, budget_s=0.5, measure=sampler_jobs.SLOWLY)
    families = {t.provider for t in left(pytorch=False)}
    for of_problem in by_problem(rows(tmp_path)).values():
        assert {row["family"] for row in of_problem} == families
    assert tally.rows == len(rows(tmp_path))


@pytest.fixture
def anchors_file(tmp_path) -> Path:
    row = int(np.flatnonzero(FAMILY.legal(LAYERS[0], DEVICE))[0])
    words = config_words(Candidate(FAMILY.name, row))
    anchors = [
        {"problem": layer.to_json(), "family": FAMILY.name, "config": words}
        for layer in (LAYERS[0], Problem(64, 64, 14, 14, 64, 3, 3, padding=1, groups=64))
    ]
    path = tmp_path / "anchors.json"
    path.write_text(json.dumps({"format": FORMAT, "anchors": anchors}))
    return path


def test_every_gpu_times_the_anchors_in_every_run(tmp_path, anchors_file):
    anchors = read_anchors(anchors_file, DEVICE)
    folder = tmp_path / "out"
    tally = run(folder, gpus=2, anchors=anchors)
    assert Counter(row["run_id"][-1] for row in rows(folder, "anchors")) == {"0": 2, "1": 2}
    assert tally.finished
    assert tally.rows == tally.total_rows == len(rows(folder))
    again = run(folder, anchors=anchors)  # nothing is left to measure: no anchors either
    assert again.total_rows == 0
    assert len(rows(folder, "anchors")) == 4
    run(folder, configs=3, anchors=anchors)
    assert len(rows(folder, "anchors")) == 6
    assert merge([folder], tmp_path / "anchors.parquet", anchors=True) == 6
    assert merge([folder], tmp_path / "rows.parquet") == len(rows(folder))


def test_the_anchors_that_ship_are_legal_everywhere(repository):
    path = repository / "datasets" / "anchors" / "anchors.json"
    for key in ("h100", "h200"):
        anchors = read_anchors(path, get_device(key))
        assert len(anchors) == 4
        assert {task.problem.direction for task in anchors} == {"fprop", "wgrad"}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"family": "grouped"}, InvalidInput, r"anchors\[0\].family='grouped'"),
        ({"config": "block_n=9"}, InvalidInput, r"anchors\[0\].config='block_n=9'"),
        ({"config": 3}, InvalidInput, r"anchors\[0\].config=3"),
        ({"problem": {"n": 0}}, InvalidProblem, r"anchors\[0\]"),
        ({"problem": 3}, DataError, r"anchors\[0\] must be an object"),
    ],
)
def test_a_bad_anchor_is_named(anchors_file, change, error, message):
    content = json.loads(anchors_file.read_text())
    content["anchors"][0] |= change
    anchors_file.write_text(json.dumps(content))
    with pytest.raises(error, match=message):
        read_anchors(anchors_file, DEVICE)


def test_a_forecast_knows_what_pytorchs_operator_takes_in_each_mode():
    tasks = [t for t in left(configs=1, cudnn_modes=BOTH) if t.provider == PYTORCH]
    expected = len(LAYERS) * sum(PYTORCH_S[mode] for mode in BOTH)
    assert forecast(tasks, [], DEVICE).measuring_s == pytest.approx(expected)


def test_a_forecast_is_of_replays_and_of_what_each_row_costs_besides():
    tasks = left(configs=None)
    found = forecast(tasks, [], DEVICE)
    rows = sum(found.rows.values())
    assert (found.problems, rows) == (len(LAYERS), sum(len(t.config_ids) for t in tasks))
    assert found.measuring_s == pytest.approx(sum(measuring_s(t, DEVICE) for t in tasks))
    theirs = found.rows[PYTORCH] * PYTORCH_S[BENCHMARK]
    least = (rows - found.rows[PYTORCH]) * (ROW_S + REPLAYS * REPLAY_SECONDS)
    assert least < found.measuring_s - theirs < 4 * least
    single = forecast(left(configs=1), [], DEVICE)
    assert single.measuring_s - theirs < (found.measuring_s - theirs) / 20


def test_kernels_are_compiled_and_packed_without_a_gpu(tmp_path, monkeypatch):
    suite, archive = tmp_path / "suite.json", tmp_path / "kernels.tar.xz"
    write_suite(Suite("one", SUITE.entries[:1]), suite)
    here, there = tmp_path / "here", tmp_path / "there"

    def sample(*words: object, cache: Path = here) -> subprocess.CompletedProcess[str]:
        to = ("sample", "--suite", suite, "--out", tmp_path / "out", "--configs", "1")
        monkeypatch.setenv("CONFPRED_CACHE_DIR", str(cache))
        return confpred(*to, *words)

    planned = sample("--plan", "h200")
    assert planned.returncode == 0, planned.stderr
    assert "1 problems on h200, 4 rows:" in planned.stdout
    assert "      1 of pytorch" in planned.stdout
    assert "3 kernels, 0 of them compiled" in planned.stdout
    packed = sample("--compile", "h200", "--archive", archive)
    assert packed.returncode == 0, packed.stderr
    assert "3 kernels, 3 of them compiled" in packed.stdout
    assert f"3 kernels in {archive}" in packed.stdout
    there.mkdir(mode=0o700)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            member.mode = 0o600
            (there / member.name).parent.mkdir(mode=0o700, exist_ok=True)
            (there / member.name).write_bytes(tar.extractfile(member).read())
    known = sample("--plan", "h200", cache=there)
    assert "3 kernels, 3 of them compiled" in known.stdout
    assert not (tmp_path / "out").exists()
    refused = sample("--plan", "h200", "--archive", tmp_path / "x")
    assert refused.returncode == 2
    assert "a file of what --compile has compiled" in refused.stderr
    unknown = sample("--plan", "c64")
    assert unknown.returncode != 0
    assert "c64" in unknown.stderr
    assert "Traceback" not in unknown.stderr

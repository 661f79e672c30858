"""The whole sampler: real processes, compilations and files; only the timed work is the CPU's."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fleet_jobs
import pytest
import sampler_jobs
import sampler_run
from sampler_run import rows, suite_of

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import merge, read, schema
from confpred.data.suites import Entry, Suite, write_suite
from confpred.errors import ConfpredError, InvalidInput, LaunchError
from confpred.families.registry import all_families, config_ids
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import get_device
from confpred.sampler.run import Sampling, Tally, anchors_off
from confpred.sampler.store import open_store
from confpred.sampler.tasks import Choosing, plan

LAYER = Problem(2, 64, 14, 14, 64, 3, 3, padding=1, groups=8)
DENSE = Problem(2, 256, 14, 14, 256, 3, 3, padding=1)
SUITE = Suite("test", (Entry(LAYER, ("net",)), Entry(DENSE)))
FAMILY = all_families()["grouped_fprop"]
CONFIGS = 6


@pytest.fixture(scope="module", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory):
    """Kernels compile once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONFPRED_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


def run(folder: Path, *devices: str, suite: Suite = SUITE, **settings) -> Tally:
    chosen = {"configs": CONFIGS, "processes": 2, "measure": sampler_jobs.MEASURE} | settings
    return sampler_run.run(suite, folder, *devices, **chosen)


def names(found: list[dict]) -> list[tuple]:
    return [(problem_of_row(row, Problem), row["config"], row["status"]) for row in found]


def test_every_planned_config_gets_a_complete_row(tmp_path):
    tally = run(tmp_path, pytorch=True)
    assert tally.finished
    assert tally.statuses == {"ok": CONFIGS + 2}  # PyTorch's operator serves the dense layer too
    found = rows(tmp_path)
    assert len(found) == tally.rows == tally.total_rows == CONFIGS + 2
    ours = [row for row in found if row["family"] == "grouped_fprop"]
    assert len({row["config"] for row in ours}) == CONFIGS
    for row in ours:
        assert problem_of_row(row, Problem) == LAYER
        assert row["networks"] == "net"
        assert row["time_ms"] > 0
        assert len(row["source_digest"]) == 16
        assert row["device"] == "h100"
    theirs = [row for row in found if row["family"] == "pytorch"]
    assert {problem_of_row(row, Problem) for row in theirs} == {LAYER, DENSE}
    assert {row["config"] for row in theirs} == {""}


def test_a_second_run_measures_only_what_is_missing(tmp_path):
    run(tmp_path, configs=2)
    first = {row["config"] for row in rows(tmp_path)}
    more = run(tmp_path, configs=None, budget_s=1e-9)
    again = run(tmp_path, configs=2)
    assert len(first) == 2
    assert more.total_rows > 100
    assert again.total_rows == again.rows == again.kernels == 0
    assert {row["config"] for row in rows(tmp_path)} == first


@pytest.mark.slow(reason="five runs of the sampler")
def test_a_second_round_measures_what_the_first_did_not(tmp_path):
    first_round = run(tmp_path / "a", pytorch=True)
    first = {row["config"] for row in rows(tmp_path / "a") if row["config"]}
    # In the folder of the first round, or in another one that its merged file is copied to.
    merge([tmp_path / "a"], tmp_path / "merged.parquet")
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "merged.parquet", tmp_path / "b" / "rows-first.parquet")
    more = {"configs": 2 * CONFIGS, "pytorch": True}
    for folder in (tmp_path / "a", tmp_path / "b"):
        second = run(folder, **more)
        assert 0 < second.rows == second.total_rows < 2 * CONFIGS + 1
        assert merge([folder], tmp_path / "all.parquet") == first_round.rows + second.rows
        found = read(tmp_path / "all.parquet", CONVOLUTION).to_pylist()
        measured = [row["config"] for row in found if row["config"]]
        assert len(measured) == len(set(measured)) == len(first) + second.rows
        assert run(folder, **more).total_rows == 0


@pytest.mark.slow(reason="a hang is waited for")
def test_crash_hang_and_error_cost_one_config_each(tmp_path, monkeypatch):
    (task, *_) = plan(SUITE, get_device("h100"), Sampling(configs=CONFIGS), {})
    crash, hang, error = task.config_ids[1:4]
    faults = {str(crash): "crash", str(hang): "hang", str(error): "error"}
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    tally = run(tmp_path, silence_s=8.0)
    assert tally.statuses == {"ok": CONFIGS - 3, "launch_error": 2, "timeout": 1}
    assert not tally.given_up
    failed = {row["message"]: row["status"] for row in rows(tmp_path) if row["status"] != "ok"}
    assert failed == {
        "the worker process died (SIGSEGV)": "launch_error",
        "RuntimeError: an illegal memory access was encountered": "launch_error",
        "no sign of life for 8 s: killed": "timeout",
    }


@pytest.mark.slow(reason="workers start and die again and again")
def test_a_task_that_fails_before_any_config_is_given_up_without_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", '{"start": "error"}')
    tally = run(tmp_path)
    assert tally.rows == 0
    assert len(tally.given_up) == 1
    assert "illegal memory access" in tally.given_up[0]
    monkeypatch.delenv("FAULTS")
    assert run(tmp_path).statuses == {"ok": CONFIGS}


@pytest.mark.slow(reason="workers start and die again and again")
def test_a_gpu_that_fails_everything_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", '{"start": "crash"}')
    with pytest.raises(LaunchError, match=r"device 0 failed 3 problems in a row.*SIGSEGV"):
        run(tmp_path, suite=suite_of(4), configs=1)


def test_a_kernel_that_does_not_compile_is_a_row_with_the_log(tmp_path):
    tally = run(tmp_path, compile=sampler_jobs.COMPILE_OR_REFUSE, configs=12)
    found = rows(tmp_path)
    assert {row["status"] for row in found} == {"ok", "compile_error"}
    assert len(found) == tally.rows == 12
    for row in found:
        config = config_ids(FAMILY.name)[row["config"]]
        (step,) = FAMILY.launch(LAYER, config).steps
        refused = sampler_jobs.refused(step.kernel)
        assert row["status"] == ("compile_error" if refused else "ok")
        assert ("no_such_name" in row["message"]) == refused


def test_a_compiler_that_cannot_run_ends_the_run(tmp_path):
    with pytest.raises(ConfpredError, match="kernels cannot be compiled: ModuleNotFoundError"):
        run(tmp_path, compile="no_such_module:compile")


def test_parts_measure_together_what_one_run_does(tmp_path):
    chosen = {"suite": suite_of(7), "configs": 2, "processes": 0, "measure": fleet_jobs.MEASURE}
    folders = [tmp_path / str(part) for part in range(1, 4)]
    tallies = [run(f, part=(part, 3), **chosen) for part, f in enumerate(folders, 1)]
    assert [tally.total_rows for tally in tallies] == [6, 4, 4]
    run(tmp_path / "whole", **chosen)
    merge(folders, tmp_path / "parts.parquet")
    merge([tmp_path / "whole"], tmp_path / "whole.parquet")
    own = ("run_id", "time", "error")  # not a number, so equal to nothing
    names = [name for name in schema(CONVOLUTION).names if name not in own]
    parts, whole = (read(tmp_path / f"{n}.parquet", CONVOLUTION, names) for n in ("parts", "whole"))
    assert parts.equals(whole)


@pytest.mark.slow(reason="measurements take half a second")
def test_two_gpus_share_the_work(tmp_path):
    slowly = {"configs": 2, "measure": sampler_jobs.SLOWLY}
    tally = run(tmp_path, "h100", "h100", suite=suite_of(4), **slowly)
    assert tally.statuses == {"ok": 8}


@pytest.mark.slow(reason="workers start and fail again and again")
def test_a_gpu_that_fails_everything_is_set_aside_where_there_are_others(tmp_path):
    chosen = {"suite": suite_of(40), "configs": 2, "processes": 0}
    tally = run(tmp_path, "h100", "h100", measure=fleet_jobs.MEASURE_ON_ONE, **chosen)
    (text,) = tally.set_aside
    assert text.startswith("CUDA device 0 failed 3 problems in a row")
    assert (tally.finished, tally.gpus, len(tally.given_up)) == (True, 1, 2)
    assert len({(r["n"], r["config"]) for r in rows(tmp_path)}) == len(rows(tmp_path)) == 76
    assert run(tmp_path, measure=fleet_jobs.MEASURE, **chosen).rows == 4


def test_a_gpu_whose_anchors_are_off_is_set_aside(tmp_path):
    (task,) = plan(suite_of(1), get_device("h100"), Choosing(configs=1, pytorch=False), {})
    layers = (task.problem, replace(task.problem, n=9))
    anchors = tuple(replace(task, problem=layer, anchor=True) for layer in layers)
    chosen = {"suite": suite_of(6), "processes": 0, "measure": fleet_jobs.MEASURE_UNLIKE}
    tally = run(tmp_path, "h100", "h100", "h100", anchors=anchors, **chosen)
    (text,) = tally.set_aside
    assert text == "CUDA device 2 takes 1.20 of the others' time for the anchors: set aside"
    assert (tally.finished, tally.gpus, len(rows(tmp_path, "anchors"))) == (True, 2, 6)
    assert {row["run_id"][-1] for row in rows(tmp_path)} == {"0", "1"}


def test_anchors_are_off_by_their_mean_or_by_a_failure():
    tasks = plan(suite_of(2), get_device("h100"), Choosing(configs=1, pytorch=False), {})
    times = dict.fromkeys(tasks, 2.0)
    alike = [times, times, times]
    assert anchors_off({tasks[0]: 2.2, tasks[1]: 2.0}, alike) == pytest.approx(1.1**0.5 - 1)
    assert anchors_off({tasks[0]: 2.0}, alike) == math.inf
    assert anchors_off(times, [{}, {}, times]) == anchors_off({}, [{}]) == 0


def test_gpus_of_two_kinds_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"gpus=.*GPUs of one kind"):
        run(tmp_path, "h100", "a100")


def start_program(tmp_path: Path) -> tuple[subprocess.Popen, Path]:
    """Return the sampler as a program, on a suite of many seconds, once it has written rows."""
    suite, folder = tmp_path / "suite.json", tmp_path / "out"
    write_suite(suite_of(40), suite)
    process = subprocess.Popen(
        [sys.executable, sampler_run.__file__, str(suite), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a signal to its group reaches its workers, not us
    )
    deadline = time.monotonic() + 60
    while not list(folder.glob("rows-*.parquet")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, folder


@pytest.mark.slow(reason="a run of seconds is interrupted")
def test_ctrl_c_stores_the_problem_in_flight_and_says_how_to_resume(tmp_path):
    process, folder = start_program(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the workers as well
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "not finished; to go on: confpred" in out
    assert "Traceback" not in out + err
    found = rows(folder)
    assert f"{len(found)} of 120 rows" in out
    assert 0 < len(found) < 120
    assert len(found) % 3 == 0
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.slow(reason="a run of seconds is killed")
def test_kill_loses_only_the_last_seconds_and_frees_the_folder(tmp_path):
    process, folder = start_program(tmp_path)
    stored = names(rows(folder))
    stale = folder / ".rows-x.parquet.1.tmp"  # as a sampler that is killed while writing leaves it
    stale.write_bytes(b"half")
    process.kill()
    process.wait()
    children = _group(process.pid)
    deadline = time.monotonic() + 20
    while children and time.monotonic() < deadline:
        time.sleep(0.1)
        children = _group(process.pid)
    assert not children, "a worker outlives the sampler"
    assert names(rows(folder))[: len(stored)] == stored
    assert stored
    with open_store(folder, "next", CONVOLUTION) as store:
        assert store.measured("h100")
        assert not stale.exists()


def _group(group: int) -> list[str]:
    """Processes of a process group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found

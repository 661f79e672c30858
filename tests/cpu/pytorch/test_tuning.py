"""Tuning where no model knows the GPU: measured in a budget, safely, kept, and equal on ranks.

The board and its times are made up (`tuning_jobs`); candidates, processes and files are real.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tuning_jobs
from command_line import confpred as command
from command_line import named
from filelock import FileLock
from network_blocks import as_chosen
from slow import slow_but
from torch import nn
from torch._dynamo.utils import counters

import confpred
from confpred.client import transfer
from confpred.cuda import driver
from confpred.cudnn import plans
from confpred.data.measurements import Run
from confpred.errors import InvalidInput, ModelError
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import family_named, operation_of
from confpred.measure.timing import Outcome
from confpred.predict.choice import Choice
from confpred.predict.plan import read_plan
from confpred.predict.predictor import Predictor
from confpred.problem import device as devices
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device, get_device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch import backend, eager, graph_cache, plan
from confpred.pytorch.backend import Options
from confpred.pytorch.run import choosing, loading, tuning, verify
from confpred.pytorch.run.choosing import ANY, Constraints
from confpred.pytorch.run.convolve import Call
from confpred.pytorch.run.tuning import Tuner
from confpred.sampler import kept, run
from confpred.sampler.jobs import MeasureJob
from confpred.sampler.tasks import task_of

LAYER = Problem(2, 64, 14, 14, 64, 3, 3, groups=64, padding=1)
LARGER = replace(LAYER, n=8, h=28, w=28)
FAMILY = "depthwise_fprop"
DRIVER = "580.1"
_PROCESSES = pytest.mark.slow(reason="processes start again and again")
_CHOOSE_AND_LOAD = loading.choose_and_load


class Board:
    """A GPU that is in no table; what tests change of it."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.record, self.patch = folder / "measured", patch
        named = {"key": "test-board", "product": "NVIDIA Test Board"}
        self.device: Device = replace(get_device("h100"), **named)
        patch.setenv("MEASURED", str(self.record))
        patch.setenv("CONFPRED_CACHE_DIR", str(folder / "cache"))
        devices.remember("0", asdict(self.device))
        self.facts()
        patch.setattr(tuning, "JOB", tuning_jobs.JOB)  # there is nothing to time
        patch.setattr(os, "sched_getaffinity", lambda _: ())  # nothing is compiled
        patch.setattr(kept, "unread", Counter())  # by this test

    def facts(
        self,
        version: str = DRIVER,
        *,
        free: int = 80 << 30,
        exclusive: bool = False,
        part: bool = False,
    ) -> None:
        name = self.device.product

        def find_gpus(gpus: str) -> dict[int, Run]:
            own = secrets.token_hex(4)
            return {int(gpus): Run(own, self.device.key, name, version, "13.0", "test")}

        # No GPU is here: the driver says what a GPU would.
        self.patch.setattr(driver, "device_of", lambda _: self.device)
        self.patch.setattr(driver, "describe", lambda _: (name, version))  # its driver
        self.patch.setattr(driver, "is_exclusive", lambda _: exclusive)  # its mode
        self.patch.setattr(driver, "is_part", lambda _: part)  # its context
        self.patch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 << 30))  # its memory
        self.patch.setattr(run, "find_gpus", find_gpus)  # there is none to find

    def folder(self) -> Path:
        return choosing.kept_folder(self.device, CONVOLUTION)

    def layers(self) -> Any:
        return tuning._Layers(0, self.device, CONVOLUTION, UNLIMITED)

    def ask(self, tuner: Tuner, *problems: Problem, constraints: Constraints = ANY) -> list[Choice]:
        """Return what is chosen in a capture."""
        token = choosing.measuring.set(tuner.on(0))
        try:
            return choosing.choose_many(problems or (LAYER,), self.device, constraints)
        finally:
            choosing.measuring.reset(token)

    def measured(self) -> list[str]:
        return self.record.read_text().splitlines() if self.record.exists() else []


@pytest.fixture
def board(tmp_path, monkeypatch) -> Iterator[Board]:
    made = Board(monkeypatch, tmp_path)
    choosing.use_predictor(Predictor({}))
    yield made
    choosing._predictors.clear()
    choosing.forget()


@pytest.fixture
def captures(board, captured, monkeypatch) -> Any:
    """Captures whose choices are those for the board."""

    def chooser(ordinal: int, options: Options) -> Callable[[Any], Any]:
        return lambda problems: choosing.choose_many(problems, board.device, options.constraints)

    monkeypatch.setattr(backend, "chooser", chooser)  # the driver is asked for nothing else
    return captured


@pytest.fixture(scope="module")
def shipped() -> Predictor:
    return Predictor.load()


def network() -> tuple[nn.Module, torch.Tensor]:
    """Return a network whose layer is `LAYER`, and images for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)).eval().half()
    x = torch.randn(2, 64, 14, 14).half()
    return model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


def warnings(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def legal(family: str, device: Device) -> list[int]:
    return [int(row) for row in family_named(family).legal(LAYER, device).nonzero()[0]]


def test_a_guess_is_measured_and_kept_for_the_next_process(board, caplog) -> None:
    guess = choosing.choose_many([LAYER], board.device)[0]
    first = Tuner(60.0)
    (choice,) = board.ask(first)
    assert guess.source == "heuristic"
    assert (choice.source, choice.predicted_ms, choice.pytorch_ms) == ("measured", 0.5, 1.0)
    assert choosing.runs_kernel(choice)
    assert first.note.startswith("measured 1 of 1 layers in ")
    assert "`confpred retrain --kept`" in first.note
    (warning,) = warnings(caplog)
    for words in ("NVIDIA Test Board", "at most 60 s", str(board.folder()), "tune=0"):
        assert words in warning
    lines = board.measured()
    assert lines[0].startswith("pytorch")
    assert lines.count(lines[0]) >= 2  # before and after the candidates
    for tuner in (Tuner(60.0), Tuner(0.0)):
        assert board.ask(tuner) == [choice]
        assert (board.measured(), tuner.spent_s) == (lines, 0.0)
        found = f"answers are kept in {board.folder()}; `confpred retrain --kept`"
        assert tuner.note.startswith(found)


def test_layers_that_may_save_most_come_first_and_what_is_alike_is_measured_less(board) -> None:
    problems = [LAYER, LARGER, replace(LAYER, activation="relu", bias=True)]
    dense = replace(LARGER, groups=1)  # takes longer, and PyTorch's operator is nearer to the best
    assert board.device.roofline_s(dense) > board.device.roofline_s(LARGER)
    choices = board.ask(Tuner(60.0), dense, *problems)
    assert [c.source for c in choices] == ["measured"] * 4
    tasks = tuning._tasks(board.layers(), problems, 4, {}, {})
    counts = [
        sum(len(t.config_ids) for t in tasks if t.problem == p and t.provider != "pytorch")
        for p in problems
    ]
    assert counts == [4, 4, 2]
    first = board.measured()[1]
    (largest, *_) = tuning.candidates(LARGER, board.device, UNLIMITED)
    assert first.startswith(largest.provider)


@pytest.mark.parametrize(("tune", "expected"), [(0.0, 0.0), (15.0, 15.0), (None, 60.0)])
def test_a_budget_is_asked_for_or_depends_on_the_models(board, shipped, tune, expected) -> None:
    assert Tuner(tune)._budget_on(board.device) == expected
    choosing.use_predictor(shipped)
    assert Tuner(tune)._budget_on(get_device("h100")) == (tune or 0.0)


# Whoever chooses looks kept answers up.


def in_capture(board: Board) -> Choice:
    return board.ask(Tuner(0.0))[0]


def in_eager_call(board: Board) -> Choice:
    (model, x), seen = network(), []
    with choosing.watch_choices(seen.append):
        out = confpred.conv2d(x, model[0].weight, padding=1, groups=64)
    torch.testing.assert_close(out, model(x))
    return seen[0]


def enabled(board: Board) -> Choice:
    (model, x), seen = network(), []
    call = Call(((1, 1), (1, 1), (1, 1), 64))
    with choosing.watch_choices(seen.append):
        saves = eager._saves(call, x, model[0].weight, None)
    assert saves == choosing.runs_kernel(seen[0])
    return seen[0]


def explained(board: Board) -> Any:
    row = confpred.explain(*network(), board.device).rows[0]
    return SimpleNamespace(source=row.reason, provider=row.provider)


def prepared(board: Board) -> Choice:
    out = board.record.with_name(secrets.token_hex(4))
    return plan.prepare(*network(), out, device=board.device).choices[0]


def verified(board: Board) -> Choice:
    return verify.find_best(LAYER, 0, 1, choosing.ANY)


@pytest.mark.parametrize("way", [in_capture, in_eager_call, enabled, explained, prepared, verified])
def test_every_choice_without_a_budget_takes_kept_answers(
    board, launches, monkeypatch, way
) -> None:
    (choice,) = board.ask(Tuner(60.0))
    lines = board.measured()
    monkeypatch.setattr(loading, "choose_and_load", _CHOOSE_AND_LOAD)  # the choice is the matter
    monkeypatch.setattr(plan, "_compile_kernels", lambda _: {})  # nobody launches them
    monkeypatch.setattr(verify, "_measure", lambda some, *_: some[0])  # there is no GPU to time on
    answer = way(board)
    assert (answer.source, answer.provider) == ("measured", choice.provider)
    board.facts("590.2")  # a hint from now on
    choosing.forget()
    assert way(board).source != "measured"
    assert board.measured() == lines


@pytest.mark.parametrize("fault", [
    "hang", "wrong", *(pytest.param(fault, marks=_PROCESSES) for fault in ("crash", "fault"))
])  # fmt: skip
def test_a_candidate_that_fails_costs_itself(board, monkeypatch, fault) -> None:
    few = [Candidate(FAMILY, row) for row in legal(FAMILY, board.device)[:3]]
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULTY", str(few[0].config_id))
    monkeypatch.setattr(tuning, "_SILENCE_S", 4.0)  # so that nobody waits long
    monkeypatch.setattr(tuning, "candidates", lambda *_: few)  # those with planted faults
    (choice,) = board.ask(Tuner(40.0))
    assert (choice.candidate, choice.source) == (few[1], "measured")


def test_a_budget_ends_what_hangs(board, monkeypatch) -> None:
    monkeypatch.setenv("FAULT", "hang")
    monkeypatch.setattr(tuning, "_GRACE_S", 0.5)  # so that nobody waits long
    begun = time.monotonic()
    tuner = Tuner(3.0)
    board.ask(tuner, LAYER, LARGER)
    assert time.monotonic() - begun < 10
    assert tuner.spent_s >= 3.0
    before = board.measured()
    (choice,) = board.ask(tuner, replace(LAYER, n=4))  # a new shape, and nothing is left
    assert choice.is_guess
    assert board.measured() == before


@_PROCESSES
def test_new_shapes_are_measured_while_the_budget_lasts(board) -> None:
    tuner = Tuner(60.0)
    board.ask(tuner)
    spent = tuner.spent_s
    (choice,) = board.ask(tuner, LARGER)
    assert choice.source == "measured"
    assert tuner.spent_s > spent > 0


@_PROCESSES
def test_another_driver_makes_answers_a_hint(board) -> None:
    (choice,) = board.ask(Tuner(60.0))
    lines = len(board.measured())
    board.facts("590.2")
    assert choice.candidate in [timed.candidate for timed in board.layers().hints()[LAYER]]
    own = tuning.candidates(LAYER, board.device, UNLIMITED)
    assert tuning.candidates(LAYER, board.device, UNLIMITED, own[5:6])[0] == own[5]
    (again,) = board.ask(Tuner(60.0))
    assert again.source == "measured"
    assert len(board.measured()) > lines


@_PROCESSES
@pytest.mark.parametrize("first", [True, False])
def test_so_does_cudnns_front_end_that_came_or_went(board, monkeypatch, first) -> None:
    """Without it no plan was measured, and with it a plan may be the answer that cannot run."""
    lines = 0
    for has_it in (first, not first):
        monkeypatch.setattr(plans, "is_missing", lambda has_it=has_it: not has_it)  # here
        assert bool(board.layers().hints()) == (lines > 0)
        assert board.ask(Tuner(0.0))[0].is_guess
        assert board.ask(Tuner(60.0))[0].source == "measured"
        assert len(board.measured()) > lines
        lines = len(board.measured())


DAMAGE = ("half", b"", b"PAR1 and nothing more", b"no rows\n" * 99)


@pytest.mark.parametrize(
    ("text", "written"),
    slow_but([("half", True), (b"", False)], product(DAMAGE, (True, False)), "more of the same"),
)
def test_a_damaged_file_costs_a_line_of_the_log(board, caplog, monkeypatch, text, written) -> None:
    (choice,) = board.ask(Tuner(60.0), LAYER, LARGER)[:1]
    (shard, *_) = board.folder().glob("rows-*.parquet")
    other = shard.with_name("rows-other.parquet")
    other.write_bytes(shard.read_bytes()[:100] if text == "half" else text)
    if not written:
        # Which fails, as on another user's file.
        monkeypatch.setattr(Path, "rename", lambda shard, _: shard.rmdir())
    caplog.clear()
    for _ in range(3):
        assert board.ask(Tuner(0.0)) == [choice]
    (warning,) = warnings(caplog)
    assert warning.startswith(f"ignoring measurements: {other} is not a whole file")


def test_what_a_damaged_file_held_is_measured_again(board) -> None:
    board.ask(Tuner(60.0))
    for shard in board.folder().glob("rows-*.parquet"):
        shard.write_bytes(shard.read_bytes()[:100])
    choosing._times.cache_clear()  # as in another process
    assert board.ask(Tuner(0.0))[0].is_guess
    assert board.ask(Tuner(60.0))[0].source == "measured"


def test_answers_that_cannot_be_read_cost_a_line_of_the_log(board, caplog, monkeypatch) -> None:
    board.ask(Tuner(60.0))
    choosing._times.cache_clear()  # as in another process
    caplog.clear()
    monkeypatch.setitem(sys.modules, "confpred.data.parquet", None)  # as without pyarrow
    for _ in range(3):
        assert board.ask(Tuner(0.0))[0].is_guess
    (warning,) = warnings(caplog)
    assert warning.startswith(f"cannot read {board.folder()}: ")


def test_answers_of_other_kernels_or_beyond_limits_do_not_count(board, monkeypatch) -> None:
    (choice,) = board.ask(Tuner(60.0))
    times = kept.times_in(board.folder(), CONVOLUTION)[LAYER]
    answer = lambda times: kept.answer(LAYER, board.device, times, UNLIMITED)  # noqa: E731
    assert answer(times) == choice
    slow = [replace(t, ms=0.99) if t.candidate != PYTORCH_OPERATOR else t for t in times]
    assert answer(slow).candidate == PYTORCH_OPERATOR
    assert answer(times[:1]) is None
    allowed = lambda family, problem, rows, limits: rows[rows != choice.config_id]  # noqa: E731
    monkeypatch.setattr(kept, "within", allowed)  # no config of the layer needs more than another
    assert answer(times).candidate not in (choice.candidate, PYTORCH_OPERATOR)
    monkeypatch.setattr(kept, "within", lambda *_: ())  # as where limits leave none
    assert answer(times) is None


@pytest.mark.parametrize("why", ["the budget ended", pytest.param("an upgrade", marks=_PROCESSES)])
def test_pytorchs_operator_alone_is_no_answer(board, monkeypatch, why) -> None:
    """Where it was the first that was measured, or kernels are others since."""
    with monkeypatch.context() as patch:
        if why == "an upgrade":  # of kernels
            patch.setattr("confpred.sampler.tasks.identity_of", lambda _: "old")  # as before it
        else:
            patch.setenv("FAULT", "hang")
            patch.setattr(tuning, "_GRACE_S", 0.5)  # so that nobody waits long
        board.ask(Tuner(3.0))
    assert PYTORCH_OPERATOR in [
        timed.candidate for timed in kept.times_in(board.folder(), CONVOLUTION)[LAYER]
    ]
    assert board.ask(Tuner(0.0))[0].is_guess
    (choice,) = board.ask(Tuner(60.0))
    assert (choice.source, choosing.runs_kernel(choice)) == ("measured", True)


def test_pytorchs_operator_is_the_answer_where_all_candidates_fail(board, monkeypatch) -> None:
    monkeypatch.setenv("FAULT", "wrong")
    (choice,) = board.ask(Tuner(60.0))
    assert (choice.source, choice.candidate) == ("measured", PYTORCH_OPERATOR)
    lines = board.measured()
    assert board.ask(Tuner(60.0)) == [choice]
    assert board.measured() == lines
    own = tuning.candidates(LAYER, board.device, UNLIMITED)
    hints = {LAYER: (kept.Timed(own[5], math.inf, ""),)}  # it failed under another driver
    _, first, _ = tuning._tasks(board.layers(), [LAYER], 1, hints, {})
    assert first.config_ids == (own[0].config_id,)


@pytest.mark.parametrize("by_call", [False, True])
def test_answers_keep_within_the_limits_in_force(board, monkeypatch, by_call) -> None:
    problem, limits = replace(LAYER, direction="wgrad"), Limits(0, deterministic=True)
    choosing.use_predictor(Predictor({}) if by_call else Predictor({}).within(limits))
    constraints = Constraints(limits if by_call else UNLIMITED)
    asked, within = [], kept.within
    # The same, and notes what it is asked.
    monkeypatch.setattr(kept, "within", lambda *given: asked.append(given) or within(*given))
    first, second = (board.ask(Tuner(s), problem, constraints=constraints) for s in (60.0, 0.0))
    assert first == second
    assert (first[0].source, first[0].problem.deterministic) == ("measured", True)
    assert {bound for *_, bound in asked} == {limits}


@_PROCESSES
def test_while_another_process_measures_others_wait_and_take_its_answers(board) -> None:
    found: list[list[Choice]] = []
    threads = [threading.Thread(target=lambda: found.append(board.ask(Tuner(60.0)))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert found[0][0].source == "measured"
    ours = [line for line in board.measured() if not line.startswith("pytorch")]
    assert len(set(ours)) == len(ours)  # no candidate was measured twice


def test_a_process_waits_no_longer_than_its_budget(board) -> None:
    board.folder().mkdir(parents=True)
    tuner = Tuner(1.5)
    begun = time.monotonic()
    with FileLock(board.folder() / ".lock"):
        (choice,) = board.ask(tuner)
    assert choice.is_guess
    assert time.monotonic() - begun < 5
    assert board.measured() == []


def test_layers_that_the_memory_does_not_hold_are_left_out(board) -> None:
    board.facts(free=tuning._CONTEXT_BYTES + tuning._COPIES * LAYER.minimum_bytes)
    tuner = Tuner(60.0)
    small, large = board.ask(tuner, LAYER, LARGER)
    assert (small.source, large.is_guess) == ("measured", True)
    assert "measured 1 of 2 layers" in tuner.note
    assert "for 1 the GPU lacks memory" in tuner.note


@pytest.mark.parametrize(("fact", "reason"), [
    ("exclusive", "the GPU's compute mode allows one process"),
    ("part", "other processes see all of a GPU that this context has a part of"),
])  # fmt: skip
def test_a_gpu_that_other_processes_cannot_measure_is_left_alone(
    board, caplog, fact, reason
) -> None:
    board.facts(**{fact: True})
    tuner = Tuner(60.0)
    for _ in range(2):
        assert board.ask(tuner)[0].is_guess
    (warning,) = warnings(caplog)
    assert reason in warning
    assert tuner.note == reason


@_PROCESSES
@pytest.mark.passes_fail
def test_a_gpu_that_always_fails_is_given_up(board, monkeypatch, caplog) -> None:
    monkeypatch.setattr(tuning, "JOB", "tuning_jobs:no_such_job")  # a process that cannot start
    tuner = Tuner(60.0)
    choices = board.ask(tuner, LAYER, LARGER, replace(LAYER, n=4))
    assert all(choice.is_guess for choice in choices)
    assert "not measured: measuring failed: CUDA device 0 failed" in caplog.text
    board.ask(tuner, replace(LAYER, n=16))
    assert caplog.text.count("measuring failed") == 1


# Another device's model.


@pytest.mark.parametrize("why", ["no budget", "part", "exclusive", "ranks", "no memory"])
def test_layers_that_are_not_measured_run_the_choice_of_the_same_architecture(
    board, shipped, monkeypatch, why
) -> None:
    choosing.use_predictor(shipped)
    board.facts(part=why == "part", exclusive=why == "exclusive", free=80 << 30)
    if why == "no memory":
        board.facts(free=0)
    if why == "ranks":
        monkeypatch.setenv("WORLD_SIZE", "8")  # as torchrun says
    (choice,) = board.ask(Tuner(0.0 if why == "no budget" else 60.0))
    assert (choice.source, choice.measured_on) == ("transferred", "h100")
    assert choosing.runs_kernel(choice)
    assert board.measured() == []
    board.device = replace(board.device, arch="sm_80")  # of another architecture
    (other,) = board.ask(Tuner(0.0))
    assert other.source == "transferred"
    assert choosing.why_pytorch(other) == "no model for this device"


def test_a_kept_answer_goes_before_a_transferred_one(board, shipped) -> None:
    choosing.use_predictor(shipped)
    (measured,) = board.ask(Tuner(60.0))
    assert measured.source == "measured"
    spent = Tuner(60.0, spent_s=60.0)
    kept_answer, new = board.ask(spent, LAYER, LARGER)
    assert kept_answer == measured
    assert (new.source, choosing.runs_kernel(new)) == ("transferred", True)


# Ranks.

#: Which ranks have files, and which an answer in them.
_CASES = (((0, 1), (0, 1)), ((0, 1), (0,)), ((0, 1), (1,)), ((0,), (0,)), ((1,), (1,)), ((), ()))
_RANK = """
import json, sys
from dataclasses import replace
import torch.distributed as dist
from confpred.cuda import driver
from confpred.families.protocol import Candidate
from confpred.predict.choice import Choice
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import get_device
from confpred.problem.limits import UNLIMITED
from confpred.pytorch.run import choosing, tuning
from confpred.sampler import kept

rank, first, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
problem = Problem(2, 64, 14, 14, 64, 3, 3, groups=4, padding=1)
own = Choice(problem, "a", "measured", Candidate("grouped_fprop", rank), 0.5, pytorch_ms=1.0)
driver.describe = lambda _: ("NVIDIA H100", "580.1")
kept.times_in = lambda *_: {}

def ask(key, files, answers):
    device = replace(get_device("h100"), key=key)
    shard = choosing.kept_folder(device, CONVOLUTION) / "rows"
    kept.shards_of = lambda *_: [shard] * (rank in files)
    kept.answer = lambda *_: own if rank in answers else None
    choices = choosing.kept_answers([problem], device, CONVOLUTION, UNLIMITED).values()
    answers = [[c.config_id, c.source, c.pytorch_ms] for c in choices]
    print(json.dumps([answers, list(choosing.kept_shards(device, CONVOLUTION))]))

ask("early", (0, 1), (0, 1))  # ranks have not met
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
for number, case in enumerate(json.loads(sys.argv[4])):
    for turn in (first, 1 - first):
        if turn == rank:
            ask(f"gpu-{number}", *case)
        dist.barrier()
print(tuning._Layers(0, get_device("h100"), None, UNLIMITED).why_unmeasured())
"""


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=_PROCESSES)])
def test_ranks_take_the_answers_of_the_first_that_asks(tmp_path, monkeypatch, first) -> None:
    """And none waits for another one; those that differ may have other folders."""
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun says
    command, more = [sys.executable, "-c", _RANK], [str(first), str(tmp_path), json.dumps(_CASES)]
    ranks = [
        subprocess.Popen([*command, str(rank), *more], stdout=-1, text=True) for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    one, other = (
        [s for s in lines if not s.startswith("[Gloo]")] for lines in outputs
    )  # PyTorch 2.9
    assert one == other
    assert [rank.returncode for rank in ranks] == [0, 0]
    agreed = [
        [[[first, "measured", 1.0]] * (first in answers), ["rows"] * (first in files)]
        for files, answers in _CASES
    ]
    *asked, reason = one
    assert [json.loads(line) for line in asked] == [[[], []], *agreed]
    assert reason == "ranks of torch.distributed use answers that one process has kept before"


def test_ranks_that_have_not_met_measure_and_follow_nothing(board, monkeypatch) -> None:
    board.ask(Tuner(60.0))
    lines = board.measured()
    monkeypatch.setenv("WORLD_SIZE", "8")  # as torchrun says
    tuner = Tuner(60.0)
    assert board.ask(tuner)[0].is_guess
    assert board.measured() == lines
    assert "torch.distributed" in tuner.note


# In a captured network.


def test_options_are_checked() -> None:
    assert Options.of({"tune": 15}).tune == 15
    for value in (-1, True, "60", float("inf")):
        with pytest.raises(InvalidInput, match="tune"):
            Options.of({"tune": value})


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=_PROCESSES)])
def test_the_first_capture_measures_and_status_says_so(board, captures, launches, compiled) -> None:
    model, x = network()
    with torch.no_grad():
        expected, options = model(x), {"inductor": False, "tune": 30}
        if compiled:
            call = torch.compile(model, backend="confpred", options=options)
        else:
            call = confpred.optimize(model, **options)
        torch.testing.assert_close(call(x), expected)
        status = confpred.status(model)
        assert any(text.startswith("tune: measured ") for text in status.remarks)
        assert "pytorch" not in status.providers
        assert launches
        lines = board.measured()
        for more in ({}, {"tune": 0}):  # the next capture finds them
            torch._dynamo.reset()
            confpred.optimize(confpred.revert(model), inductor=False, **more)
            model(x)
            again = confpred.status(model)
            assert again.providers == status.providers
            assert any(text.startswith("tune: answers are kept in ") for text in again.remarks)
    assert board.measured() == lines


@pytest.fixture
def keeping(board, captures, launches, monkeypatch, tmp_path) -> None:
    """Let PyTorch's cache keep the graphs of captures."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(choosing, "device_of", lambda _: board.device)  # no GPU is here
    monkeypatch.setattr(graph_cache, "_ordinals", lambda _: {0})  # of tensors of the CPU
    monkeypatch.setattr(backend, "compile_ahead", as_chosen)  # kernels need a GPU
    monkeypatch.setattr(choosing, "check_clock", lambda *_: None)  # it has no clock


def kept_and_found(budget: float) -> tuple[Any, list[int]]:
    """Return the status of the network after a call, and how many graphs were kept, and found."""
    model, x = network()
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        confpred.optimize(model, inductor=True, tune=budget)(x)
    counted = counters["aot_autograd"]
    return confpred.status(model), [counted[f"autograd_cache_{what}"] for what in ("saved", "hit")]


@pytest.mark.keeps_graphs
def test_a_graph_is_kept_with_its_answers(keeping, monkeypatch) -> None:
    """The next process finds it under these, though it began before they were there."""
    (first, saved), (second, found) = kept_and_found(30.0), kept_and_found(30.0)
    assert (saved, found) == ([1, 0], [0, 1])
    assert first.providers == second.providers
    assert "pytorch" not in first.providers
    assert any(text.startswith("tune: answers are kept in ") for text in second.remarks)
    identity_of, run, attempts = graph_cache.identity_of, backend.Compiler._run, []

    def ends(compiler: Any, *given: Any, **more: Any) -> Any:
        if len(attempts) == 1:
            raise tuning.Measured
        return run(compiler, *given, **more)

    def named(*given: Any) -> str | None:
        attempts.append(given)
        return "before" if len(attempts) == 1 else identity_of(*given)

    monkeypatch.setattr(backend.Compiler, "_run", ends)  # another process has measured meanwhile
    monkeypatch.setattr(graph_cache, "identity_of", named)  # when it began
    third, found = kept_and_found(30.0)
    assert (found, third.providers) == ([0, 1], first.providers)


@pytest.mark.keeps_graphs
def test_no_graph_is_kept_while_layers_or_files_are_left(keeping, monkeypatch) -> None:
    for _ in range(2):
        assert kept_and_found(1e-9)[1] == [0, 0]
    with monkeypatch.context() as patch:
        patch.setitem(kept.unread, Path("rows"), 1)  # a file that this process could not read
        assert kept_and_found(0.0)[1] == [0, 0]
    assert kept_and_found(0.0)[1] == [1, 0]


@pytest.mark.keeps_graphs
def test_no_graph_is_kept_where_nothing_could_be_chosen(keeping, monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ModelError("trees of a family are damaged")

    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "choose_many", fail)  # as trees that are read at their first use
        assert kept_and_found(0.0)[1] == [0, 0]
    assert kept_and_found(0.0)[1] == [1, 0]


@pytest.mark.keeps_graphs
def test_no_graph_is_kept_without_pyarrow_where_there_are_answers(
    board, keeping, monkeypatch
) -> None:
    """The next process may have it."""
    board.ask(Tuner(60.0))
    for module, counts in ((None, [0, 0]), (sys.modules["confpred.data.parquet"], [1, 0])):
        choosing._times.cache_clear()  # as in another process
        monkeypatch.setattr(kept, "unread", Counter())  # by it
        monkeypatch.setitem(sys.modules, "confpred.data.parquet", module)  # with it or without
        status, counted = kept_and_found(0.0)
        assert (counted, "pytorch" in status.providers) == (counts, module is None)


def test_status_says_how_many_choices_are_transferred(captures, shipped, monkeypatch) -> None:
    monkeypatch.setattr(loading, "was_refused", lambda *_: False)  # kernels need a GPU
    choosing.use_predictor(shipped)
    model, x = network()
    with torch.no_grad():
        confpred.optimize(model, inductor=False, tune=0)(x)
    remark = "1 choice transferred from h100: not measured on this device"
    assert remark in confpred.status(model).remarks


def test_a_network_that_verify_times_is_not_tuned(board, captured, monkeypatch) -> None:
    seen = []
    # Nothing is measured: the budget that it is given is seen.
    monkeypatch.setattr(backend.tuning, "of_process", lambda tune: seen.append(tune) or Tuner(tune))
    for told in ({"verify": 2}, {"verify": "network", "tune": 5}, {}):
        torch._dynamo.reset()
        compiled = torch.compile(nn.Conv2d(3, 3, 1), backend="confpred", options=told)
        with torch.no_grad():
            compiled(torch.randn(1, 3, 4, 4))
    assert seen == [0.0, 5, None]


# The job of the worker process.


def test_results_are_compared_with_pytorchs(monkeypatch) -> None:
    """Configs are right, compute something else, cannot be launched, or give NaN."""
    rows = legal(FAMILY, get_device("h100"))[:4]
    names = {o.name: o.shape for o in operation_of(LAYER).operands(LAYER) if not o.terms}
    tensors = {name: torch.randn(shape).half() for name, shape in names.items()}
    right = CONVOLUTION.pytorch(LAYER, tensors)

    def load(assignment: Any, ordinal: int) -> Any:
        row = assignment.candidate.config_id
        result = {rows[0]: right, rows[1]: right * 1.1, rows[3]: right * float("nan")}.get(row)
        if result is None:
            return None
        return SimpleNamespace(assignment=assignment, run=lambda *_: [result])

    outcomes = [Outcome(row, "ok", 1.0) for row in rows] + [Outcome(9999, "wrong_result")]
    for name, fake in {
        "measure_job": lambda job, report: outcomes, "operands": lambda *_: [tensors],
        "load": load,
    }.items():  # fmt: skip
        monkeypatch.setattr(tuning, name, fake)  # kernels need a GPU
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: nullcontext())  # there is none
    # PyTorch's operator, on the CPU.
    monkeypatch.setattr(tuning, "library_call", lambda *_: lambda t: CONVOLUTION.pytorch(LAYER, t))
    task = task_of(LAYER, (), family_named(FAMILY), rows)
    reported: list[int] = []
    found = tuning.compared_job(MeasureJob(task, 0, 0), reported.append)
    statuses = [outcome.status for outcome in found]
    assert statuses == ["ok", "wrong_result", "launch_error", "wrong_result", "wrong_result"]
    assert reported == rows
    assert "against PyTorch's result is 0.1" in found[1].message


# Kept answers are exported and submitted.


def test_answers_become_a_plan(board, tmp_path) -> None:
    (choice,) = board.ask(Tuner(60.0))
    none = command("plan", "export", "--device", "a100", "--kept", "--out", tmp_path / "none")
    named(none, "device='a100' is not allowed; allowed: a device that tuning has measured here", 2)
    out = tmp_path / "plan.json"
    done = command("plan", "export", "--device", board.device.key, "--kept", "--out", out)
    assert "1 layer on test-board" in done.stdout, done.stderr
    (planned,) = read_plan(out).choices
    assert (planned.candidate, planned.source) == (choice.candidate, "measured")
    assert (planned.predicted_ms, planned.pytorch_ms) == (0.5, 1.0)
    words = ("plan", "export", "--device", "h100", "--layer", str(LAYER))
    both = command(*words, "--kept", "--out", tmp_path / "both.json")
    named(both, "give either --kept, or --layer or --network", 2)


@pytest.mark.parametrize("accepts", [True, False])
def test_measurements_that_are_kept_are_submitted(board, monkeypatch, accepts) -> None:
    nothing = command("submit", "--url", "http://127.0.0.1:8000")
    assert (nothing.returncode, nothing.stdout) == (0, "tuning has kept nothing here\n")
    board.ask(Tuner(60.0))
    shards = [shard.name for shard in board.folder().glob("rows-*.parquet")]

    @contextmanager
    def submitting(url: str, folder: Path) -> Iterator[None]:
        yield
        (folder / transfer.SENT).write_text("\n".join(shards * accepts))

    monkeypatch.setattr(transfer, "submitting", submitting)  # there is no service
    done = command("submit", "--url", "http://127.0.0.1:8000")
    assert done.returncode == (0 if accepts else 1), done.stderr
    count = f"{len(shards) * accepts} of {len(shards)} files are at http://127.0.0.1:8000"
    assert done.stdout == f"{board.folder()}: {count}\n"

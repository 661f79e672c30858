"""``CONFPRED_URL``: the service chooses, and nobody waits for it for long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from client_servers import Answer, ToldServer
from served import running
from shared import python

from confpred.client import Client
from confpred.client.served import ServedPredictor, predictor_at
from confpred.errors import InvalidInput
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem

LAYER = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
LAYERS = [replace(LAYER, n=n) for n in range(2, 12)]


@pytest.fixture(scope="module")
def theirs(model_folder: Path) -> Predictor:
    return Predictor.load(model_folder)


@pytest.fixture(scope="module")
def ours() -> Predictor:
    """Return a predictor without a model, whose choices are told from the service's by their
    source."""
    return Predictor({})


def served(url: str, patience_s: float) -> ServedPredictor:
    return ServedPredictor(Client(url, timeout_s=5, retries=1, kept=0), {}, patience_s)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_service_chooses(theirs: Predictor) -> None:
    with ToldServer(theirs) as server:
        predictor = served(server.url, 30)
        assert predictor.choose(LAYER, "h100") == theirs.choose(LAYER, "h100")
        assert predictor.choose(LAYER, "h100").server == server.url
        assert predictor.rank(LAYER, "h100", 4) == theirs.rank(LAYER, "h100", 4)
        asked = len(server.seen)
        assert predictor.choose_many([*LAYERS, LAYER], "h100") == theirs.choose_many(
            [*LAYERS, LAYER], "h100"
        )
        assert len(server.seen) == asked + 1
    assert predictor.choose(LAYER, "h100").server == server.url


def test_nobody_waits_longer_than_the_patience(theirs: Predictor, ours: Predictor) -> None:
    ours.choose_many(LAYERS, "h100")
    with ToldServer(theirs, Answer(before_s=20)) as server:
        predictor = served(server.url, 0.1)
        start = time.monotonic()
        first = predictor.choose_many(LAYERS, "h100")
        others = [predictor.choose(replace(p, h=41), "h100") for p in LAYERS]
        assert time.monotonic() - start < 10  # 0.1 once, and what this process needs itself
        assert first == ours.choose_many(LAYERS, "h100")
        assert {c.source for c in others} == {"heuristic"}
        assert {c.server for c in (*first, *others)} == {None}


def test_what_comes_late_is_there_for_the_next_who_asks(theirs: Predictor) -> None:
    with ToldServer(theirs, Answer(before_s=0.5), Answer()) as server:
        predictor = served(server.url, 0.05)
        assert predictor.choose(LAYER, "h100").source == "heuristic"
        until(lambda: predictor.choose(LAYER, "h100").server == server.url)
        assert predictor.choose(LAYER, "h100") == theirs.choose(LAYER, "h100")
        assert len(server.seen) == 1


def test_a_late_answer_makes_nobody_wait_again(
    theirs: Predictor, caplog: pytest.LogCaptureFixture
) -> None:
    late = Answer(before_s=0.3)
    with ToldServer(theirs, late, late, late) as server:
        predictor = served(server.url, 0.05)
        for problem in (replace(LAYER, h=h) for h in (41, 42, 43)):
            assert predictor.choose(problem, "h100").source == "heuristic"
            until(lambda: predictor.choose(problem, "h100").server == server.url)  # noqa: B023
    assert [r.message.partition(": ")[2] for r in caplog.records if r.levelname == "WARNING"] == [
        "no answer within 50 ms; choosing in this process meanwhile"
    ]


def test_a_dead_service_costs_nothing_and_is_found_again(theirs: Predictor) -> None:
    with ToldServer(theirs) as server:
        url, port = server.url, server.port
    predictor = served(url, 5)
    start = time.monotonic()
    assert {c.source for c in predictor.choose_many(LAYERS, "h100")} == {"heuristic"}
    for problem in LAYERS:
        assert predictor.choose(problem, "h100").source == "heuristic"
    assert time.monotonic() - start < 10
    with ToldServer(theirs, port=port):
        until(lambda: predictor.choose(LAYER, "h100").server == url)


@pytest.mark.slow(reason="a server, and a process that asks it")
def test_one_variable_makes_the_library_ask(model_folder: Path, tmp_path: Path) -> None:
    program = f"""
from confpred import Problem
from confpred.pytorch.run.choosing import current_predictor
print(current_predictor().choose(Problem.parse("{LAYER}"), "h100"))
"""
    with running(tmp_path, "--model", str(model_folder)) as server:
        url = server.url
        said = run(program, CONFPRED_URL=url, CONFPRED_URL_WAIT_MS="30000")
        expected = replace(Predictor.load(model_folder).choose(LAYER, "h100"), server=url)
        assert said == (f"{expected}\n", "")
    choice, warned = run(program, CONFPRED_URL=url)
    assert "server=None" in choice
    assert "model='h100-" in choice
    assert f"{url}: " in warned


@pytest.mark.slow(reason="fresh processes import torch")
@pytest.mark.parametrize(
    ("program", "url", "reason"),
    [
        ("", "localhost", "url='localhost' is not allowed"),
        ("import sys; sys.modules['httpx'] = None", "http://host", "this needs httpx"),
    ],
)
def test_a_variable_of_no_use_is_told_and_holds_nobody_up(
    program: str, url: str, reason: str
) -> None:
    program += f"""
from confpred import Problem
from confpred.pytorch.run.choosing import current_predictor
print(current_predictor().choose(Problem.parse("{LAYER}"), "h100").source)
"""
    said, warned = run(program, CONFPRED_URL=url)
    assert said == "predicted\n"
    assert f"ignoring CONFPRED_URL: {reason}" in warned


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [("CONFPRED_URL_WAIT_MS", "-1", "CONFPRED_URL_WAIT_MS"), ("CONFPRED_TOKEN", "a b", "token")],
)
def test_the_other_variables_are_checked(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidInput) as caught:
        predictor_at("http://host")
    assert caught.value.field == field


def run(program: str, **variables: str) -> tuple[str, str]:
    """Output and warnings of a fresh process."""
    done = python("-c", program, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr

"""Replies that are remembered: equal to the first, bounded, and gone with their model."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
from fastapi.testclient import TestClient

from confpred import Choice, Device, Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.record import Record
from confpred.service import Settings, generations
from confpred.service.app import create_app
from confpred.service.generations import Loaded
from confpred.service.metrics import Metrics
from confpred.service.predict import Latest, Predict
from confpred.service.schema import EXAMPLE

LAYER = EXAMPLE.to_json()
BATCH = {"device": "h100", "problems": [{**LAYER, "n": n} for n in (1, 2, 3, 2)], "top": 2}


class Counting(Predictor):
    """A predictor that counts how often it is asked."""

    asked = 0

    def rank(
        self, problem: Record, device: str | Device, top: int = 5, **terms: Any
    ) -> list[Choice]:
        self.asked += 1
        return super().rank(problem, device, top, **terms)


@pytest.fixture
def predictor() -> Counting:
    return Counting.load()


@pytest.fixture
def client(predictor: Counting) -> Iterator[TestClient]:
    with TestClient(create_app(Settings(cache_mib=1), predictor)) as client:
        yield client


def origins(client: TestClient) -> dict[str, float]:
    found = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("confpred_replies_total{"):
            name, _, value = line.rpartition(" ")
            found[name.split('"')[1]] = float(value)
    return found


def test_a_reply_from_memory_is_the_first_to_the_bit(
    client: TestClient, predictor: Counting
) -> None:
    first = client.post("/v1/predict", json=BATCH)
    assert predictor.asked == 3  # a problem that stands twice in a batch is worked out once
    again = client.post("/v1/predict", json=BATCH)
    texts = (json.dumps(BATCH, indent=1), json.dumps(BATCH) + " " * 10_000)
    header = {"content-type": "application/json"}
    spelled = [client.post("/v1/predict", content=text, headers=header) for text in texts]
    for reply in (again, *spelled):
        assert reply.content == first.content
        assert reply.headers["content-type"] == "application/json"
    assert predictor.asked == 3
    assert origins(client) == {"work": 2, "body": 1, "answers": 1}  # long texts are read there
    ranked = [predictor.rank(Problem.from_json(p), "h100", 2) for p in BATCH["problems"]]
    assert first.json() == {"choices": [[c.to_json() for c in choices] for choices in ranked]}


def test_every_reply_counts_its_problems_and_sources(client: TestClient) -> None:
    for _ in range(3):
        assert client.post("/v1/predict", json=BATCH).status_code == 200
    lines = client.get("/metrics").text.splitlines()
    assert "confpred_batch_problems_count 3.0" in lines
    assert "confpred_batch_problems_sum 12.0" in lines
    assert 'confpred_problems_total{source="predicted"} 12.0' in lines
    assert "confpred_worked_out_problems_total 3.0" in lines
    assert "confpred_queued_requests 0.0" in lines
    assert "confpred_queued_problems 0.0" in lines
    assert "confpred_in_flight_requests 1.0" in lines  # this one


def test_another_model_s_replies_are_its_own(predictor: Counting) -> None:
    app = create_app(Settings(), predictor)
    with TestClient(app) as client:
        body = {"device": "h100", "problem": LAYER}
        of_the_model = client.post("/v1/predict", json=body)
        loaded, nothing = app.state.loaded, generations.of(Predictor({}))
        app.state.loaded = Loaded(nothing)  # no model at all: what it says, is its own estimate
        other = client.post("/v1/predict", json=body)
        app.state.loaded = loaded
        assert client.post("/v1/predict", json=body).content == of_the_model.content
    assert of_the_model.json()["choices"][0][0]["source"] == "predicted"
    assert other.json()["choices"][0][0]["source"] == "heuristic"


def test_refusals_are_not_remembered_in_place_of_replies(client: TestClient) -> None:
    body = {"device": "h100", "problem": {**LAYER, "c": 65}}
    first, again = (client.post("/v1/predict", json=body) for _ in range(2))
    assert first.status_code == again.status_code == 422
    assert first.content == again.content
    assert origins(client) == {}


def test_memory_is_bounded_in_bytes_and_keeps_the_latest() -> None:
    memory: Latest[int, bytes] = Latest(100_000)
    for key in range(1000):
        memory.put(key, b"x" * 1000, 1000)
        assert memory.get(0) is not None  # asked for all the time
    assert 40 < len(memory) < 100
    memory.put(-1, b"", 50_000)  # which would push out too many others
    assert memory.get(-1) is None
    assert memory.get(999) is not None
    assert memory.get(1) is None
    for size in range(2000):  # one key, many values
        memory.put(1000, b"", size)
    assert 40 < len(memory) < 100


def test_the_memory_of_a_predictor_goes_with_it() -> None:
    predict = Predict(Settings(), Metrics(), lambda _: None)
    predictor = Predictor({})
    memory = ref(predict.memory_of(predictor))
    assert predict.memory_of(predictor) is memory()
    del predictor
    gc.collect()
    assert memory() is None

"""The HTTP API: what it answers, and that its description is true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import H100
from served import copy_model
from strategies import convs, problems, problems_of

from confpred import Predictor
from confpred.errors import ModelError
from confpred.families.registry import all_families
from confpred.model.folder import load_model
from confpred.problem.conv2d import CHOICES, LIMITS, PAIRS, Problem
from confpred.problem.device import KNOWN
from confpred.problem.record import Record
from confpred.service import Settings
from confpred.service.app import create_app
from confpred.service.schema import EXAMPLE, EXAMPLES

PREDICTOR = Predictor.load()
FAMILY = all_families()["grouped_fprop"]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(), PREDICTOR)) as client:
        yield client


@pytest.fixture(scope="module")
def schemas(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()["components"]["schemas"]


def as_sent(answers: list[Any]) -> bytes:
    plain = [[choice.to_json() for choice in choices] for choices in answers]
    return json.dumps({"choices": plain}, separators=(",", ":")).encode()


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(problems() | problems_of(FAMILY), min_size=1, max_size=6),
    device=st.sampled_from(sorted(KNOWN)),
)
def test_library_and_http_agree_to_the_bit(
    client: TestClient, asked: list[Problem], device: str
) -> None:
    body = {"device": device, "problems": [problem.to_json() for problem in asked]}
    reply = client.post("/v1/predict", json=body)
    assert reply.status_code == 200
    assert reply.content == as_sent([[PREDICTOR.choose(problem, device)] for problem in asked])
    reply = client.post("/v1/predict", json={**body, "top": 5})
    assert reply.content == as_sent([PREDICTOR.rank(problem, device, 5) for problem in asked])


@settings(max_examples=20, deadline=None)
@given(asked=st.lists(convs() | problems(), min_size=1, max_size=4))
def test_layers_of_any_rank_are_answered_as_the_library_does(
    client: TestClient, asked: list[Record]
) -> None:
    body = {"device": "h100", "problems": [problem.to_json() for problem in asked], "top": 3}
    reply = client.post("/v1/predict", json=body)
    assert reply.status_code == 200
    assert reply.content == as_sent([PREDICTOR.rank(problem, "h100", 3) for problem in asked])


@pytest.mark.parametrize(
    ("change", "field", "allowed"),
    [
        ({"cut": 99}, "w", "large enough for an output"),
        ({"layot": "channels_first"}, "layot", "a field such as layout"),
        ({"stride": [1, 2]}, "stride", "an integer, as rank is 1"),
        ({"layout": "NCL"}, "layout", "channels_last or channels_first"),
    ],
)
def test_a_layer_of_another_rank_is_refused_by_its_field(
    client: TestClient, change: dict[str, Any], field: str, allowed: str
) -> None:
    line = {"n": 1, "c": 8, "w": 64, "k": 8, "s": 4, "groups": 8}
    body = {"device": "h100", "problems": [line, line | change]}
    reply = client.post("/v1/predict", json=body)
    assert reply.status_code == 422
    error = reply.json()["error"]
    assert error["field"] == f"problems[1].{field}"
    assert allowed in error["allowed"]


@settings(max_examples=10, deadline=None)
@given(asked=st.lists(problems_of(FAMILY), min_size=1, max_size=4), most=st.floats(1, 2))
def test_max_regret_is_what_the_library_makes_of_it(
    client: TestClient, asked: list[Problem], most: float
) -> None:
    body = {"device": "h100", "problems": [problem.to_json() for problem in asked]}
    plain = client.post("/v1/predict", json=body)
    reply = client.post("/v1/predict", json={**body, "max_regret": most})
    found = [[PREDICTOR.choose(problem, "h100", max_regret=most)] for problem in asked]
    assert reply.content == as_sent(found)
    # Replies that are remembered for those who accept all are not for others, and stay.
    assert client.post("/v1/predict", json=body).content == plain.content


def test_one_problem_is_answered_as_a_batch_of_one(client: TestClient) -> None:
    one = {"device": "h100", "problem": EXAMPLE.to_json()}
    many = {"device": "h100", "problems": [EXAMPLE.to_json()]}
    replies = [client.post("/v1/predict", json=body) for body in (one, many)]
    assert replies[0].content == replies[1].content
    assert len(replies[0].json()["choices"]) == 1
    assert replies[0].headers["content-type"] == "application/json"


def test_devices_lists_every_known_device_and_its_model(client: TestClient) -> None:
    devices = client.get("/v1/devices").json()["devices"]
    assert [device["key"] for device in devices] == list(KNOWN)
    versions = {m["device"]: m["version"] for m in client.get("/v1/models").json()["models"]}
    for device in devices:
        known = KNOWN[device["key"]]
        assert device["sm_count"] == known.sm_count
        assert device["dram_bytes_per_s"] == known.dram_bytes_per_s
        assert device["model"] == versions.get(device["key"])


def test_ready_only_while_a_model_is_loaded() -> None:
    client = TestClient(create_app(Settings(), PREDICTOR))  # not started yet
    assert client.get("/healthz").status_code == 200
    for path in ("/readyz", "/v1/devices", "/v1/models"):
        reply = client.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_ready")
        assert reply.headers["retry-after"] == "1"
    with client:
        assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/readyz").status_code == 503


def test_metrics_count_requests() -> None:
    with TestClient(create_app(Settings(), PREDICTOR)) as client:
        body = {"device": "h100", "problem": EXAMPLE.to_json()}
        assert client.post("/v1/predict", json=body).status_code == 200
        assert client.post("/v1/predict", json={}).status_code == 422
        assert client.get("/no/such/path").status_code == 404
        reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    lines = reply.text.splitlines()
    for route, status in (("/v1/predict", 200), ("/v1/predict", 422), ("none", 404)):
        assert f'confpred_requests_total{{route="{route}",status="{status}"}} 1.0' in lines
    assert 'confpred_request_seconds_count{route="/v1/predict"} 2.0' in lines


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_described_example_is_accepted(client: TestClient, name: str) -> None:
    described = client.get("/openapi.json").json()["paths"]["/v1/predict"]["post"]["requestBody"]
    examples = described["content"]["application/json"]["examples"]
    assert examples.keys() == EXAMPLES.keys()
    reply = client.post("/v1/predict", json=examples[name]["value"])
    assert reply.status_code == 200, reply.text


def test_every_reference_in_the_description_resolves(client: TestClient) -> None:
    text = client.get("/openapi.json").text
    found = json.loads(text)["components"]["schemas"]
    for part in text.split('"$ref":"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in found


def test_the_described_fields_are_the_problem_s(
    client: TestClient, schemas: dict[str, Any]
) -> None:
    described = schemas["Problem"]["properties"]
    plain = Problem(n=1, c=1, h=1, w=1, k=1, r=1, s=1).to_json()
    assert described.keys() == plain.keys()
    for name, field in described.items():
        if "default" in field:
            assert field["default"] == plain[name]
        if name in CHOICES:
            assert field["enum"] == list(CHOICES[name])
    assert schemas["Problem"]["required"] == ["n", "c", "h", "w", "k", "r", "s"]
    reply = PREDICTOR.choose(EXAMPLE, "h100").to_json()
    assert list(schemas["ChoiceReply"]["properties"]) == list(reply)


def test_every_device_that_is_described_is_accepted(
    client: TestClient, schemas: dict[str, Any]
) -> None:
    described = schemas["PredictRequest"]["properties"]["device"]["enum"]
    assert {*KNOWN, "NVIDIA H100 80GB HBM3"} <= set(described)
    for device in described:
        body = {"device": device, "problem": EXAMPLE.to_json()}
        assert client.post("/v1/predict", json=body).status_code == 200


def test_the_description_says_where_a_token_is_needed(client: TestClient) -> None:
    plain = client.get("/openapi.json").json()
    assert "security" not in plain
    with TestClient(create_app(Settings(tokens="tokens.json"), PREDICTOR)) as guarded:
        described = guarded.app.openapi()  # type: ignore[attr-defined]
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                needed = operation.get("security", described["security"]) != []
                refused = guarded.request(method, path).status_code == 401
                assert refused == needed == ("401" in operation["responses"])
    (scheme,) = described["components"]["securitySchemes"].values()
    assert scheme == {"type": "http", "scheme": "bearer"}


@pytest.mark.parametrize("name", LIMITS)
def test_described_ranges_are_the_ones_enforced(
    client: TestClient, schemas: dict[str, Any], name: str
) -> None:
    field = schemas["Problem"]["properties"][name]
    field = field["anyOf"][0] if name in PAIRS else field
    sizes = {"n": 1, "c": 1, "h": 64, "w": 64, "k": 1, "r": 1, "s": 1}
    for value in (field["minimum"], field["maximum"]):
        # Channels and groups go together, and a large window or dilation needs a large image.
        together = {"groups": ("groups", "c", "k")}.get(name, (name,))
        body = {"device": "h100", "problem": sizes | dict.fromkeys(together, value)}
        reply = client.post("/v1/predict", json=body)
        assert reply.status_code == 200, reply.text
    for value in (field["minimum"] - 1, field["maximum"] + 1):
        body = {"device": "h100", "problem": {**sizes, name: value}}
        error = client.post("/v1/predict", json=body).json()["error"]
        assert (error["field"], error["value"]) == (f"problem.{name}", value)


# Devices that no table has: a model brings its own description along.


BOARD = replace(H100, key="board-of-a-model", product="NVIDIA Board of a Model")
ONE = {
    "device": BOARD.key,
    "problem": {"n": 24, "c": 160, "h": 30, "w": 30, "k": 160, "r": 3, "s": 3, "groups": 20},
}


def of_a_board(folder: Path, model_folder: Path, **changes: object) -> Path:
    """Return a copy of a model that says that it is of `BOARD`."""
    copy_model(model_folder, folder, device=BOARD.key, board=asdict(BOARD) | changes)
    return folder


def test_a_board_of_no_table_is_served_and_listed(model_folder: Path, tmp_path: Path) -> None:
    folder = of_a_board(tmp_path / "board-1", model_folder)
    with TestClient(create_app(Settings(), Predictor.load(folder))) as client:
        (choice,) = client.post("/v1/predict", json=ONE).json()["choices"][0]
        assert (choice["device"], choice["source"]) == (BOARD.key, "predicted")
        served = {device["key"]: device for device in client.get("/v1/devices").json()["devices"]}
        assert served[BOARD.key]["model"] == "board-1"
        assert {name: served[BOARD.key][name] for name in asdict(BOARD)} == asdict(BOARD)
        other = client.post("/v1/predict", json=ONE | {"device": "rtx-4090"}).json()
        assert other["choices"][0][0]["source"] == "transferred"
        assert other["choices"][0][0]["model"] == "board-1"


@pytest.mark.parametrize("changes", [{"sm_count": 0}, {"tensor_flops": "fast"}, {"arch": ""}])
def test_a_damaged_description_is_a_damaged_model(
    model_folder: Path, tmp_path: Path, changes: dict
) -> None:
    folder = of_a_board(tmp_path / "board-1", model_folder, **changes)
    with pytest.raises(ModelError, match=next(iter(changes))):
        load_model(folder)

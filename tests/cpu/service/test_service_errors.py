"""Bad requests: one envelope for all of them, and the field named."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from confpred import Choice, Device, Predictor
from confpred.errors import UnknownDevice
from confpred.predict.choice import MAX_TOP
from confpred.problem.device import get_device
from confpred.problem.record import Record
from confpred.service import Settings
from confpred.service.app import create_app
from confpred.service.schema import EXAMPLE

PREDICTOR = Predictor.load()
LAYER = EXAMPLE.to_json()
ONE = {"device": "h100", "problem": LAYER}
SETTINGS = Settings(max_batch=20)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(SETTINGS, PREDICTOR), client=("127.0.0.1", 1)) as client:
        yield client


def post(client: TestClient, body: bytes, kind: str = "application/json") -> httpx.Response:
    return client.post("/v1/predict", content=body, headers={"content-type": kind})


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """Return the error in `reply`, which must have the one form."""
    assert 400 <= reply.status_code < 500 or reply.status_code in (500, 503)
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"code", "message", "field", "value", "allowed"}
    assert isinstance(error["code"], str)
    assert 0 < len(error["message"]) < 700
    assert len(error["field"] or "") < 120
    assert "Traceback" not in reply.text
    return error


#: How to ask: the method, the path, the body and headers; the reply's status and code.
_MALFORMED = {
    "empty body": b"",
    "not JSON": b"{device: h100}",
    "two values": b"{} {}",
    "not UTF-8": b'{"device": "\xff"}',
    "UTF-16": json.dumps(ONE).encode("utf-16"),
    "NaN": b'{"top": NaN}',
    "-Infinity": b'{"top": -Infinity}',
    "5000 digits": b'{"top": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 20_000,
    "deep objects": b'{"a":' * 5_000,
    "a key twice": b'{"device": "h100", "device": "a100"}',
}
_LONG = (b" " * (SETTINGS.max_body_bytes + 1), json.dumps([LAYER] * 100_000).encode())
_GOOD, _JSON = json.dumps(ONE).encode(), {"content-type": "application/json"}
_FORM, _GZIP = {"content-type": "application/x-www-form-urlencoded"}, {"content-encoding": "gzip"}
REFUSALS: dict[str, tuple[str, str, bytes, dict[str, str], int, str]] = {
    **{
        name: ("POST", "/v1/predict", body, _JSON, 400, "malformed_json")
        for name, body in _MALFORMED.items()
    },
    "no such path": ("GET", "/v2/predict", b"", {}, 404, "not_found"),
    "a slash too many": ("POST", "/v1/predict/", _GOOD, _JSON, 404, "not_found"),
    "GET": ("GET", "/v1/predict", b"", {}, 405, "method_not_allowed"),
    "POST": ("POST", "/v1/devices", _GOOD, _JSON, 405, "method_not_allowed"),
    "long": ("POST", "/v1/predict", _LONG[0], _JSON, 413, "body_too_large"),
    "100,000 layers": ("POST", "/v1/predict", _LONG[1], _JSON, 413, "body_too_large"),
    "form": ("POST", "/v1/predict", b"n=1", _FORM, 415, "unsupported_media_type"),
    "no type": ("POST", "/v1/predict", _GOOD, {}, 415, "unsupported_media_type"),
    "gzip": ("POST", "/v1/predict", _GOOD, _JSON | _GZIP, 415, "unsupported_media_type"),
    "invalid": ("POST", "/v1/predict", b"{}", _JSON, 422, "invalid_input"),
    "no version": ("POST", "/v1/predict?version=none", _GOOD, _JSON, 404, "version_not_loaded"),
    "reload": ("POST", "/v1/models/reload", b"", {}, 409, "not_supervised"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_every_refusal_has_the_one_form(client: TestClient, kind: str) -> None:
    method, path, body, headers, status, code = REFUSALS[kind]
    reply = client.request(method, path, content=body, headers=headers)
    assert (reply.status_code, error_of(reply)["code"]) == (status, code)


def test_a_method_refused_names_those_allowed(client: TestClient) -> None:
    reply = client.delete("/v1/predict")
    assert reply.headers["allow"] == "POST" == error_of(reply)["allowed"]


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ([], "body", []),
        ("h100", "body", "h100"),
        ({"problem": LAYER}, "device", None),
        ({"device": 3, "problem": LAYER}, "device", 3),
        ({"device": "h900", "problem": LAYER}, "device", "h900"),
        ({"device": ["h100"], "problem": LAYER}, "device", ["h100"]),
        ({"device": "h100"}, "problem", None),
        ({**ONE, "problems": [LAYER]}, "problem", ["problem", "problems"]),
        ({**ONE, "gpu": "h100"}, "gpu", "h100"),
        ({**ONE, "top": 0}, "top", 0),
        ({**ONE, "top": MAX_TOP + 1}, "top", MAX_TOP + 1),
        ({**ONE, "top": True}, "top", True),
        ({**ONE, "top": 1.0}, "top", 1.0),
        ({**ONE, "top": "1"}, "top", "1"),
        ({**ONE, "top": None}, "top", None),
        ({**ONE, "max_regret": 0.5}, "max_regret", 0.5),
        ({**ONE, "max_regret": True}, "max_regret", True),
        ({**ONE, "max_regret": 10**400}, "max_regret", f"1{'0' * 76}..."),
        ({"device": "h100", "problem": [LAYER]}, "problem", None),
        ({"device": "h100", "problem": None}, "problem", None),
        ({"device": "h100", "problems": []}, "problems", "0 problems"),
        ({"device": "h100", "problems": None}, "problems", None),
        ({"device": "h100", "problems": LAYER}, "problems", None),
        ({"device": "h100", "problems": [LAYER] * 21}, "problems", "21 problems"),
        ({"device": "h100", "problems": [LAYER, 7]}, "problems[1]", 7),
        ({"device": "h100", "problems": [LAYER, {**LAYER, "c": 65}]}, "problems[1].c", 65),
        ({"device": "h100", "problem": {**LAYER, "batch": 1}}, "problem.batch", 1),
        ({"device": "h100", "problem": {**LAYER, "problem": 1}}, "problem.problem", 1),
        ({"device": "h100", "problem": {"c": 64}}, "problem.n", None),
        (
            {"device": "h100", "problem": {**LAYER, "padding": [1, 1, 1]}},
            "problem.padding",
            [1] * 3,
        ),
        ({"device": "h100", "problem": {**LAYER, "padding": [1, -1]}}, "problem.padding", -1),
        ({"device": "h100", "problem": {**LAYER, "h": 1, "padding": 0}}, "problem.h", 1),
        ({"device": "h100", "problem": {**LAYER, "bias": 1}}, "problem.bias", 1),
        ({"device": "h100", "problem": {**LAYER, "dtype": "fp64"}}, "problem.dtype", "fp64"),
    ],
)
def test_the_offending_field_is_named(
    client: TestClient, body: Any, field: str, value: object
) -> None:
    reply = client.post("/v1/predict", json=body)
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["field"]) == (422, "invalid_input", field)
    assert error["message"].startswith(field)
    assert error["allowed"] in error["message"]
    if value is not None:
        assert error["value"] == value


def test_a_number_too_large_for_a_float_is_refused_by_name(client: TestClient) -> None:
    body = json.dumps(ONE).replace('"n": 32', '"n": 1e999').encode()
    assert error_of(post(client, body))["field"] == "problem.n"


def test_long_names_and_values_are_cut(client: TestClient) -> None:
    for place in ({**ONE, "x" * 9000: 1}, {"device": "h100", "problem": {"y" * 9000: "z" * 9000}}):
        reply = client.post("/v1/predict", json=place)
        assert error_of(reply)["field"].endswith("...")
        assert len(reply.content) < 1500


def test_any_host_header_and_path_are_survived(client: TestClient) -> None:
    assert error_of(client.get("/%ff%00%0a", headers={"host": "[::1"}))["code"] == "not_found"


class Faulty(Predictor):
    """A predictor with a bug that one problem size brings out."""

    def rank(
        self, problem: Record, device: str | Device, top: int = 5, **terms: Any
    ) -> list[Choice]:
        if getattr(problem, "n", None) == 13:
            raise RuntimeError("the inner secret")
        return super().rank(problem, device, top, **terms)


@pytest.mark.parametrize("count", [1, 15], ids=["on the loop", "in the thread"])
def test_a_bug_is_a_500_with_an_id_that_the_log_explains(
    caplog: pytest.LogCaptureFixture, count: int
) -> None:
    with TestClient(create_app(SETTINGS, Faulty.load())) as client:
        body = {"device": "h100", "problems": [{**LAYER, "n": 13}] * count}
        with caplog.at_level(logging.ERROR, "confpred"):
            reply = client.post("/v1/predict", json=body)
        error = error_of(reply)
        assert (reply.status_code, error["code"]) == (500, "internal_error")
        assert "secret" not in reply.text
        (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert error["message"].rpartition(" ")[2] in record.getMessage()
        assert record.exc_info is not None
        assert "the inner secret" in str(record.exc_info[1])
        assert client.post("/v1/predict", json=ONE).status_code == 200  # it lives on
        metrics = client.get("/metrics").text
    assert 'confpred_requests_total{route="/v1/predict",status="500"} 1.0' in metrics


def test_a_name_of_any_length_costs_the_same(client: TestClient) -> None:
    """Names are compared with the known ones, which takes longer than linearly."""
    for body in ({**ONE, "device": "h" * 15_000}, {**ONE, "x" * 15_000: 1}):
        start = time.perf_counter()
        assert client.post("/v1/predict", json=body).status_code == 422
        assert time.perf_counter() - start < 0.1
    start = time.perf_counter()
    with pytest.raises(UnknownDevice, match="device='hhh"):
        get_device("h" * 900_000)
    assert time.perf_counter() - start < 0.05


def test_nesting_of_every_depth_is_refused(client: TestClient) -> None:
    """Python's own recursion limit lies somewhere in this range, for reading and for showing."""
    for depth in (*range(1, 150, 30), *range(150, 1100, 9), 3000, 9000):
        for opening, closing in (("[", "]"), ('{"n":', "}")):
            value = opening * depth + "1" + closing * depth
            for body in (value, json.dumps(ONE).replace('"n": 32', f'"n": {value}')):
                code = error_of(post(client, body.encode()))["code"]
                assert code in ("malformed_json", "invalid_input", "body_too_large")

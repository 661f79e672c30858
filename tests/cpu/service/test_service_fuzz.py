"""Any request at all: answered, or refused in the one form; never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from test_service_errors import ONE, PREDICTOR, SETTINGS, error_of, post

from confpred.problem.conv2d import CHOICES, LIMITS
from confpred.service.app import create_app


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(SETTINGS, PREDICTOR)) as client:
        yield client


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 70_000)
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from(("h100", "relu", "float16", "NaN", "1"))
)
names = st.sampled_from((*LIMITS, *CHOICES, "bias", "device", "problem", "problems", "top"))
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(names | st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)


def check(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        assert reply.json()["choices"]
    else:
        assert reply.status_code in (400, 413, 415, 422), reply.text
        error_of(reply)


@settings(max_examples=300, deadline=None)
@given(body=anything | st.dictionaries(st.sampled_from(tuple(ONE)), anything).map(ONE.__or__))
def test_any_json_is_answered_or_refused(client: TestClient, body: Any) -> None:
    check(post(client, json.dumps(body).encode()))


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=300), kind=st.text("abc/;=- \t+*", max_size=20))
def test_any_bytes_are_refused(client: TestClient, body: bytes, kind: str) -> None:
    check(post(client, body))
    check(post(client, body, kind))


def test_nesting_of_every_depth_is_refused(client: TestClient) -> None:
    """Python's own recursion limit lies somewhere in this range, for reading and for showing."""
    for depth in (*range(1, 150, 30), *range(150, 1100, 9), 3000, 9000):
        for opening, closing in (("[", "]"), ('{"n":', "}")):
            value = opening * depth + "1" + closing * depth
            for body in (value, json.dumps(ONE).replace('"n": 32', f'"n": {value}')):
                check(post(client, body.encode()))

"""The client against a real ``confpred serve``: the library's own answers, by either client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from served import running

from confpred.client import AsyncClient, Client, Trace
from confpred.errors import InvalidInput, ServiceError, UnknownDevice
from confpred.predict.plan import write_plan
from confpred.predict.predictor import Predictor
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN

LAYER = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
ODD = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 groups=8 padding=1 stride=3")
LAYERS = [*(replace(LAYER, n=n) for n in range(2, 22)), ODD, LAYER, LAYER]


@pytest.fixture(scope="module")
def url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--model", str(model_folder), "--max-batch", "7")
    with running(tmp_path_factory.mktemp("server"), *options) as server:
        yield server.url


@pytest.fixture(scope="module")
def local(model_folder: Path) -> Predictor:
    return Predictor.load(model_folder)


def requests_served(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    counted = 'confpred_requests_total{route="/v1/predict",status="200"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(counted))


def test_answers_are_the_librarys(url: str, local: Predictor) -> None:
    with Client(url) as client:
        one = client.choose(LAYER, "h100")
        assert one == local.choose(LAYER, "h100")
        assert repr(replace(one, server=None)) == repr(local.choose(LAYER, "h100"))
        assert client.rank(LAYER, "NVIDIA H100 80GB HBM3", 8) == local.rank(LAYER, "h100", 8)
        for other in ("a100", "h100-pcie"):  # one is launched, one is not
            assert client.rank(LAYER, other) == local.rank(LAYER, other)
        assert one.server == url
        many = client.choose_many(iter(LAYERS), "h100")
    assert many == local.choose_many(LAYERS, "h100")
    assert json.dumps([c.to_json() for c in many]) == json.dumps(
        [c.to_json() for c in local.choose_many(LAYERS, "h100")]
    )


def test_layers_of_any_rank_are_answered(url: str, local: Predictor) -> None:
    others = [ConvNd(8, 64, 512, 64, 4, padding=3, cut=3, groups=64, rank=1)]
    others += [ConvNd(1, 8, 9, 8, 3, d=9, h=9, t=3, r=3, groups=8, direction="wgrad")]
    expected = [local.choose(LAYER, "h100")]
    expected += Predictor.load(operation=CONV.name).choose_many(others, "h100")
    with Client(url) as client:
        assert client.choose_many([LAYER, *others], "h100") == expected


def test_awaited_answers_are_the_librarys(url: str, local: Predictor) -> None:
    async def ask() -> None:
        async with AsyncClient(url) as client:
            rankings = await asyncio.gather(*(client.rank(p, "h100", 3) for p in LAYERS))
            assert rankings == [local.rank(p, "h100", 3) for p in LAYERS]
            assert await client.choose_many(LAYERS, "h100") == local.choose_many(LAYERS, "h100")
            assert await client.choose(ODD, "h100") == local.choose(ODD, "h100")
            assert [model.device for model in await client.models()] == ["h100"]
            assert {served.device.key for served in await client.devices()} == set(KNOWN)
            plan = await client.plan([LAYER, ODD], "h100")
            assert [choice.problem for choice in plan.choices] == [LAYER, ODD]

    asyncio.run(ask())


def test_devices_and_models_are_records(url: str, local: Predictor) -> None:
    with Client(url) as client:
        served = {s.device.key: s for s in client.devices()}
        (model,) = client.models()
    assert {key: s.device for key, s in served.items()} == dict(KNOWN)
    assert (served["h100"].model, served["a100"].model) == ("made-up-1", None)
    assert (model.device, model.version) == ("h100", "made-up-1")
    assert model.card == local.models["h100"].card.content


def test_a_batch_is_split_to_what_the_server_takes(url: str, local: Predictor) -> None:
    with Client(url, max_batch=20) as client:
        before = requests_served(url)
        assert client.choose_many(LAYERS[:18], "h100") == local.choose_many(LAYERS[:18], "h100")
        # 18 and 9 are too many for it, so that they go in fours.
        assert requests_served(url) - before == 5


def test_what_was_answered_is_not_asked_again(url: str) -> None:
    with Client(url) as client, Client(url, kept=0) as forgetful:
        for asking, expected in ((client, 2), (forgetful, 4)):
            before = requests_served(url)
            for _ in range(2):
                asking.choose(LAYER, "h100")
                asking.rank(LAYER, "h100", 4)
            assert requests_served(url) - before == expected


def test_a_plan_is_ready_to_use(url: str, local: Predictor, tmp_path: Path) -> None:
    with Client(url) as client:
        plan = client.plan(LAYERS, "h100")
    write_plan(tmp_path / "plan.json", plan)
    pinned = Predictor.load(plan=tmp_path / "plan.json", device="h100")
    for problem in LAYERS:
        choice = pinned.choose(problem, "h100")
        assert choice.source == "pinned"
        assert choice.candidate == local.choose(problem, "h100").candidate


def test_what_is_wrong_is_told_as_by_the_library(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(UnknownDevice):
            client.choose(LAYER, "gtx")
        with pytest.raises(InvalidInput, match=r"problem is missing"):
            client.choose_many([LAYER, None], "h100")
        with pytest.raises(InvalidInput, match=r"top=33 is not allowed"):
            client.rank(LAYER, "h100", 33)
    lost = Client(f"{url}/elsewhere")
    with pytest.raises(ServiceError, match="the service replies 404: Not Found") as caught:
        lost.choose(LAYER, "h100", trace=Trace("my-request"))
    assert (caught.value.status, caught.value.request_id) == (404, "my-request")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"url": "localhost:8000"}, "url"),
        ({"url": "ftp://host"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http://host/?a=b"}, "url"),
        ({"url": None}, "url"),
        ({"token": "two words"}, "token"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"retries": -1}, "retries"),
        ({"max_batch": 0}, "max_batch"),
        ({"kept": -1}, "kept"),
    ],
)
def test_settings_are_checked(settings: dict, field: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidInput) as caught:
            kind(**{"url": "http://host", **settings})
        assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "a b", "x" * 129, "a\r\nb: c", "é"])
def test_a_trace_cannot_smuggle_headers(text: str) -> None:
    with pytest.raises(InvalidInput):
        Trace(request_id=text)
    with pytest.raises(InvalidInput):
        Trace(traceparent=text)

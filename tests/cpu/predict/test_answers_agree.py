"""Library, command and service give one answer, to the bit, and refuse the same things."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from command_line import confpred

from confpred import Predictor, Problem
from confpred.data.suites import read_suite
from confpred.errors import InvalidInput
from confpred.predict.choice import answers_json

GOOD = "n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1 groups=8"


@pytest.fixture(scope="module")
def predictor(model_folder):
    return Predictor.load(model_folder)


@pytest.fixture(scope="module")
def command(model_folder):
    return partial(confpred, "predict", "--json", "--model", model_folder)


def layers(repository: Path, predictor: Predictor) -> list[str]:
    """Layers of every source: measured ones, their neighbours, and layers without a kernel."""
    entries = read_suite(repository / "datasets" / "suites" / "fprop.json").entries[::20]
    texts = [str(entry.problem) for entry in entries]
    unseen = [text.replace("n=", "n=7", 1) for text in texts[:20]]
    strided = [text + " stride=3" for text in texts if "stride" not in text][:3]
    ours = list(predictor.models["h100"].measured)[::50]
    return [*texts, *unseen, *strided, *ours]


@pytest.mark.parametrize(("device", "top"), [("h100", 1), ("h100", 8), ("a100", 2)])
def test_the_three_ways_agree_to_the_bit(repository, predictor, command, plain_server, device, top):
    texts = layers(repository, predictor)
    problems = [Problem.parse(text) for text in texts]
    answers = [predictor.rank(problem, device, top) for problem in problems]
    expected = answers_json(answers)
    sources = {choices[0].source for choices in answers}
    own = {"measured", "predicted"} if device == "h100" else {"transferred"}
    assert sources == own | {"heuristic", "fallback"}
    words = [word for text in texts for word in ("--layer", text)]
    done = command("--gpu", device, "--top", top, *words)
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    body = {"device": device, "problems": [problem.to_json() for problem in problems], "top": top}
    reply = plain_server.predict(body)
    assert (reply.status_code, reply.text) == (200, expected)
    assert [Problem.from_json(c[0]["problem"]) for c in json.loads(expected)["choices"]] == problems


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (0, -1, 65_537, "nan", "many", 1.5)),
        *(("padding", value) for value in (-1, 65, "1x", [1, 2, 3])),
        ("c", 65), ("groups", 0), ("h", 0), ("w", 70_000), ("dtype", "float64"),
        ("direction", "backward"), ("deterministic", True), ("residual", "perhaps"),
        ("activation", "tanh"), ("bias", "perhaps"), ("channels", 64),
    ],
)  # fmt: skip
def test_the_three_ways_refuse_alike(predictor, command, plain_server, field, value):
    fields = Problem.parse(GOOD).to_json() | {field: value}
    with pytest.raises(InvalidInput) as caught:
        predictor.choose(Problem.from_json(fields), "h100")
    error = caught.value
    assert error.field == field
    body = {"device": "h100", "problem": fields}
    reply = plain_server.predict(body)
    said = reply.json()["error"]
    assert reply.status_code == 422
    assert (said["field"], said["allowed"]) == (f"problem.{field}", error.allowed)
    assert said["message"] == f"problem.{error}"
    if not isinstance(value, (list, float)):  # no word on a command line can be one of these
        layer = " ".join(word for word in GOOD.split() if not word.startswith(f"{field}="))
        done = command("--gpu", "h100", "--layer", f"{layer} {field}={value}")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"confpred: {error}\n"


@pytest.mark.parametrize("device", ["v100", ""])
def test_the_three_ways_refuse_a_device_alike(predictor, command, plain_server, device):
    with pytest.raises(InvalidInput) as caught:
        predictor.choose(Problem.parse(GOOD), device)
    body = {"device": device, "problem": Problem.parse(GOOD).to_json()}
    said = plain_server.predict(body).json()["error"]
    assert said["message"] == str(caught.value)
    assert command("--gpu", device, "--layer", GOOD).stderr == f"confpred: {caught.value}\n"

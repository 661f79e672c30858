"""The pages for people: what they show, and what they refuse."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import MISSING, fields
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from served import copy_model
from strategies import problems

from confpred import Predictor
from confpred.cli.models import _here
from confpred.predict import explain
from confpred.predict.explain import explain_layer, explain_layers
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import CHOICES, LIMITS, Problem
from confpred.problem.device import KNOWN
from confpred.retraining.drift import Drift
from confpred.service import Settings, tokens
from confpred.service.app import create_app
from confpred.service.pages import GROUPS, PATHS
from confpred.service.schema import EXAMPLE

PREDICTOR = Predictor.load()
ASKED = EXAMPLE.to_texts() | {"device": "h100", "top": "3"}
ATTACK = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>"


class Elements(HTMLParser):
    """The elements of a page, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag in tags]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(), PREDICTOR)) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/?n=x", "/docs"])
def test_a_page_runs_and_loads_nothing(client: TestClient, path: str) -> None:
    reply = client.get(path)
    policy = dict(
        part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["form-action"] == "'self'"
    (style,) = re.findall("<style>(.*?)</style>", reply.text, re.DOTALL)
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy["style-src"] == f"'sha256-{digest}'"
    assert "script-src" not in policy
    elements = Elements(reply.text)
    assert {"script", "img", "iframe", "object"} & {tag for tag, _ in elements.found} == set()
    for _, attributes in elements.found:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    for each in elements.of("a", "link", "form"):
        target = each.get("href") or each.get("action") or ""
        assert re.match(r"#|\.|docs|openapi\.json|data:image/svg", target), target
    assert not re.search(r"url\(|@import|http-equiv", style)
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_form_has_all_fields_of_a_problem_with_their_ranges(client: TestClient) -> None:
    text = client.get("/").text
    controls = {each["name"]: each for each in Elements(text).of("input", "select")}
    further = {"d", "t", "layout", "cut"}  # of `ConvNd` alone; the rank follows from the sizes
    own = {field.name for field in fields(Problem)} | further
    assert own | {"device", "top"} == controls.keys()
    needed = {name for name in own if "required" in controls[name]}
    assert needed == {f.name for f in fields(ConvNd) if f.default is MISSING}
    labels = {each["for"] for each in Elements(text).of("label")}
    assert controls.keys() == labels
    assert sum(map(len, GROUPS.values())) == len(own)
    for name, (low, high) in {
        n: ConvNd.LIMITS[n] for n in ("d", "t", "cut")
    }.items() | LIMITS.items():
        assert f'id="hint-{name}">{low} to {high:,}' in text
        assert f"hint-{name}" in str(controls[name]["aria-describedby"])
    for words in CHOICES.values():
        for word in words:
            assert f'<option value="{word}"' in text


def test_the_form_as_it_stands_asks_the_example(client: TestClient) -> None:
    """A browser sends each control's value, and a box only if it is ticked."""
    shown = controls(client.get("/").text).items()
    sent = {name: value for name, value in shown if value != "false"}
    reply = client.get("/", params=sent)
    assert reply.status_code == 200
    assert f"<code>{EXAMPLE}</code> on " in reply.text


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"h": "", "r": "", "padding": "2", "cut": "2", "layout": "channels_first"},
         "n=32 c=64 w=56 k=64 s=3 rank=1 padding=2 cut=2 groups=8 layout=channels_first"),
        ({"d": "8", "t": "3", "padding": "1x1x1"},
         "n=32 c=64 d=8 h=56 w=56 k=64 t=3 r=3 s=3 rank=3 padding=1 groups=8"),
    ],
)  # fmt: skip
def test_the_form_asks_layers_of_any_rank_and_keeps_what_was_asked(
    client: TestClient, changes: dict[str, str], asked: str
) -> None:
    shown = controls(client.get("/").text).items()
    sent = {name: value for name, value in shown if value != "false"} | {"activation": "none"}
    reply = client.get("/", params=sent | changes)
    assert reply.status_code == 200
    assert f"<code>{asked}</code> on " in reply.text
    kept = controls(reply.text)
    assert {name: kept[name] for name in changes} == changes


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_field_shows_the_default_that_was_asked_with(empty: str) -> None:
    sizes = {field.name for field in fields(Problem) if field.default is MISSING}
    defaults = Problem(1, 1, 1, 1, 1, 1, 1).to_texts() | {"device": next(iter(KNOWN)), "top": "5"}
    optional = dict.fromkeys(defaults.keys() - sizes, empty)
    of_h200 = Predictor({"h200": PREDICTOR.models["h200"]})  # which comes first in the form
    with TestClient(create_app(Settings(), of_h200)) as client:
        for query in (optional, {name: "" for name in optional if name != "top"}, {}):
            reply = client.get("/", params={**dict.fromkeys(sizes, "4"), **query})
            assert reply.status_code == 200
            shown = controls(reply.text)
            assert {name: shown[name] for name in sizes} == dict.fromkeys(sizes, "4")
            assert {name: shown[name] for name in optional} == {n: defaults[n] for n in optional}
            asked = Problem(4, 4, 4, 4, 4, 4, 4)
            assert f"<code>{asked}</code> on {defaults['device']}" in reply.text
        shown = controls(client.get("/", params={**optional, "n": "4"}).text)  # a size is missing
        assert (shown["n"], shown["c"], shown["stride"]) == ("4", "", defaults["stride"])


def controls(text: str) -> dict[str, str]:
    """Return the value of each control of the form: a box's is whether it is ticked."""
    found: dict[str, str] = {}
    for tag, attributes in Elements(text).found:
        if tag == "select":
            select = str(attributes["name"])
        elif tag == "option" and "selected" in attributes:
            found[select] = str(attributes["value"])
        elif tag == "input" and attributes["type"] == "checkbox":
            found[str(attributes["name"])] = str("checked" in attributes).lower()
        elif tag == "input":
            found[str(attributes["name"])] = str(attributes["value"])
    return found


@settings(max_examples=8, deadline=None)
@given(asked=problems(), device=st.sampled_from(["h100", "h200", "a100"]), top=st.integers(1, 6))
def test_the_answer_is_the_library_s(
    client: TestClient, asked: Problem, device: str, top: int
) -> None:
    query = asked.to_texts() | {"device": device, "top": str(top)}
    reply = client.get("/", params=query)
    assert reply.status_code == 200
    words = unescape(re.sub(r"<[^>]*>", "\n", reply.text.partition("</style>")[2]))
    told = {" ".join(line.split()) for line in words.splitlines()}
    lines = str(explain_layer(asked, device, top=top, predictor=PREDICTOR)).splitlines()
    for line in lines[2:6]:
        name, _, text = line.partition(" ")
        assert not line or {name, " ".join(text.split())} <= told
    for line in lines[6:]:  # tables: cells are two blanks or more apart
        assert {" ".join(cell.split()) for cell in re.split(r"\s{2,}", line.strip())} <= told | {""}


def test_bars_are_as_long_as_the_times_that_they_show(client: TestClient) -> None:
    text = client.get("/", params=ASKED).text
    drawing = text[text.index("times-title") : text.index("</svg>", text.index("times-title"))]
    times = [float(ms) for ms in re.findall(r"<text.*?([\d.]+) ms</text>", drawing)]
    widths = [float(width) for width in re.findall(r'<rect.*?width="([\d.]+)"', drawing)]
    found = explain_layer(EXAMPLE, "h100", top=3, predictor=PREDICTOR)
    assert found.pytorch_ms is not None
    assert times[:3] == [round(c.predicted_ms or 0, 4) for c in found.choices]
    assert len(times) == len(widths) == 4
    for ms, width in zip(times, widths, strict=True):
        assert width == pytest.approx(638 * ms / max(times), rel=0.01)
    assert max(widths) == 638


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", "0", "an integer from 1 to 65536"),
        ("c", "65", "a multiple of groups=8"),
        ("h", "", "an integer from 1 to 65536 (required)"),
        ("k", "1e3", "an integer from 1 to 65536"),
        ("stride", "1x2x3", "an integer from 1 to 64, or a pair of them"),
        ("padding", "-1", "an integer from 0 to 64, or a pair of them"),
        ("dtype", "float8", "float16 or bfloat16 or float32"),
        ("bias", "maybe", "true or false"),
        ("deterministic", "true", "false in direction fprop"),
        ("device", "h1000", "h100"),
        ("top", "33", "an integer from 1 to 32"),
        ("top", "9" * 5000, "an integer from 1 to 32"),
        ("n", "9" * 5000, "an integer from 1 to 65536"),
        ("device", ATTACK, ""),
        ("direction", ATTACK, "fprop or dgrad or wgrad"),
    ],
)
def test_a_refusal_is_the_api_s_and_is_beside_its_field(
    client: TestClient, field: str, value: str, allowed: str
) -> None:
    reply = client.get("/", params=ASKED | {field: value})
    assert reply.status_code == 422
    (said,) = re.findall(rf'<p class="error" id="error-{field}">(.*?)</p>', reply.text)
    assert allowed in unescape(said)
    assert 'id="answer"' not in reply.text
    elements = Elements(reply.text)
    (control,) = (e for e in elements.of("input", "select") if e["name"] == field)
    assert control["aria-invalid"] == "true"
    assert f"error-{field}" in str(control["aria-describedby"]).split()
    assert elements.of("script", "img") == []
    assert [e for e in elements.of("input", "select") if "aria-invalid" in e] == [control]
    if value and "maybe" not in value and value != "true":
        assert escape(value) in reply.text.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")


def test_an_error_is_worded_as_the_api_words_it(client: TestClient) -> None:
    page = client.get("/", params=ASKED | {"c": "65"}).text
    body = {"device": "h100", "problem": EXAMPLE.to_json() | {"c": 65}}
    message = client.post("/v1/predict", json=body).json()["error"]["message"]
    assert f">{message.removeprefix('problem.')}</p>" in page


@pytest.mark.parametrize("name", ["no_such_field", ATTACK, "layer", "N"])
def test_an_unknown_field_is_refused(client: TestClient, name: str) -> None:
    reply = client.get("/", params=ASKED | {name: "1"})
    assert reply.status_code == 422
    (said,) = re.findall(r'role="alert"><p>Not answered: (.*?)</p>', reply.text, re.DOTALL)
    assert "a field among" in said
    assert Elements(reply.text).of("script", "img") == []


@pytest.mark.parametrize("query", ["n=%FF%FE", "n=%00", "n=%ED%A0%80", "&&&=", "n", "n=1&n=2"])
def test_any_query_gets_a_page(client: TestClient, query: str) -> None:
    reply = client.get(f"/?{query}")
    assert reply.status_code == 422 or (reply.status_code == 200 and not query.strip("&="))
    assert reply.headers["content-type"] == "text/html; charset=utf-8"


def test_models_are_shown_with_their_figures(client: TestClient) -> None:
    text = client.get("/").text
    for model in PREDICTOR.models.values():
        card = model.card
        assert model.version in text
        assert f"{card.metrics['regret']['geomean']:.3f}" in text
        assert f"{card.data.rows:,}" in text
        for family, share in card.bounds.coverage.items():
            assert f"{family}: {share:.1%}" in text
    assert "always ours" not in text


def test_the_answer_is_above_the_form(client: TestClient) -> None:
    text = client.get("/", params=ASKED).text
    assert text.index('<section id="answer"') < text.index('<section id="layer"')
    assert text.index('href="#answer"') < text.index('href="#layer"')


def test_models_of_all_operations_are_listed(client: TestClient) -> None:
    text = client.get("/").text
    shipped = [card["name"] for card in _here()]
    assert len(shipped) == 8
    rows = re.findall(r'<th scope="row">([hab][^<]*)</th>', text)
    assert sorted(rows) == sorted(shipped)
    for operation, count in {"batch_norm": 2, "linear_chain": 2, "conv": 1, "norm": 1}.items():
        assert text.count(f"<td>{operation}</td>") == count


def test_nothing_is_cut_on_a_phone(client: TestClient) -> None:
    """A browser looks at it in tests/browser: cells break, and the list of devices has a row."""
    (style,) = re.findall("<style>(.*?)</style>", client.get("/").text, re.DOTALL)
    phone = re.findall(r"@media \(max-width: 40rem\) \{ (th.*?) \}", style)
    assert any("white-space: normal" in rule for rule in phone)
    assert ".fields div:has(#device) { grid-column: 1 / -1; }" in style


def test_without_models_the_page_says_so() -> None:
    with TestClient(create_app(Settings(), Predictor({}))) as client:
        reply = client.get("/", params=ASKED)
        assert reply.status_code == 200
        assert "No model is loaded" in reply.text
        assert "the times are rough estimates" in reply.text


def report(**fields: object) -> str:
    found = Drift("h100", "a", "ok", "40 configs take 1.010", 1.01, 0.025, (), (), ())
    return json.dumps(found.to_json() | fields)


def test_the_latest_checks_of_drift_are_shown(tmp_path: Path) -> None:
    with TestClient(create_app(Settings(drift=str(tmp_path)), PREDICTOR)) as client:
        assert "No check is here." in client.get("/").text
        (tmp_path / "1.json").write_text(report())
        (tmp_path / "2.json").write_text(report(state="drifted", why=ATTACK))
        (tmp_path / "3.json").write_text('{"format": "confpred-drift/1"}')
        (tmp_path / "4.json").write_text("{")
        (tmp_path / "5.json").write_text(report(ratio=[1]))
        (tmp_path / "6.json").write_bytes(b" " * (4 * 2**20 + 1))
        (tmp_path / "7.json").mkdir()
        (tmp_path / "8.json").symlink_to(tmp_path / "nothing")
        text = client.get("/").text
    assert text.count("unreadable") == 6
    for words in ("40 configs take 1.010", "1.010", "2%", "drifted"):
        assert words in text
    assert Elements(text).of("script", "img") == []


def test_the_docs_show_every_request_schema_and_example(client: TestClient) -> None:
    text, api = client.get("/docs").text, client.get("/openapi.json").json()
    elements = Elements(text)
    ids = {each.get("id") for _, each in elements.found}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            assert f"{method}{path}" in ids
            for parameter in operation.get("parameters", ()):
                assert parameter["name"] in text
    assert set(api["components"]["schemas"]) <= ids
    for each in elements.of("a"):
        target = str(each["href"])
        assert not target.startswith("#") or target[1:] in ids
    shown = [
        unescape(re.sub("<[^>]*>", "", pre)) for pre in re.findall("<pre>(.*?)</pre>", text, re.S)
    ]
    for content in api["paths"]["/v1/predict"]["post"]["requestBody"]["content"].values():
        for example in content["examples"].values():
            assert json.dumps(example["value"], indent=2) in shown


def test_a_browser_may_send_a_token_as_a_password_to_pages_alone() -> None:
    secret, token = tokens.make("people", "admin")
    basic = "Basic " + b64encode(f"people:{secret}".encode()).decode()
    assert b64decode(basic[6:]).decode().endswith(secret)
    app = create_app(Settings(tokens="tokens.json"), PREDICTOR, [token])
    with TestClient(app) as client:
        for path in PATHS:
            refused = client.get(path)
            assert refused.status_code == 401
            challenges = refused.headers.get_list("www-authenticate")
            assert [each.split()[0] for each in challenges] == ["Bearer", "Basic"]
            for wrong in ("Basic", "Basic =", "Basic !!", "Basic cGVvcGxl", basic[:-8]):
                assert client.get(path, headers={"authorization": wrong}).status_code == 401
            assert client.get(path, headers={"authorization": basic}).status_code == 200
        for path in ("/v1/models", "/metrics"):
            reply = client.get(path, headers={"authorization": basic})
            assert reply.status_code == 401
            assert reply.headers.get_list("www-authenticate")[1:] == []
        for path in ("/v1/models/reload", "/v1/predict", "/"):
            assert client.post(path, headers={"authorization": basic}).status_code == 401


def test_pages_take_turns_with_other_work() -> None:
    with TestClient(create_app(Settings(deadline=1), PREDICTOR)) as client:
        reply = client.get("/", headers={"prefer": "wait=0"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "deadline_exceeded")


def test_jobs_and_uploads_are_shown_and_what_was_said_of_them_is_text(tmp_path: Path) -> None:
    app = create_app(Settings(exchange=str(tmp_path)), PREDICTOR)
    with TestClient(app, client=("127.0.0.1", 1)) as client:
        text = client.get("/").text
        assert "The latest jobs: none." in text
        assert "The latest uploads of measurements: none." in text
        exchange = app.state.exchange
        exchange.set_job(exchange.add_job("h100").id, "failed", ATTACK)
        exchange.add_job("h200")
        digest = hashlib.sha256(b"rows").hexdigest()
        headers = {"idempotency-key": digest, "content-type": "application/vnd.apache.parquet"}
        assert client.post("/v1/measurements", content=b"rows", headers=headers).status_code == 202
        text = client.get("/").text
        jobs = client.get("/v1/jobs").json()["jobs"]
    for job in jobs:
        cells = (str(job["id"]), *(job[k] or "" for k in ("kind", "device", "state", "started")))
        row = f'<th scope="row">{cells[0]}</th>' + "".join(f"<td>{c}</td>" for c in cells[1:])
        assert row in text
    assert digest[:12] in text
    assert "received" in text
    assert Elements(text).of("script", "img") == []


def test_a_published_model_that_does_not_answer_is_listed(
    tmp_path: Path, model_folder: Path
) -> None:
    copy_model(model_folder, tmp_path / "models" / "published-1")
    with TestClient(create_app(Settings(exchange=str(tmp_path)), PREDICTOR)) as client:
        text = client.get("/").text
        listed = client.get("/v1/models").json()["models"]
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', text)  # 6 of other operations
    table = {name: re.findall(r"<td[^>]*>(.*?)</td>", cells) for name, cells in rows[:-6]}
    assert any(not model["in_use"] for model in listed)
    for model in listed:
        cells = table[model["name"]]
        assert cells[-5] == ("yes" if model["in_use"] else "no")
        assert cells[-1] == model["digest"][:12]
    drawn = re.findall(r'<title id="within-(\w+)-title">', text)
    assert sorted(drawn) == sorted(m["digest"][:12] for m in listed if m["in_use"])


def test_an_explanation_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*problems: Any, **how: Any) -> Any:
        asked.append(problems)
        return explain_layers(*problems, **how)

    monkeypatch.setattr(explain, "explain_layers", counted)  # the same, and counts its calls
    with TestClient(create_app(Settings(), PREDICTOR)) as client:
        query = {**EXAMPLE.to_texts(), "device": "h100"}
        first, second = (client.get("/", params=query).text for _ in range(2))
        assert first == second
        assert len(asked) == 1
        client.get("/", params={**query, "top": "3"})
        assert len(asked) == 2

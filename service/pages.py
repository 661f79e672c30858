"""Pages for people, ``/`` and ``/docs``: HTML with drawings, without scripts or further files.

The form asks for a layer by GET, so that an answer has an address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from confpred.errors import DataError, InvalidInput
from confpred.files import read_json
from confpred.model.card import DRIFT_FORMAT, read_card
from confpred.model.folder import other_shipped_models
from confpred.predict import explain
from confpred.predict.choice import MAX_TOP
from confpred.predict.predictor import Predictor
from confpred.problem.conv import ConvNd, kind_of
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device, get_device
from confpred.problem.limits import UNLIMITED
from confpred.problem.record import Record

from .exchange import Exchange
from .generations import Loaded
from .predict import AnswerCache, Predict, Question, encode
from .scheduler import Steps
from .schema import EXAMPLE, ModelsReply, ServedModel

#: Paths of the pages, and of the description that one of them links to.
PATHS = ("/", "/docs", "/openapi.json")
_TOP = 5  # default number of choices in the form
_LATEST = 20  # jobs, uploads, and reports of drift that are shown
_LARGEST = 4 * 2**20  # most bytes of a report of drift
_EXPLAINED = 50_000  # bytes of an explanation, about
_WANTED = 0.95  # share of answers that should be within their bound
#: Kinds of answers in a model's card, and their names in the page.
_ANSWERS = {
    "the predicted fastest": "answers",
    "always ours": "confpred kernels alone",
    "always PyTorch's": "PyTorch's operator alone",
}
#: The fields of a problem in the form, in groups, and their names for people. A layer in one
#: dimension leaves h and r empty, and one in two dimensions d and t.
_NAMES = {
    "Tensors": "n batch size, c input channels, d input depth, h input height, w input width, "
    "k output channels, layout memory layout",
    "Filter": "t filter depth, r filter height, s filter width, stride, padding, dilation, groups, "
    "cut outputs left out at the end",
    "Computation": "dtype data type, direction, activation, bias, residual, deterministic",
}
GROUPS: Mapping[str, Mapping[str, str]] = {
    title: {words.split()[0]: words.partition(" ")[2] or words for words in names.split(", ")}
    for title, names in _NAMES.items()
}


def install(
    app: FastAPI,
    predict: Predict,
    loaded: Callable[[FastAPI], Loaded],
    listed: Callable[[FastAPI], Awaitable[ModelsReply]],
) -> None:
    """Add the pages to `app`; `loaded` returns its generations and `listed` all its models, or they
    raise a RequestError."""

    @app.get("/", include_in_schema=False)
    async def home(request: Request) -> Response:
        generation = loaded(request.app).current
        memory = predict.memory_of(generation.predictor)
        state = request.app.state
        shown = {
            **_shown_models((await listed(request.app)).models),
            **await asyncio.to_thread(_exchanged, state.exchange),
            "drift": await asyncio.to_thread(read_drift, state.settings.drift),
        }
        steps = _home(generation.predictor, memory, dict(request.query_params), shown)
        rendered = await predict.work(steps, request.scope, request.receive, 1)
        if rendered is None:
            return Response(status_code=499)  # nobody is there to read it
        return await _reply(request, *rendered)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        api = request.app.openapi()
        text = await asyncio.to_thread(_render, "docs.html", api=api, linked=_linked)
        return await _reply(request, text)


async def _reply(request: Request, text: str, status: int = 200) -> Response:
    body, encoded = await encode(text.encode(), request.headers.get("accept-encoding", ""))
    headers = {"content-security-policy": policy(), "referrer-policy": "no-referrer"}
    headers |= {"x-content-type-options": "nosniff", "cache-control": "no-store"}
    return HTMLResponse(body, status, headers | encoded)


@cache
def _style() -> str:
    own = Path(__file__).with_name("page.css").read_text()
    return files("confpred").joinpath("page.css").read_text() + own


@cache
def policy() -> str:
    """Return the Content-Security-Policy: one stylesheet, and an icon inside the page."""
    digest = b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(style=Markup(_style()), **values)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the form: its name, its label, its text, and its allowed values: one of `options`,
    by labels; or, without any, a text that `hint` describes."""

    name: str
    label: str
    text: str
    hint: str = ""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    required: bool = False
    is_flag: bool = False  # a check box, whose text is ``true`` when it is ticked


class Bar(NamedTuple):
    """A line of a drawing: its words, and the lengths of its bar and its whisker, as shares of the
    width."""

    label: str
    words: str
    length: float
    reach: float = 0.0
    ours: bool = True


class Chart(NamedTuple):
    """A drawing of bars: its id in the page, its title and description, and a line at `mark`."""

    name: str
    title: str
    about: str
    bars: Sequence[Bar]
    mark: float | None = None


def _home(
    predictor: Predictor, memory: AnswerCache, query: Mapping[str, str], shown: Mapping[str, Any]
) -> Steps[tuple[str, int]]:
    """Compute the page and its status; `shown` are the parts beside the answer."""
    yield 1
    error = answer = None
    if query:
        try:
            problem, device, top = read_query(query)
            asked = Question(device.key, top, problem, None, UNLIMITED)
            answer = memory.explained.get(asked)
            if answer is None:
                how: dict[str, Any] = {"predictor": predictor, "layers": memory.layers}
                answer = next(iter(explain.explain_layers([problem], device, top=top, **how)))
                memory.explained.put(asked, answer, _EXPLAINED)
        except InvalidInput as refused:
            error = refused
        yield 1
    groups = {title: [*_fields(names, query)] for title, names in GROUPS.items()}
    groups["Question"] = [*_question(query, predictor)]
    text = _render(
        "home.html",
        error=error,
        field_names={field.name for fields in groups.values() for field in fields},
        groups=groups,
        answer=answer,
        summary=[] if answer is None else explain.summary(answer),
        tables=[] if answer is None else explain.tables(answer),
        remark="" if answer is None else explain.remark_on(answer),
        times=None if answer is None else times_chart(answer),
        stale={m.version: m.stale for m in predictor.models.values() if m.stale},
        **shown,
    )
    return text, 200 if error is None else 422


def read_query(query: Mapping[str, str]) -> tuple[Record, Device, int]:
    """Return the form's layer, device and number of choices. An empty field has its default.

    Raises:
        InvalidInput: a field holds a value that is not allowed.
    """
    texts = {name: text.strip() for name, text in query.items() if text.strip()}
    device = get_device(texts.pop("device", next(iter(KNOWN))))
    top = texts.pop("top", str(_TOP))
    if not re.fullmatch("[0-9]{1,2}", top) or not 1 <= int(top) <= MAX_TOP:
        raise InvalidInput("top", top, f"an integer from 1 to {MAX_TOP}")
    return kind_of(texts).from_texts(texts), device, int(top)


def _fields(names: Mapping[str, str], query: Mapping[str, str]) -> Iterator[Field]:
    """Yield fields of a problem, with their texts in `query` or, without a query, the example's."""
    example, default = EXAMPLE.to_texts(), Problem(1, 1, 1, 1, 1, 1, 1).to_texts()
    needed, needed_2d = (
        {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
        for kind in (ConvNd, Problem)
    )
    for name, label in names.items():
        kind: type[Record] = Problem if name in example else ConvNd
        text = query.get(name, "") if query else example.get(name, "")
        if not text.strip() and name not in needed_2d:
            text = default.get(name, "")
        if name == "layout":
            first, *others = kind.CHOICES[name]
            yield Field(name, label, text, options={"": first} | {c: c for c in others})
        elif name in kind.CHOICES:
            yield Field(name, label, text, options={c: c for c in kind.CHOICES[name]})
        elif name in kind.LIMITS:
            low, high = kind.LIMITS[name]
            pair = ", or two such as 1x2" if name in kind.TUPLES else ""
            hint = f"{low} to {high:,}{pair}"
            yield Field(name, label, text, hint, required=name in needed)
        else:
            yield Field(name, label, text, is_flag=True)


def _question(query: Mapping[str, str], predictor: Predictor) -> Iterator[Field]:
    own = {model.device.key: model.device for model in predictor.models.values()}
    options = {
        key: f"{device.product} ({'has a model' if key in own else 'without a model'})"
        for key, device in sorted({**KNOWN, **own}.items(), key=lambda item: item[0] not in own)
    }
    default = next(iter(KNOWN if query else options))
    device, top = (query.get(name, "").strip() for name in ("device", "top"))
    yield Field("device", "device", device or default, options=options)
    yield Field("top", "candidates to list", top or str(_TOP), f"1 to {MAX_TOP}", required=True)


def times_chart(answer: explain.LayerExplanation) -> Chart:
    """Return the expected times of the choices and of PyTorch's operator; a line marks the
    roofline."""
    rows = [
        (f"{rank} {choice.provider}", choice.predicted_ms, choice.family is not None)
        for rank, choice in enumerate(answer.choices, 1)
    ]
    if all(ours for _, _, ours in rows):
        rows.append(("PyTorch's operator", answer.pytorch_ms, False))
    floor = answer.roofline.floor_ms
    most = max(floor, *(ms or 0.0 for _, ms, _ in rows))
    bars = [
        Bar(label, "no prediction" if ms is None else f"{ms:.4f} ms", (ms or 0.0) / most, ours=ours)
        for label, ms, ours in rows
    ]
    about = f"A bar a candidate, its expected time; the line is the roofline, {floor:.4f} ms."
    return Chart("times", "Expected times", about, bars, floor / most)


def _shown_models(models: Sequence[ServedModel]) -> dict[str, Any]:
    """Return the table of all models, and drawings of those in use."""
    heads = ("rows", "problems", "networks", "geomean", "p95", "worst", "within bound")
    more = ("answers", "device", "operation", "created", "digest")
    rows: list[Sequence[str]] = [("model", *heads, *more)]
    for model in models:
        regret, covered = model.figures.get("regret", {}), _coverage(model).get("all")
        rows.append((
            model.name,
            *(f"{model.figures[count]:,}" for count in heads[:3]),
            *(f"{regret[key]:.3f}" if key in regret else "" for key in heads[3:6]),
            "" if covered is None else f"{covered:.1%}",
            "yes" if model.in_use else "no",
            *(model.device, model.operation, model.created, model.digest[:12]),
        ))  # fmt: skip
    used = sorted((model for model in models if model.in_use), key=lambda model: model.name)
    charts = [*_regret_chart(used), *(c for model in used for c in _coverage_chart(model))]
    table = explain.Listing("Models", "", 8, rows)
    return {"models": table, "charts": charts, "others": _other_models()}


@cache
def _other_models() -> explain.Listing:
    """Return the shipped models of other operations, which are no part of a generation."""
    rows: list[Sequence[str]] = [("model", "operation", "device", "created")]
    for path in other_shipped_models():
        card = read_card(path)[1]
        rows.append((path.name, *(str(card[name]) for name in rows[0][1:])))
    return explain.Listing("Models of other operations", "", 0, rows)


def _regret_chart(models: Sequence[ServedModel]) -> Iterator[Chart]:
    regrets = [(model.name, name, regret) for model in models for name, regret in _regrets(model)]
    most = max((regret["p95"] - 1 for *_, regret in regrets), default=0.0) or 1.0
    bars = [
        Bar(
            f"{model}, {name}",
            f"{regret['geomean']:.3f}, p95 {regret['p95']:.3f}",
            (regret["geomean"] - 1) / most,
            (regret["p95"] - 1) / most,
            ours="PyTorch" not in name,
        )
        for model, name, regret in regrets
    ]
    if bars:
        about = (
            "Time of the choice over that of the fastest measured candidate, on networks that the "
            "model has not seen. A bar begins at 1 and is the geometric mean; the line goes on "
            "to the 95 % quantile."
        )
        yield Chart("regret", "Regret", about, bars)


def _regrets(model: ServedModel) -> list[tuple[str, Mapping[str, float]]]:
    whole = (model.figures.get("whole") or {}).get("regret", {})
    named = {_ANSWERS.get(name, name): regret for name, regret in whole.items()}
    by_name = {"configs of a family": model.figures.get("regret"), **named}
    return [(name, regret) for name, regret in by_name.items() if regret]


def _coverage(model: ServedModel) -> Mapping[str, float]:
    coverage: Mapping[str, float] = model.card["bounds"].get("coverage") or {}
    return coverage


def _coverage_chart(model: ServedModel) -> Iterator[Chart]:
    title = f"{model.name}: answers within their bound"
    about = f"Share of answers that kept to their bound; the line is the goal: {_WANTED:.0%}"
    bars = [Bar(name, f"{share:.1%}", share) for name, share in _coverage(model).items()]
    if bars:
        yield Chart(f"within-{model.digest[:12]}", title, about, bars, _WANTED)


def _exchanged(exchange: Exchange | None) -> dict[str, Any]:
    """Return the jobs and the latest uploads; None for both without an exchange."""
    if exchange is None:
        return {"jobs": None, "uploads": None}
    jobs: list[Sequence[str]] = [("job", "kind", "device", "state", "started", "ended", "reason")]
    for job in exchange.jobs()[:_LATEST]:
        words = (job.kind, job.device, job.state, job.started, job.ended, job.reason)
        jobs.append((str(job.id), *(word or "" for word in words)))
    uploads: list[Sequence[str]] = [("received", "rows", "state", "reason", "upload")]
    for upload in exchange.latest(_LATEST):
        rows = "" if upload.rows is None else f"{upload.rows:,}"
        uploads.append((upload.received, rows, upload.state, upload.reason or "", upload.id[:12]))
    return {
        "jobs": explain.Listing("The latest jobs", "", 0, jobs),
        "uploads": explain.Listing("The latest uploads of measurements", "", 2, uploads),
    }


def read_drift(folder: str | None) -> explain.Listing:
    """Return the latest reports of ``confpred drift --json`` in a folder; a file that cannot be
    read is a row with the error."""
    rows: list[Sequence[str]] = [("checked", "times", "far off", "device", "model", "state", "why")]
    paths = [] if folder is None else [*Path(folder).glob("*.json")]
    dated = sorted(((_modified(path), path) for path in paths), reverse=True)
    for at, path in dated[:_LATEST]:
        checked = datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M")
        try:
            if path.stat().st_size > _LARGEST:
                raise DataError(f"{path} has more than {_LARGEST} bytes")
            report = read_json(path, "a report of drift", DRIFT_FORMAT)
            times = (f"{report['ratio']:.3f}", f"{report['far']:.0%}")
            words = (str(report[key]) for key in ("device", "model", "state", "why"))
            rows.append((checked, *times, *words))
        except (DataError, OSError, KeyError, TypeError, ValueError) as error:
            rows.append((checked, "", "", "", "", "unreadable", f"{path.name}: {error}"))
    return explain.Listing("The latest checks", "", 3, rows)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone since it was listed
        return 0.0


def _linked(value: Any) -> Markup:
    """Return JSON as HTML, with links for references to schemas."""
    text = str(escape(json.dumps(value, indent=2)))
    return Markup(re.sub(r"(#/components/schemas/(\w+))", r'<a href="#\2">\1</a>', text))

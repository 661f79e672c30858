"""The OpenAPI description, generated from the records that the code checks requests with."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from confpred.model.card import Card
from confpred.predict.choice import MAX_TOP, Source
from confpred.problem.conv import OWN_FIELDS, ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device
from confpred.problem.limits import SCHEMA, Limits
from confpred.problem.record import Record

from . import Settings

EXAMPLE = Problem(32, 64, 56, 56, 64, 3, 3, padding=(1, 1), groups=8, activation="relu")
#: Media type of uploaded measurements.
PARQUET = "application/vnd.apache.parquet"
#: Paths that need no token.
OPEN = frozenset(("/healthz", "/readyz"))
_FIVE = {"n": 128, "c": 256, "h": 14, "w": 28, "k": 256, "r": 5, "s": 5, "groups": 16}
_LINE = {"n": 8, "c": 2048, "w": 4096, "k": 2048, "s": 4, "padding": 3, "cut": 3, "groups": 2048}
_VOLUME = {**_FIVE, "n": 8, "d": 16, "t": 3, "stride": [1, 2, 2], "padding": [1, 2, 2]}
EXAMPLES: dict[str, dict[str, Any]] = {
    "one problem": {"value": {"device": "h100", "problem": EXAMPLE.to_json()}},
    "the best three of two problems": {
        "value": {
            "device": "h100",
            "problems": [EXAMPLE.to_json(), {**_FIVE, "padding": [2, 2], "bias": True}],
            "top": 3,
        }
    },
    "a causal layer in one dimension, and a layer in three": {
        "value": {"device": "h100", "problems": [_LINE, _VOLUME]}
    },
}


@dataclass(frozen=True, slots=True)
class ChoiceReply:
    """One answer, as `confpred.predict.choice.Choice.to_json` writes it.

    Attributes:
        problem: the problem, with all fields.
        device: key of the device.
        source: source of the choice.
        provider: what to launch: a kernel family, or `pytorch` for PyTorch's own operator.
        family: the provider, if it is a kernel family; else null.
        config_id: row of the family's config table; null if no family is chosen.
        config: that row by field name; null if no family is chosen.
        predicted_ms: expected time of one launch, milliseconds; null for `fallback`.
        pytorch_ms: expected time of PyTorch's own operator, milliseconds; null if nothing predicts
            it.
        regret_bound: with 95 % confidence the choice is at most this many times as slow as the best
            config, PyTorch's operator included; null if no bound was calibrated.
        confidence: that probability, 0.95; null without a bound.
        measured_on: key of the device whose measurements the choice is based on; null without any,
            as for an estimate (`heuristic`).
        extrapolated: whether the problem is out of distribution: no similar layer was measured.
        model: version of the model; null without one.
    """

    problem: dict[str, Any]
    device: str
    source: Source
    provider: str
    family: str | None
    config_id: int | None
    config: dict[str, int] | None
    predicted_ms: float | None
    pytorch_ms: float | None
    regret_bound: float | None
    confidence: float | None
    measured_on: str | None
    extrapolated: bool
    model: str | None


@dataclass(frozen=True, slots=True)
class PredictReply:
    """`choices[i]` are the choices for problem i: the best config first, at most `top`."""

    choices: list[list[ChoiceReply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDevice(Device):
    """A device with the version and digest of the model in use for it."""

    model: str | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class DevicesReply:
    """All devices."""

    devices: list[ServedDevice]


_FIGURES = ("rows", "problems", "networks")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model, or a published one that can be fetched.

    Attributes:
        device: key of the device that it is for.
        version, name: its name.
        digest: SHA-256 of its card, which has the digests of all other files.
        operation: operation of its kernels.
        created: time of its training, ISO 8601.
        in_use: whether it answers requests that name no model.
        kernels: digests of the CUDA sources that were measured, by kernel family.
        figures: its regret on networks held out of training, and the amount of its data.
        card: content of the model's card.
    """

    device: str
    version: str
    digest: str
    card: dict[str, Any]
    name: str
    operation: str
    created: str
    in_use: bool
    kernels: dict[str, list[str]]
    figures: dict[str, Any]

    @classmethod
    def of(cls, name: str, digest: str, card: Card, *, in_use: bool) -> ServedModel:
        return cls(
            device=card.device,
            version=name,
            digest=digest,
            card=dict(card.content),
            name=name,
            operation=card.operation,
            created=card.created,
            in_use=in_use,
            kernels={family: list(entry.source_digests) for family, entry in card.families.items()},
            figures={**card.metrics, **{n: getattr(card.data, n) for n in _FIGURES}},
        )


@dataclass(frozen=True, slots=True)
class FormerModel:
    """A model of a former generation, which answers if a request names it as ``version``."""

    device: str
    version: str
    digest: str
    generation: str


@dataclass(frozen=True, slots=True)
class ModelsReply:
    """The digest of the current generation, its models, other published models, and the models of
    former generations."""

    generation: str
    models: list[ServedModel]
    former: list[FormerModel]


@dataclass(frozen=True, slots=True)
class ChangeReply:
    """Reply to a reload or a rollback: all workers answer by `generation` from now on."""

    outcome: Literal["reloaded", "unchanged", "rolled_back"]
    generation: str
    models: list[ServedModel]
    former: list[FormerModel]


@dataclass(frozen=True, slots=True)
class Submission:
    """An upload of measurements.

    Attributes:
        id: SHA-256 of its bytes.
        state: ``received`` until it is checked, then ``admitted`` or ``quarantined``; ``revoked``
            if the operator revoked it.
        rows: how many of its rows are new in the data; null until it is admitted.
        reason: why it is quarantined or revoked, or could not be checked yet; else null.
        received: time of its acknowledgement, ISO 8601.
        token: name of the token that it was sent with.
    """

    id: str
    state: Literal["received", "admitted", "quarantined", "revoked"]
    rows: int | None
    reason: str | None
    received: str
    token: str


@dataclass(frozen=True, slots=True)
class SubmissionsReply:
    """The uploads whose rows are in the data, in the order of their arrival."""

    measurements: list[Submission]


@dataclass(frozen=True, slots=True)
class Job:
    """A retraining job.

    Attributes:
        id: number of the job.
        kind: purpose of the job.
        device: key of the device that it trains for.
        state: ``queued``, ``running``, or how it ended: ``published``, ``kept`` if the old model
            stays, ``failed``.
        started, ended: times, ISO 8601; null before.
        reason: reason for its end.
    """

    id: int
    kind: Literal["retrain"]
    device: str
    state: Literal["queued", "running", "published", "kept", "failed"]
    started: str | None
    ended: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class JobsReply:
    """All jobs, the latest first."""

    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class StatusReply:
    """State of the server."""

    status: str


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _described(parameter: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a request: its only parameter beside those in the path, and its
    body by media type, if it has one."""
    body = {"requestBody": {"required": True, "content": content}} if content else {}
    return {"parameters": [{"required": True, "schema": {"type": "string"}, **parameter}], **body}


_DEVICE = "A device's key, or the name that its driver reports."
_VERSION = "Name or digest of a loaded model, whose generation answers."
_HASH = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_KEY = "SHA-256 of the body, which is also the upload's id."
#: Requests to ``/v1/predict``, whose schema is among the components that `install` adds, to
#: ``/v1/measurements`` and to ``/v1/jobs``.
PREDICT_BODY = _described(
    {"name": "version", "in": "query", "required": False, "description": _VERSION},
    {"application/json": {"schema": _ref("PredictRequest"), "examples": EXAMPLES}},
)
MEASUREMENTS_BODY = _described(
    {"name": "Idempotency-Key", "in": "header", "schema": _HASH, "description": _KEY},
    {PARQUET: {"schema": {"type": "string", "format": "binary"}}},
)
JOB_QUERY = _described({"name": "device", "in": "query", "description": _DEVICE}, {})


def install(app: FastAPI, settings: Settings) -> None:
    """Complete `app`'s OpenAPI description with the bodies that FastAPI cannot see."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            app.openapi_schema = described = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            described["components"]["schemas"] |= _bodies(settings)
            if settings.tokens is not None:
                _secure(described)
        # GPU models by their keys and drivers' names, and those that only a model describes.
        models = app.state.loaded.current.predictor.models.values() if app.state.loaded else ()
        devices = {**KNOWN, **{model.device.key: model.device for model in models}}.values()
        names = dict.fromkeys(name for device in devices for name in (device.key, device.product))
        request = app.openapi_schema["components"]["schemas"]["PredictRequest"]
        request["properties"]["device"]["enum"] = [*names]
        (query,) = app.openapi_schema["paths"]["/v1/jobs"]["post"]["parameters"]
        query["schema"]["enum"] = [*names]
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _secure(described: dict[str, Any]) -> None:
    """Add the requests' tokens to the description."""
    described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    described["security"] = [{"token": []}]
    refused = {"application/json": {"schema": _ref("ErrorReply")}}
    for path, methods in described["paths"].items():
        for operation in methods.values():
            if path in OPEN:
                operation["security"] = []
            else:
                reply = {"description": "Unauthorized", "content": refused}
                operation["responses"]["401"] = reply


def _object(title: str, about: str | None, properties: Any, **more: Any) -> dict[str, Any]:
    schema = {"title": title, "description": about, "type": "object", "properties": properties}
    return {**schema, **more, "additionalProperties": False}


def _bodies(settings: Settings) -> dict[str, Any]:
    """Return the schemas of a request's parts, by name."""
    problem = {"anyOf": [_ref("Problem"), _ref("ConvNd")]}
    top = {"type": "integer", "minimum": 1, "maximum": MAX_TOP, "default": 1}
    regret = {"anyOf": [{"type": "number", "minimum": 1, "maximum": 1e300}, {"type": "null"}]}
    count = {"minItems": 1, "maxItems": settings.max_batch}
    falls_back = "Answer PyTorch's own operator where the bound on the choice's regret is above it."
    request = {
        "device": {"type": "string", "description": _DEVICE},
        "problem": problem,
        "problems": {"type": "array", "items": problem, **count},
        "top": {**top, "description": "How many choices each problem gets, best first."},
        "max_regret": {**regret, "default": None, "description": falls_back},
        "limits": _ref("Limits"),
    }
    asked = "Problems to choose configs for: `problem` for one, `problems` for many."
    own = [{"required": [name]} for name in sorted(OWN_FIELDS)]  # as `kind_of` tells them apart
    either: dict[str, Any] = {"oneOf": [{"required": [name]} for name in ("problem", "problems")]}
    return {
        "Problem": _record(Problem),
        "ConvNd": {**_record(ConvNd), "anyOf": [*own, {"properties": {"h": False, "r": False}}]},
        "Limits": _object("Limits", inspect.getdoc(Limits), SCHEMA),
        "PredictRequest": _object("PredictRequest", asked, request, required=["device"], **either),
    }


def _record(kind: type[Problem] | type[ConvNd]) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    properties = {field.name: _field(kind, field) for field in fields}
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    return _object(kind.__name__, inspect.getdoc(kind), properties, required=required)


def _field(kind: type[Record], field: dataclasses.Field[Any]) -> dict[str, Any]:
    name, axes = field.name, len(kind.TUPLES.get(field.name, ()))
    schema: dict[str, Any] = {"type": "boolean"}
    if name in kind.CHOICES:
        schema = {"type": "string", "enum": list(kind.CHOICES[name])}
    elif name in kind.LIMITS:
        low, high = kind.LIMITS[name]
        schema = {"type": "integer", "minimum": low, "maximum": high}
    if axes:
        least = 1 if "rank" in kind.LIMITS else axes  # one of each axis that the layer has
        several = {"type": "array", "items": schema, "minItems": least, "maxItems": axes}
        schema = {"anyOf": [schema, several]}
    if field.default is not dataclasses.MISSING and name != "rank":  # which follows from others
        schema["default"] = field.default
    return schema

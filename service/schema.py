"""The OpenAPI description, generated from the records that the code checks requests with."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from confpred.predict.choice import MAX_TOP, Source
from confpred.problem.conv2d import CHOICES, LIMITS, PAIRS, Problem
from confpred.problem.device import KNOWN, Device

from .settings import Settings

EXAMPLE = Problem(
    n=32, c=64, h=56, w=56, k=64, r=3, s=3, padding=(1, 1), groups=8, activation="relu"
)
_FIVE = {"n": 128, "c": 256, "h": 14, "w": 28, "k": 256, "r": 5, "s": 5, "groups": 16}
EXAMPLES: dict[str, dict[str, Any]] = {
    "one problem": {"value": {"device": "h100", "problem": EXAMPLE.to_json()}},
    "the best three of two problems": {
        "value": {
            "device": "h100",
            "problems": [EXAMPLE.to_json(), {**_FIVE, "padding": [2, 2], "bias": True}],
            "top": 3,
        }
    },
}


@dataclass(frozen=True, slots=True)
class ChoiceReply:
    """One answer, as `confpred.predict.choice.Choice.to_json` writes it.

    Attributes:
        problem: what was asked, all fields spelled out.
        device: key of the device it was asked for.
        source: where the answer comes from.
        provider: what to launch: a kernel family, or `pytorch` for PyTorch's own operator.
        family: the provider, if it is a kernel family; else null.
        config_id: row of the family's config table; null where no family is chosen.
        config: that row by field name; null where no family is chosen.
        predicted_ms: expected time of one launch, milliseconds; null for `fallback`.
        regret_bound: with 95 % confidence the choice is at most this many times as slow as the best
            config; null where nothing was calibrated.
        model: version of the model that answered; null where none did.
    """

    problem: dict[str, Any]
    device: str
    source: Source
    provider: str
    family: str | None
    config_id: int | None
    config: dict[str, int] | None
    predicted_ms: float | None
    regret_bound: float | None
    model: str | None


@dataclass(frozen=True, slots=True)
class PredictReply:
    """`choices[i]` answers problem i: the best config first, at most `top` of them."""

    choices: list[list[ChoiceReply]]


@dataclass(frozen=True, slots=True)
class ServedDevice(Device):
    """A device that can be asked for, and the version of the model that answers for it."""

    model: str | None


@dataclass(frozen=True, slots=True)
class DevicesReply:
    """Every device that can be asked for."""

    devices: list[ServedDevice]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model: its device, its version, and its card (data, features, metrics)."""

    device: str
    version: str
    card: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelsReply:
    """Every model that is loaded."""

    models: list[ServedModel]


@dataclass(frozen=True, slots=True)
class StatusReply:
    """How the server is."""

    status: str


def install(app: FastAPI, settings: Settings) -> None:
    """Complete `app`'s OpenAPI description by what FastAPI cannot see: the checked bodies."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            described = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            described["components"]["schemas"] |= {
                "Problem": _problem(),
                "PredictRequest": _request(settings),
            }
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


#: The request body of ``/v1/predict``; its schema is among the components that `install` adds.
PREDICT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/PredictRequest"},
                "examples": EXAMPLES,
            }
        },
    }
}


def _problem() -> dict[str, Any]:
    properties, required = {}, []
    for field in dataclasses.fields(Problem):
        properties[field.name] = _field(field.name)
        if field.default is dataclasses.MISSING:
            required.append(field.name)
        else:
            properties[field.name]["default"] = field.default
    return {
        "title": "Problem",
        "description": inspect.getdoc(Problem),
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _field(name: str) -> dict[str, Any]:
    if name in CHOICES:
        return {"type": "string", "enum": list(CHOICES[name])}
    if name not in LIMITS:
        return {"type": "boolean"}
    integer = {"type": "integer", "minimum": LIMITS[name][0], "maximum": LIMITS[name][1]}
    if name not in PAIRS:
        return integer
    return {"anyOf": [integer, {"type": "array", "items": integer, "minItems": 2, "maxItems": 2}]}


def _request(settings: Settings) -> dict[str, Any]:
    problem = {"$ref": "#/components/schemas/Problem"}
    return {
        "title": "PredictRequest",
        "description": "Problems to choose configs for: `problem` for one, `problems` for many.",
        "type": "object",
        "properties": {
            "device": {
                "type": "string",
                "description": "A device's key, or the name that its driver reports.",
                "examples": list(KNOWN),
            },
            "problem": problem,
            "problems": {
                "type": "array",
                "items": problem,
                "minItems": 1,
                "maxItems": settings.max_batch,
            },
            "top": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_TOP,
                "default": 1,
                "description": "How many choices each problem gets, best first.",
            },
        },
        "required": ["device"],
        "oneOf": [{"required": ["problem"]}, {"required": ["problems"]}],
        "additionalProperties": False,
    }

"""The service's JSON as records. What a reply says is checked as any input is: it comes from
another program, which may be of another version."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from confpred.client.steps import Reply
from confpred.errors import InvalidInput, ServiceError
from confpred.predict.choice import Choice, Source
from confpred.predict.plan import named_candidate
from confpred.problem.device import Device
from confpred.problem.record import Record

#: Names the model that answered by its digest; the service's, where it sends it.
MODEL_HEADER = "x-confpred-model"


@dataclass(frozen=True, slots=True)
class ServedDevice:
    """A device that the service answers for.

    Attributes:
        device: its description there.
        model: version of the model that answers; None where estimates do.
    """

    device: Device
    model: str | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the service has loaded.

    Attributes:
        device: key of the device that it is for.
        version: its name.
        card: what it was trained on, and how well it does.
        digest: of its files; None where the service tells none.
    """

    device: str
    version: str
    card: Mapping[str, Any]
    digest: str | None


def choices_of(
    reply: Reply, problems: Sequence[Record], device: Device, top: int, server: str
) -> list[tuple[Choice, ...]]:
    """The choices in a reply to ``/v1/predict``, best first, one tuple a problem.

    Each config is looked up by what it spells out and has to be legal, as the tables and rules of
    the service may be others than those of this process, which is to launch it.

    Raises:
        ValueError: the reply is not one to this question, or names what is not there or not legal.
    """
    answers = json.loads(reply.body)["choices"]
    if len(answers) != len(problems):
        raise ValueError(f"{len(answers)} answers to {len(problems)} problems")
    found = []
    for problem, answer in zip(problems, answers, strict=True):
        if not 1 <= len(answer) <= top:
            raise ValueError(f"{len(answer)} choices where 1 to {top} were asked for")
        found.append(tuple(_choice(fields, problem, device, server) for fields in answer))
    return found


def _choice(fields: Mapping[str, Any], problem: Record, device: Device, server: str) -> Choice:
    asked = problem.to_json()
    if {name: fields["problem"].get(name) for name in asked} != asked:
        raise ValueError("an answer to another problem")
    if fields["source"] not in get_args(Source):
        raise ValueError(f"source {fields['source']!r}")
    model = fields["model"]
    # A service of an earlier release says no more than the fields that are required here.
    donor = fields.get("measured_on") if fields["source"] == "transferred" else None
    if fields["device"] != device.key:
        raise ValueError("an answer for another device")
    if not all(text is None or isinstance(text, str) for text in (model, donor)):
        raise ValueError("a model or a device that is no text")
    return Choice(
        problem,
        device.key,
        fields["source"],
        named_candidate(problem, device, fields["provider"], fields["config"] or {}),
        predicted_ms=_number(fields["predicted_ms"]),
        pytorch_ms=_number(fields.get("pytorch_ms")),
        regret_bound=_number(fields["regret_bound"]),
        extrapolated=fields.get("extrapolated", False) is True,
        model=model,
        donor=donor,
        server=server,
    )


def _number(value: object) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{value!r} where null or a number of at least 0 belongs")
    return float(value)  # type: ignore[arg-type]


def identity_of(reply: Reply, answers: Sequence[Sequence[Choice]]) -> str | None:
    """What names the model that answered: its digest, or else its version; None if nothing does."""
    told = reply.headers.get(MODEL_HEADER)
    versions = sorted({c.model for choices in answers for c in choices if c.model is not None})
    return told or " ".join(versions) or None


def devices_of(reply: Reply) -> tuple[ServedDevice, ...]:
    """The devices in a reply to ``/v1/devices``."""
    names = [field.name for field in dataclasses.fields(Device)]
    return tuple(
        ServedDevice(Device(**{n: fields[n] for n in names if n in fields}), fields["model"])
        for fields in json.loads(reply.body)["devices"]
    )


def models_of(reply: Reply) -> tuple[ServedModel, ...]:
    """The models in a reply to ``/v1/models``."""
    return tuple(
        ServedModel(fields["device"], fields["version"], fields["card"], fields.get("digest"))
        for fields in json.loads(reply.body)["models"]
    )


def is_too_much(reply: Reply) -> bool:
    """Whether the service refuses the number of problems, and would take fewer."""
    if reply.status == 413:
        return True
    return reply.status == 422 and _error_in(reply).get("field") == "problems"


def refused(reply: Reply, request_id: str) -> ServiceError | InvalidInput:
    """What the service says is wrong, as the library would raise it."""
    error = _error_in(reply)
    if reply.status == 422 and isinstance(error.get("field"), str):
        return InvalidInput(error["field"], error.get("value"), str(error.get("allowed")))
    said = error.get("message")
    what = f"the service replies {reply.status}" + (f": {said}" if said else "")
    return ServiceError(what, reply.status, request_id)


def _error_in(reply: Reply) -> dict[str, Any]:
    try:
        error = json.loads(reply.body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}

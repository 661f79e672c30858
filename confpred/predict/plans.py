"""A *plan*: the recorded choices of a whole network on one device, for starts that are all alike.

The file is one object::

    {"format": "confpred-plan/2", "operation": "conv2d", "device": "h100",
     "confpred": "0.1.0", "model": "h100-2026.10.01",
     "kernels": {"grouped_fprop": "4b5c6d7e8f901234"},
     "choices": [{"problem": {"n": 32, "c": 64, ...}, "provider": "grouped_fprop",
                  "config": {"block_n": 1, ...}, "source": "predicted", "predicted_ms": 0.0213},
                 ...]}

``kernels`` has the digest of the CUDA sources that the choices of a kernel family launch
(`confpred.families.kernel_text.source_digest`; joined by ``+`` where they are several). Where these
have changed, the choices may be slow, or wrong, so that the plan is refused. A changed table of
configs needs no digest: each config is spelled out, and has to be there still, and legal. The
provider ``pytorch``, with the config ``{}``, is PyTorch's own operator. A problem's fields may be
left out where they have their default value.

What a user fixes by hand is in a file of pins (`confpred.predict.pins`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import confpred
from confpred.errors import DataError, InvalidInput
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.families.kernel_text import identity_of
from confpred.families.registry import all_families, config_of, operation_named, operation_of
from confpred.files import read_json, write_whole
from confpred.predict.choice import Choice, Source
from confpred.predict.pins import named_candidate
from confpred.problem.device import Device, get_device
from confpred.problem.operation import KernelSpec, Operation
from confpred.problem.record import Record

FORMAT = "confpred-plan/2"
_FIELDS = ("problem", "provider", "config", "source", "predicted_ms")


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices of a network.

    Attributes:
        device: what they are for.
        operation: what the problems are of.
        choices: one a problem, in the order in which a network first asks.
        kernels: the digest of the sources that the choices of each kernel family launch.
        model: version of the model that predicted them, several joined by blanks, or None.
        confpred: version of the package that made the plan.
    """

    device: Device
    operation: Operation
    choices: tuple[Choice, ...]
    kernels: Mapping[str, str]
    model: str | None
    confpred: str

    def specs(self) -> list[KernelSpec]:
        """Every kernel that the choices launch, once."""
        return list(dict.fromkeys(kernel for c in self.choices for kernel in _specs(c)))

    def outdated(self) -> str | None:
        """Why the choices are not for the kernels that are installed; None if they are."""
        current = _digests(self.choices)
        for provider in sorted({*current, *self.kernels}):
            planned, now = (digests.get(provider, "none") for digests in (self.kernels, current))
            if planned != now:
                return (
                    f"made for other kernels of {provider}: their digest is {_start(planned)}, "
                    f"and that of the installed ones {_start(now)}"
                )
        return None


def plan_of(choices: Iterable[Choice]) -> Plan:
    """The plan that repeats `choices`; where a problem comes again, its last choice counts.

    A guess (`Choice.is_guess`) is never launched inside PyTorch: what such a choice becomes in a
    plan is PyTorch's own operator, which is what runs.

    Raises:
        InvalidInput: there is no choice, or they are of several devices or operations.
    """
    given = list(choices)
    if not given:
        raise InvalidInput("choices", [], "at least one choice")
    devices = sorted({choice.device for choice in given})
    if len(devices) > 1:
        raise InvalidInput("device", " and ".join(devices), "choices of one device")
    found = {choice.problem: _launched(choice) for choice in given}
    operations = {operation_of(problem).name: operation_of(problem) for problem in found}
    if len(operations) > 1:
        raise InvalidInput("operation", " and ".join(operations), "choices of one operation")
    models = dict.fromkeys(c.model for c in found.values() if c.model is not None)
    return Plan(
        get_device(devices[0]),
        next(iter(operations.values())),
        tuple(found.values()),
        _digests(found.values()),
        " ".join(models) or None,
        confpred.__version__,
    )


def write_plan(path: Path, plan: Plan, *, replace: bool = True) -> None:
    """Write `plan` to `path`, whole or not at all; `replace` as `write_whole` has it.

    Raises:
        StorageError: the file system refused the write.
    """
    text = plan_text(plan)
    write_whole(path, lambda file: file.write(text.encode()), replace=replace)


def plan_text(plan: Plan) -> str:
    """The content of a plan's file: one choice a line, so that versions compare well."""
    head = {
        "format": FORMAT,
        "operation": plan.operation.name,
        "device": plan.device.key,
        "confpred": plan.confpred,
        "model": plan.model,
        "kernels": dict(sorted(plan.kernels.items())),
    }
    lines = ",\n".join(
        "  "
        + json.dumps(
            {
                "problem": _fields(choice.problem),
                "provider": choice.provider,
                "config": dict(config_of(choice.candidate)),
                "source": choice.source,
                "predicted_ms": choice.predicted_ms,
            },
            allow_nan=False,
        )
        for choice in plan.choices
    )
    return f'{json.dumps(head)[:-1]}, "choices": [\n{lines}\n]}}\n'


def read_plan(path: Path, device: str | Device | None = None, *, any_kernels: bool = False) -> Plan:
    """The plan in the file at `path`.

    Args:
        path: what `write_plan` wrote.
        device: refuse a plan for another device than this.
        any_kernels: take a plan that was made for other kernels too, to look at.

    Raises:
        DataError: the file cannot be read, is no plan, or was made for other kernels.
        InvalidInput: a field is not allowed, the plan is for another device, or a config is not
            legal for its problem; the error names file, index and field.
    """
    content = read_json(path, "a plan", FORMAT)
    try:
        operation = operation_named(content.get("operation"))
        planned = get_device(_text(content, "device"))
        if device is not None and get_device(device) != planned:
            wanted = get_device(device).key
            raise InvalidInput("device", planned.key, f"{wanted}, the device that is in use")
        model = None if content.get("model") is None else _text(content, "model")
        version = _text(content, "confpred")
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.field}", error.value, error.allowed) from None
    kernels, listed = content.get("kernels"), content.get("choices")
    if not isinstance(kernels, dict) or not all(isinstance(v, str) for v in kernels.values()):
        raise DataError(f'{path}: "kernels" must be an object of texts')
    if not isinstance(listed, list) or not listed:
        raise DataError(f'{path}: "choices" must be a list that is not empty')
    choices: dict[Record, Choice] = {}
    for index, fields in enumerate(listed):
        where = f"{path}: choices[{index}]"
        if not isinstance(fields, dict) or sorted(fields) != sorted(_FIELDS):
            raise DataError(f"{where} must be an object of {', '.join(_FIELDS)}")
        try:
            choice = _choice(fields, operation, planned, model)
        except InvalidInput as error:
            raise InvalidInput(f"{where}.{error.field}", error.value, error.allowed) from None
        if choice.problem in choices:
            raise DataError(f"{where} is of a problem that was chosen for before")
        choices[choice.problem] = choice
    plan = Plan(planned, operation, tuple(choices.values()), kernels, model, version)
    outdated = None if any_kernels else plan.outdated()
    if outdated is not None:
        raise DataError(f"{path} was {outdated}; make it again")
    return plan


def _choice(
    fields: Mapping[str, Any], operation: Operation, device: Device, model: str | None
) -> Choice:
    problem = operation.problem.from_json(fields["problem"])
    candidate = named_candidate(problem, device, fields["provider"], fields["config"])
    source, time_ms = fields["source"], fields["predicted_ms"]
    if source not in get_args(Source):
        raise InvalidInput("source", source, " or ".join(get_args(Source)))
    if time_ms is not None and not (type(time_ms) in (int, float) and 0 <= time_ms < math.inf):
        raise InvalidInput("predicted_ms", time_ms, "null or a number of at least 0")
    return Choice(
        problem,
        device.key,
        source,
        candidate,
        predicted_ms=time_ms,
        model=model if source in ("predicted", "measured") else None,
    )


def _launched(choice: Choice) -> Choice:
    """`choice` as PyTorch's users get it, without what belongs to the answer alone."""
    if choice.is_guess:
        return replace(choice, candidate=PYTORCH_OPERATOR, predicted_ms=None, regret_bound=None)
    return replace(choice, regret_bound=None)


def _specs(choice: Choice) -> list[KernelSpec]:
    family = all_families().get(choice.provider)
    if family is None:
        return []
    return [*family.launch(choice.problem, choice.candidate.config_id).kernels]


def _digests(choices: Iterable[Choice]) -> dict[str, str]:
    sources: dict[str, set[str]] = {}
    for choice in choices:
        family = all_families().get(choice.provider)
        if family is not None:
            launch = family.launch(choice.problem, choice.candidate.config_id)
            found = {kernel.file for kernel in launch.kernels} | {launch.source}
            sources.setdefault(choice.provider, set()).update(found)
    return {name: "+".join(map(identity_of, sorted(some))) for name, some in sources.items()}


def _start(digest: str) -> str:
    """The first characters of each part of a digest, for people."""
    return "+".join(part[:8] for part in digest.split("+"))


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(name, value, "a text that is not empty")
    return value


def _fields(problem: Record) -> dict[str, Any]:
    """A problem's fields, those that have their default left out."""
    default = {f.name: f.default for f in dataclasses.fields(problem)}
    return {k: v for k, v in problem.to_json().items() if getattr(problem, k) != default[k]}

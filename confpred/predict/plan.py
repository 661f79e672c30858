"""A *plan*: choices that are taken as they are, for some layers of a network or for all.

A plan is one file, or a folder with compiled kernels beside it (`confpred.cuda.compiler`)::

    {"format": "confpred-plan/3", "operation": "conv2d", "confpred": "0.1.0",
     "model": "h100-2026.10.01", "kernels": {"grouped_fprop": "4b5c6d7e8f901234"},
     "choices": [{"device": "h100", "problem": {"n": 32, "c": 64, ...},
                  "provider": "grouped_fprop", "config": {"block_n": 1, ...},
                  "source": "predicted", "predicted_ms": 0.0213, "pytorch_ms": 0.0322}, ...]}

A plan written by hand needs ``format`` and ``choices``, of each choice the first four fields, and
of a problem what has not its default. The provider ``pytorch``, with the config ``{}``, is
PyTorch's operator. A choice of another operation than the plan's names it, too. ``kernels`` has the
digest of the CUDA sources that a family's choices launch, several joined by ``+``. Where these have
changed, the plan is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from confpred._version import __version__
from confpred.errors import DataError, InvalidInput, nearest, placed
from confpred.families import registry
from confpred.families.kernel_text import identity_of
from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR, Candidate
from confpred.files import read_json, write_folder, write_whole
from confpred.predict.choice import Choice, Source
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import Device, get_device
from confpred.problem.operation import KernelSpec, Launch, Operation
from confpred.problem.record import Record

FORMAT = "confpred-plan/3"
#: Former formats: a network on one device, pins, and the pins of confpred 0.1.0.
_NETWORK, _PINS, _FIRST_PINS = "confpred-plan/2", "confpred-pins/1", "confpred-plan/1"
_FILE = "plan.json"
_FIELDS = ("choices", "format", "operation", "confpred", "model", "kernels")
_TIMES = ("predicted_ms", "pytorch_ms")
_OF_A_CHOICE = ("device", "problem", "provider", "config", "source", *_TIMES)


@dataclass(frozen=True, slots=True)
class Plan:
    """Choices that are taken as they are.

    Attributes:
        operation: operation of the choices whose lines in a file name none.
        choices: one a problem and device, in the order in which a network first asks.
        kernels: the digest of the sources that a family's choices launch; a family that is not
            named is not compared.
        model: version of the model that predicted them, several joined by blanks, or None.
        confpred: version of the package that made the plan; None where a person did.
    """

    operation: Operation
    choices: tuple[Choice, ...]
    kernels: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    confpred: str | None = None

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the operations of the plan and of its choices."""
        of_choices = (registry.operation_of(choice.problem) for choice in self.choices)
        by_name = {operation.name: operation for operation in (self.operation, *of_choices)}
        return tuple(by_name.values())

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices that the choices are for."""
        return tuple(map(get_device, dict.fromkeys(choice.device for choice in self.choices)))

    @property
    def arch(self) -> str:
        """Return the architecture of the devices, for which kernels are compiled.

        Raises:
            InvalidInput: the devices have several, or there is none.
        """
        archs = sorted({device.arch for device in self.devices})
        if len(archs) != 1:
            allowed = "devices of one architecture, as compiled kernels go along"
            raise InvalidInput("device", " and ".join(archs), allowed)
        return archs[0]

    def specs(self) -> list[KernelSpec]:
        """Return every kernel that the choices launch, once."""
        launches = _launches(self.choices)
        return list(dict.fromkeys(kernel for _, launch in launches for kernel in launch.kernels))

    def outdated(self) -> str | None:
        """Say why the choices are not for the kernels that are installed; None if they are."""
        for provider, now in sorted(_digests(self.choices).items()):
            planned = self.kernels.get(provider, now).split("+")
            if not set(now.split("+")) <= set(planned):
                then, here = ("+".join(d[:8] for d in some) for some in (planned, now.split("+")))
                return (
                    f"made for other kernels of {provider}: their digest is {then}, and that of "
                    f"the installed ones {here}"
                )
        return None


def plan_of(choices: Iterable[Choice]) -> Plan:
    """Make the plan that repeats `choices`; where a problem comes again, its last choice counts.

    A guess that is not launched (`Choice.is_launched`) becomes PyTorch's operator, which runs.

    Raises:
        InvalidInput: there is no choice.
    """
    planned = {(choice.problem, choice.device): _as_launched(choice) for choice in choices}
    if not planned:
        raise InvalidInput("choices", [], "at least one choice")
    operation = registry.operation_of(next(iter(planned))[0])
    models = " ".join(dict.fromkeys(c.model for c in planned.values() if c.model)) or None
    digests = _digests(planned.values())
    return Plan(operation, tuple(planned.values()), digests, models, __version__)


def write_plan(
    path: Path,
    plan: Plan,
    *,
    kernels: Mapping[str, str | bytes] | None = None,
    replace: bool = True,
) -> None:
    """Write `plan`, whole or not at all: a file, or a folder where `kernels` go along, files of
    `confpred.cuda.compiler.compiled_files`. `replace` a file; never a folder that is not empty.

    Raises:
        StorageError: the file system refused, or what exists must not be replaced.
    """
    text = plan_text(plan)
    if kernels is None:
        write_whole(path, lambda file: file.write(text.encode()), replace=replace)
    else:
        write_folder(path, {_FILE: text, **kernels})


def plan_text(plan: Plan) -> str:
    """Return the content of a plan's file: one choice a line, so that versions compare well."""
    head = {
        "format": FORMAT,
        "operation": plan.operation.name,
        "confpred": plan.confpred,
        "model": plan.model,
        "kernels": dict(sorted(plan.kernels.items())),
    }
    listed = (_line(choice, plan.operation) for choice in plan.choices)
    lines = ",\n".join(f"  {json.dumps(line, allow_nan=False)}" for line in listed)
    return f'{json.dumps(head)[:-1]}, "choices": [\n{lines}\n]}}\n'


def plan_file(path: Path) -> Path:
    """Return the file of the plan at `path`, which may be a folder with compiled kernels."""
    return path / _FILE if os.path.isdir(path) else path


def read_plan(path: Path, device: str | Device | None = None, *, any_kernels: bool = False) -> Plan:
    """Read the plan at `path`, a file or a folder, of this format or of a former one.

    Args:
        path: what `write_plan` or a person wrote.
        device: refuse a plan whose choices are all for other devices.
        any_kernels: take a plan that was made for other kernels too, to look at.

    Raises:
        DataError: the file cannot be read, is no plan, or was made for other kernels.
        InvalidInput: a field is not allowed, the plan is for other devices, or a config is not
            legal for its problem; the error names file, index and field.
    """
    path = plan_file(path)
    content = read_json(path, "a plan", FORMAT, _NETWORK, _PINS, _FIRST_PINS)
    name = "pins" if content["format"] in (_PINS, _FIRST_PINS) else "choices"
    if not isinstance(content.get(name), list):
        raise DataError(f'{path}: "{name}" must be a list')
    kernels = content.get("kernels", {})
    if not isinstance(kernels, dict) or not all(isinstance(v, str) for v in kernels.values()):
        raise DataError(f'{path}: "kernels" must be an object of texts')
    with placed(f"{path}: "):
        listed = list(_upgrade_lines(content, content[name]))
        operation = registry.operation_named(content.get("operation", CONVOLUTION.name))
        model, version = _text(content, "model"), _text(content, "confpred")
    choices: dict[tuple[Record, str], Choice] = {}
    for index, fields in enumerate(listed):
        where = f"{path}: {name}[{index}]"
        if not isinstance(fields, dict) or not set(_OF_A_CHOICE[:4]) <= set(fields):
            raise DataError(f"{where} must be an object of {', '.join(_OF_A_CHOICE[:4])}")
        with placed(f"{where}."):
            choice = _choice(fields, operation, model)
        if (choice.problem, choice.device) in choices:
            raise DataError(f"{where} is of the same problem as an earlier choice")
        choices[choice.problem, choice.device] = choice
    plan = Plan(operation, tuple(choices.values()), kernels, model, version)
    if device is not None and choices and get_device(device) not in plan.devices:
        named = " and ".join(target.key for target in plan.devices)
        allowed = f"{get_device(device).key}, the device that is in use"
        raise InvalidInput(f"{path}: device", named, allowed)
    outdated = None if any_kernels else plan.outdated()
    if outdated is not None:
        raise DataError(f"{path} was {outdated}; make it again")
    return plan


def named_candidate(problem: Record, device: Device, name: object, config: object) -> Candidate:
    """Return the candidate of a provider's name and a config's fields, as files spell them.

    Raises:
        InvalidInput: `problem` has no provider `name`, that provider no such config, or the config
            is not legal for `problem` on `device`; the error names the nearest one that is.
    """
    if name == PYTORCH:
        if config != {}:
            raise InvalidInput("config", config, f"{{}} where the provider is {PYTORCH}")
        return PYTORCH_OPERATOR
    families = registry.families_of(problem)
    if not isinstance(name, str) or name not in families:
        raise InvalidInput("provider", name, nearest(name, (PYTORCH, *families)))
    fields = config if isinstance(config, dict) else {}
    order = {field: i for i, field in enumerate(families[name].configs.dtype.names or ())}
    words = " ".join(f"{k}={fields[k]!r}" for k in sorted(fields, key=lambda k: order.get(k, -1)))
    rows, legal = registry.config_ids(name), families[name].legal(problem, device)
    row = rows.get(words)
    if row is not None and legal[row]:
        return Candidate(name, row)
    allowed = f"a config of {name}" if row is None else "one that is legal for the problem"
    alike = {w: len({*w.split()} & {*words.split()}) for w, i in rows.items() if legal[i]}
    near = max(alike, key=alike.__getitem__, default="none")
    raise InvalidInput("config", config, f"{allowed}; the nearest is {near}")


def _upgrade_lines(content: Mapping[str, Any], listed: Iterable[Any]) -> Iterator[Any]:
    """Yield the choices of a plan of any format in the form of ``FORMAT``."""
    if content["format"] == FORMAT:
        _check_names(content, _FIELDS)
    for line in listed:
        if isinstance(line, dict) and content["format"] == _NETWORK:
            line = {"device": content.get("device"), **line}
        if isinstance(line, dict) and content["format"] == _FIRST_PINS:
            line = {"provider" if name == "family" else name: line[name] for name in line}
            if line.get("provider", "") is None and line.get("config", {}) is None:
                line |= {"provider": PYTORCH, "config": {}}  # as null meant there
        yield line


def _check_names(fields: Iterable[str], allowed: tuple[str, ...]) -> None:
    for name in set(fields) - set(allowed):
        raise InvalidInput("field", name, nearest(name, allowed))


def _choice(fields: Mapping[str, Any], operation: Operation, model: str | None) -> Choice:
    _check_names(fields, (*_OF_A_CHOICE, "operation"))
    operation = registry.operation_named(fields.get("operation", operation.name))
    device, problem = get_device(fields["device"]), operation.problem.from_json(fields["problem"])
    candidate = named_candidate(problem, device, fields["provider"], fields["config"])
    source = fields.get("source", "pinned")
    times: dict[str, Any] = {name: fields.get(name) for name in _TIMES}
    if source not in get_args(Source):
        raise InvalidInput("source", source, nearest(source, get_args(Source)))
    for name, value in times.items():
        if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
            raise InvalidInput(name, value, "null or a number of at least 0")
    named = model if source in ("predicted", "measured") else None
    return Choice(problem, device.key, source, candidate, model=named, **times)


def _line(choice: Choice, operation: Operation) -> dict[str, Any]:
    problem, fields = choice.problem, dataclasses.fields(choice.problem)
    default = {field.name: field.default for field in fields}
    default.pop("rank", None)  # a missing one follows from the sizes that are named
    asked = {k: v for k, v in problem.to_json().items() if getattr(problem, k) != default.get(k)}
    config = dict(registry.config_of(choice.candidate))
    named = (choice.device, asked, choice.provider, config, choice.source)
    times = (choice.predicted_ms, choice.pytorch_ms)
    line = dict(zip(_OF_A_CHOICE, (*named, *times), strict=True))
    own = registry.operation_of(problem).name
    return line if own == operation.name else line | {"operation": own}


def _as_launched(choice: Choice) -> Choice:
    """Return `choice` as it runs in PyTorch, without bounds."""
    if not choice.is_launched:
        choice = replace(choice, candidate=PYTORCH_OPERATOR, predicted_ms=None)
    return replace(choice, regret_bound=None, extrapolated=False, donor=None, is_near=False)


def _launches(choices: Iterable[Choice]) -> Iterator[tuple[str, Launch]]:
    for choice in choices:
        family = registry.family_named(choice.provider)
        if family is not None:
            yield choice.provider, family.launch(choice.problem, choice.candidate.config_id)


def _digests(choices: Iterable[Choice]) -> dict[str, str]:
    sources: dict[str, set[str]] = {}
    for provider, launch in _launches(choices):
        files = {kernel.file for kernel in launch.kernels} | {launch.source}
        sources.setdefault(provider, set()).update(files)
    return {name: "+".join(map(identity_of, sorted(some))) for name, some in sources.items()}


def _text(content: Mapping[str, Any], name: str) -> str | None:
    value = content.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidInput(name, value, "null or a text that is not empty")
    return value

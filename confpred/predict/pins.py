"""*Pins*: candidates that the user has fixed, whatever a model would say.

The file is one object::

    {"format": "confpred-pins/1", "operation": "conv2d",
     "pins": [{"device": "h100",
               "problem": {"n": 32, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3,
                           "padding": 1, "groups": 8},
               "provider": "grouped_fprop", "config": {"block_n": 1, "block_q": 56, ...}}, ...]}

The provider ``pytorch``, with the config ``{}``, keeps PyTorch's own operator. ``operation`` may be
left out; a problem's fields are those of its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from confpred.errors import DataError, InvalidInput
from confpred.families.candidate import PYTORCH, PYTORCH_OPERATOR, Candidate
from confpred.families.protocol import ABSENT, Family
from confpred.families.registry import families_of, operation_named
from confpred.files import read_json
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record

FORMAT = "confpred-pins/1"
#: What confpred 0.1.0 wrote: ``family`` for ``provider``, and null for PyTorch's own operator.
FORMER = "confpred-plan/1"
_FIELDS = ("device", "problem", "provider", "config")


def read_pins(path: Path) -> dict[tuple[Record, Device], Candidate]:
    """The pins in the file at `path`.

    Raises:
        DataError: the file cannot be read or holds no pins.
        InvalidInput: a field is not allowed, or a pin's config is not legal for its problem; the
            error names file, index and field.
    """
    content = read_json(path, "a file of pins", FORMAT, FORMER)
    if not isinstance(content.get("pins"), list):
        raise DataError(f'{path}: "pins" must be a list')
    try:
        kind = operation_named(content.get("operation", CONVOLUTION.name)).problem
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.field}", error.value, error.allowed) from None
    pins: dict[tuple[Record, Device], Candidate] = {}
    for index, fields in enumerate(content["pins"]):
        where = f"{path}: pins[{index}]"
        if content["format"] == FORMER and isinstance(fields, dict):
            fields = _renamed(fields)
        if not isinstance(fields, dict) or sorted(fields) != sorted(_FIELDS):
            raise DataError(f"{where} must be an object of {', '.join(_FIELDS)}")
        try:
            key, candidate = _pin(fields, kind)
        except InvalidInput as error:
            raise InvalidInput(f"{where}.{error.field}", error.value, error.allowed) from None
        if key in pins:
            raise DataError(f"{where} pins a problem for the second time")
        pins[key] = candidate
    return pins


def _renamed(former: Mapping[str, Any]) -> dict[str, Any]:
    """A pin of `FORMER` as one of ``FORMAT``."""
    fields = {"provider" if name == "family" else name: former[name] for name in former}
    if fields.get("provider", "") is None and fields.get("config", {}) is None:
        fields |= {"provider": PYTORCH, "config": {}}
    return fields


def _pin(fields: Mapping[str, Any], kind: type[Record]) -> tuple[tuple[Record, Device], Candidate]:
    device, problem = get_device(fields["device"]), kind.from_json(fields["problem"])
    candidate = named_candidate(problem, device, fields["provider"], fields["config"])
    return (problem, device), candidate


def named_candidate(problem: Record, device: Device, name: object, config: object) -> Candidate:
    """The candidate that files call by its provider's name and its config, field by field.

    Raises:
        InvalidInput: `problem` has no provider `name`, that provider no such config, or the config
            is not legal for `problem` on `device`.
    """
    if name == PYTORCH:
        if config != {}:
            raise InvalidInput("config", config, f"{{}} where the provider is {PYTORCH}")
        return PYTORCH_OPERATOR
    families = families_of(problem)
    if not isinstance(name, str) or name not in families:
        raise InvalidInput("provider", name, f"{PYTORCH} or {' or '.join(families)}")
    row = _row_of(families[name], config)
    if row is None:
        raise InvalidInput("config", config, f"a config of {name}, each field an integer")
    if not families[name].legal(problem, device)[row]:
        raise InvalidInput("config", config, "a config that is legal for the problem")
    return Candidate(name, row)


def _row_of(family: Family, config: object) -> int | None:
    """The row of the family's table that `config` spells out, if there is one. A field that the row
    does not have is not spelled out either (`confpred.families.protocol.config_dict`)."""
    names = family.configs.dtype.names or ()
    if not isinstance(config, dict) or not set(config) <= set(names):
        return None
    if not all(type(value) is int and value != ABSENT for value in config.values()):
        return None
    wanted = {name: config.get(name, ABSENT) for name in names}
    equal = np.logical_and.reduce([family.configs[name] == wanted[name] for name in names])
    rows = np.flatnonzero(equal)
    return int(rows[0]) if len(rows) else None

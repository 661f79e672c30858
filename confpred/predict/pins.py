"""A *plan*: configs that the user has pinned, whatever a model would say.

The file is one object::

    {"format": "confpred-plan/1", "operation": "conv2d",
     "pins": [{"device": "h100",
               "problem": {"n": 32, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3,
                           "padding": 1, "groups": 8},
               "family": "grouped_fprop", "config": {"block_n": 1, "block_q": 56, ...}}, ...]}

A pin whose ``family`` and ``config`` are null keeps PyTorch's own operator. ``operation`` may be
left out; a problem's fields are those of its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from confpred.errors import DataError, InvalidInput
from confpred.families.protocol import Family
from confpred.families.registry import families_of, operation_named
from confpred.files import read_json
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record

FORMAT = "confpred-plan/1"
_FIELDS = ("device", "problem", "family", "config")


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned config: the row of a family's table, or None and None for PyTorch's operator."""

    family: str | None
    row: int | None


def read_plan(path: Path) -> dict[tuple[Record, Device], Pin]:
    """The pins in the file at `path`.

    Raises:
        DataError: the file cannot be read or is not a plan.
        InvalidInput: a field is not allowed, or a pin's config is not legal for its problem; the
            error names file, index and field.
    """
    content = read_json(path, "a plan", FORMAT)
    if not isinstance(content.get("pins"), list):
        raise DataError(f'{path}: "pins" must be a list')
    try:
        kind = operation_named(content.get("operation", CONVOLUTION.name)).problem
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.field}", error.value, error.allowed) from None
    plan: dict[tuple[Record, Device], Pin] = {}
    for index, fields in enumerate(content["pins"]):
        where = f"{path}: pins[{index}]"
        if not isinstance(fields, dict) or sorted(fields) != sorted(_FIELDS):
            raise DataError(f"{where} must be an object of {', '.join(_FIELDS)}")
        try:
            key, pin = _pin(fields, kind)
        except InvalidInput as error:
            raise InvalidInput(f"{where}.{error.field}", error.value, error.allowed) from None
        if key in plan:
            raise DataError(f"{where} pins a problem for the second time")
        plan[key] = pin
    return plan


def _pin(fields: Mapping[str, Any], kind: type[Record]) -> tuple[tuple[Record, Device], Pin]:
    device, problem = get_device(fields["device"]), kind.from_json(fields["problem"])
    name, config = fields["family"], fields["config"]
    if name is None:
        if config is not None:
            raise InvalidInput("config", config, "null where family is null")
        return (problem, device), Pin(None, None)
    families = families_of(problem)
    if not isinstance(name, str) or name not in families:
        raise InvalidInput("family", name, f"null or {' or '.join(families)}")
    row = _row_of(families[name], config)
    if row is None:
        raise InvalidInput("config", config, f"a config of {name}, each field an integer")
    if not families[name].legal(problem, device)[row]:
        raise InvalidInput("config", config, "a config that is legal for the problem")
    return (problem, device), Pin(name, row)


def _row_of(family: Family, config: object) -> int | None:
    """The row of the family's table that `config` spells out, if there is one."""
    names = family.configs.dtype.names or ()
    if not isinstance(config, dict) or sorted(config) != sorted(names):
        return None
    if not all(type(value) is int for value in config.values()):
        return None
    equal = np.logical_and.reduce([family.configs[name] == config[name] for name in names])
    rows = np.flatnonzero(equal)
    return int(rows[0]) if len(rows) else None

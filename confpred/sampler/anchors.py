"""*Anchors*: a few configs that every run measures again on every GPU.

What a config takes differs between GPUs of one kind, and between the days on which one was lent.
The same few configs in every run tell by how much (`confpred.training.dataset`). Their rows lie in
shards of their own, and no model learns from them. The file is one object::

    {"format": "confpred-anchors/1", "anchors": [
      {"problem": {"n": 32, "c": 128, ...}, "family": "grouped_fprop", "config": "block_n=1 ..."},
      ...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from confpred.errors import DataError, InvalidInput, InvalidProblem
from confpred.families.kernel_text import identity_of
from confpred.families.registry import all_families, config_ids
from confpred.files import read_json
from confpred.problem.device import Device
from confpred.sampler.tasks import Task

FORMAT = "confpred-anchors/1"
MAX_ANCHORS = 32


def read_anchors(path: Path, device: Device) -> tuple[Task, ...]:
    """The anchors in the file at `path`, a task each.

    Raises:
        DataError: the file cannot be read, is not one of anchors, or holds none or too many.
        InvalidInput: it names a family or a config that this version does not have, or a config
            that is not legal on `device`.
        InvalidProblem: a problem's field is not allowed.
    """
    anchors = read_json(path, "a file of anchors", FORMAT).get("anchors")
    if not isinstance(anchors, list) or not 1 <= len(anchors) <= MAX_ANCHORS:
        raise DataError(f'{path}: "anchors" must be a list of 1 to {MAX_ANCHORS} anchors')
    return tuple(_task(f"{path}: anchors[{i}]", each, device) for i, each in enumerate(anchors))


def _task(where: str, fields: object, device: Device) -> Task:
    if not isinstance(fields, Mapping) or not isinstance(fields.get("problem"), Mapping):
        raise DataError(f"{where} must be an object of a problem, a family and a config")
    name, words = fields.get("family"), fields.get("config")
    if not isinstance(name, str) or name not in all_families():
        raise InvalidInput(f"{where}.family", name, " or ".join(all_families()))
    family = all_families()[name]
    try:
        problem = family.operation.problem.from_json(dict(fields["problem"]))
    except InvalidProblem as error:
        raise InvalidProblem(f"{where}.{error.field}", error.value, error.allowed) from None
    row = config_ids(name).get(words) if isinstance(words, str) else None
    if row is None or not family.legal(problem, device)[row]:
        allowed = f"a config of {name} that is legal for the problem on {device.key}"
        raise InvalidInput(f"{where}.config", words, allowed)
    digest = identity_of(family.launch(problem, row).source)
    return Task(problem, (), name, digest, (row,), anchor=True)

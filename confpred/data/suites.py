"""A *suite*: a list of problems in a JSON file, each with the networks that it comes from.

    {"format": "confpred-suite/1", "name": "resnext", "operation": "conv2d",
     "problems": [{"n": 32, "c": 128, "h": 56, "w": 56, "k": 128, "r": 3, "s": 3, "padding": 1,
                   "groups": 32, "networks": ["resnext50_32x4d"]}, ...]}

A problem's fields are those of the operation's record; ``operation`` and ``networks`` may be left
out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confpred.errors import DataError, InvalidInput, placed
from confpred.families.registry import all_operations, operation_of
from confpred.files import raising, read_json, write_whole
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.operation import Operation
from confpred.problem.record import Record

FORMAT = "confpred-suite/1"
MAX_PROBLEMS = 100_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One problem, and the names of the networks that have it; none for a coverage problem."""

    problem: Record
    networks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Suite:
    """A named list of problems of one operation."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def networks(self) -> dict[Record, tuple[str, ...]]:
        """The distinct problems, each with the networks of all its entries."""
        networks: dict[Record, tuple[str, ...]] = {}
        for entry in self.entries:
            before = networks.get(entry.problem, ())
            networks[entry.problem] = tuple(dict.fromkeys(before + entry.networks))
        return networks


def read_suite(path: Path) -> Suite:
    """Return the suite in the file at `path`.

    Raises:
        DataError: the file cannot be read, is not a suite, or holds no or too many problems.
        InvalidProblem: a problem's field is not allowed; the error names file, index and field.
    """
    content = read_json(path, "a problem suite", FORMAT)
    name, problems = content.get("name"), content.get("problems")
    if not isinstance(name, str) or not name:
        raise DataError(f'{path}: "name" must be a text that is not empty')
    operation = content.get("operation", CONVOLUTION.name)
    if not isinstance(operation, str) or operation not in all_operations():
        names = " or ".join(all_operations())
        raise DataError(f'{path}: "operation" must be {names}, not {operation!r}')
    if not isinstance(problems, list) or not 1 <= len(problems) <= MAX_PROBLEMS:
        raise DataError(f'{path}: "problems" must be a list of 1 to {MAX_PROBLEMS} problems')
    kind = all_operations()[operation].problem
    return Suite(name, tuple(_entry(path, i, fields, kind) for i, fields in enumerate(problems)))


def read_shapes(path: Path, operation: Operation) -> Suite:
    """Return the calls of a kernel in the file at `path`: a JSON list of objects of fields, or one
    object a line, as ``CONFPRED_RECORD`` writes them. Calls of another ``kernel`` are left out.

    Raises:
        DataError: the file cannot be read, is no such list, or holds no or too many calls.
        InvalidProblem: a call's field is not allowed; the error names file, index and field.
    """
    with raising(DataError, f"read {path}"):
        content = path.read_bytes()
    try:
        is_lines = content.lstrip().startswith(b"{")
        shapes = [*map(json.loads, content.splitlines())] if is_lines else json.loads(content)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(shapes, list) or not 1 <= len(shapes) <= MAX_PROBLEMS:
        raise DataError(f"{path} must hold a list of 1 to {MAX_PROBLEMS} objects")
    calls = []
    for index, fields in enumerate(shapes):
        values = dict(fields) if isinstance(fields, dict) else fields
        if values is fields or values.pop("kernel", operation.name) == operation.name:
            calls.append(_entry(path, index, values, operation.problem).problem)
    if not calls:
        raise DataError(f"{path} holds no call of {operation.name}")
    return suite_of_calls(path.stem, calls)


def suite_of_calls(name: str, calls: Iterable[Record]) -> Suite:
    """Return a suite of calls of a kernel. Each is a network of its own, so that a model is judged
    on sizes that it has not seen."""
    distinct = dict.fromkeys(calls)
    return Suite(name, tuple(Entry(call, (str(call.layer()),)) for call in distinct))


def join(suites: Sequence[Suite]) -> Suite:
    """Return one suite of the problems of several, in their order.

    Raises:
        InvalidInput: the suites are of different operations.
    """
    entries = tuple(entry for suite in suites for entry in suite.entries)
    kinds = {type(entry.problem).__name__ for entry in entries}
    if len(kinds) > 1:
        raise InvalidInput("suite", sorted(kinds), "suites of one operation")
    return Suite("+".join(suite.name for suite in suites), entries)


def write_suite(suite: Suite, path: Path) -> None:
    """Write `suite` to `path`, one problem a line so that versions compare well.

    Raises:
        StorageError: the file system refused.
    """
    lines = ",\n".join(
        "  " + json.dumps(_fields(entry.problem) | {"networks": list(entry.networks)})
        for entry in suite.entries
    )
    names = {"format": FORMAT, "name": suite.name}
    if (operation := operation_of(suite.entries[0].problem)) is not CONVOLUTION:
        names["operation"] = operation.name
    head = f'{json.dumps(names)[:-1]}, "problems": [\n'
    write_whole(path, lambda file: file.write(f"{head}{lines}\n]}}\n".encode()))


def _fields(problem: Record) -> dict[str, Any]:
    """Return a problem's fields; a list of equal members becomes one integer."""
    return {
        name: value[0] if isinstance(value, list) and len(set(value)) == 1 else value
        for name, value in problem.to_json().items()
    }


def _entry(path: Path, index: int, fields: object, kind: type[Record]) -> Entry:
    """Return the entry of one element of ``problems``; DataError names the file and the element."""
    where = f"{path}: problems[{index}]"
    if not isinstance(fields, Mapping):
        names = ", ".join([f.name for f in dataclasses.fields(kind)][:5])
        raise DataError(f"{where} must be an object of fields such as {names}")
    networks = fields.get("networks", [])
    if not isinstance(networks, list) or not all(
        isinstance(name, str) and name and "," not in name for name in networks
    ):
        raise DataError(f"{where}.networks must be a list of names without commas")
    with placed(f"{where}."):
        problem = kind.from_json({k: v for k, v in fields.items() if k != "networks"})
    return Entry(problem, tuple(networks))

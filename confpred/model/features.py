"""How a model recognises the features that it was trained on.

A model's trees know a feature by its column alone. If its formula or the order of an enumeration
changes, the trees still answer, but wrongly. So a model's card holds a digest of the features of a
few examples; if it comes out differently today, that is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.errors import ModelError
from confpred.families.batch import ProblemBatch
from confpred.families.protocol import Batched, Family
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record

_ROWS = 4  # configs of an example


def examples_of(problems: Iterable[Record]) -> list[Record]:
    """A few of `problems` that together have every text and truth value that any of them has,
    because these values become numbers by their place in a list."""
    chosen: list[Record] = []
    met: set[tuple[str, object]] = set()
    for problem in sorted(set(problems), key=str):
        values = {
            (field.name, value)
            for field in dataclasses.fields(problem)
            if isinstance(value := getattr(problem, field.name), (str, bool))
        }
        if not values <= met:
            met |= values
            chosen.append(problem)
    return chosen


def operation_features(
    operation: Operation, problems: Sequence[Record], device: Device
) -> NDArray[np.float32]:
    """The features of each problem that all its kernels share. They are kept, as several regressors
    take them."""
    asked: Any = operation  # which can be hashed, though its protocol does not say so
    rows = [_operation_features(asked, problem, device) for problem in problems]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


@lru_cache(maxsize=256)
def _operation_features(operation: Any, problem: Record, device: Device) -> NDArray[np.float32]:
    features: NDArray[np.float32] = operation.features(problem, device)
    features.setflags(write=False)
    return features


def family_card(
    family: Family, device: Device, examples: Sequence[tuple[Record, Sequence[int]]]
) -> dict[str, Any]:
    """What a card holds of a family's features.

    Args:
        family: whose features.
        device: the device that the features are for.
        examples: problems, and legal rows of the config table for each.
    """
    few = [(problem, list(rows[:: -(-len(rows) // _ROWS)])) for problem, rows in examples]
    return {
        "examples": [{"problem": str(problem), "rows": rows} for problem, rows in few],
        "digest": _family_digest(family, device, few),
    }


def check_family(folder: Path, family: Family, device: Device, card: Any) -> None:
    """Check that `family_card` gives today what the `card` of the model in `folder` says.

    Raises:
        ModelError: it does not.
    """
    parse = family.operation.problem.parse
    examples = [(parse(entry["problem"]), entry["rows"]) for entry in card["examples"]]
    _compare(folder, family.name, _family_digest(family, device, examples), card["digest"])


def operation_card(
    operation: Operation, device: Device, examples: Sequence[Record]
) -> dict[str, Any]:
    """What a card holds of the features that PyTorch's time is predicted from."""
    return {
        "examples": [str(problem) for problem in examples],
        "digest": _operation_digest(operation, device, examples),
    }


def check_operation(folder: Path, operation: Operation, device: Device, card: Any) -> None:
    """Check that `operation_card` gives today what the `card` of the model in `folder` says.

    Raises:
        ModelError: it does not.
    """
    examples = map(operation.problem.parse, card["examples"])
    _compare(folder, operation.name, _operation_digest(operation, device, examples), card["digest"])


def _family_digest(
    family: Family, device: Device, examples: Sequence[tuple[Record, Sequence[int]]]
) -> str:
    problems = [problem for problem, _ in examples]
    rows = [np.array(rows, np.intp) for _, rows in examples]
    if isinstance(family, Batched) and problems:  # the same matrices, one below the other
        index = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        together = ProblemBatch(problems).at(index)
        return _digest([family.features(together, device, np.concatenate(rows))])
    return _digest(family.features(p, device, each) for p, each in zip(problems, rows, strict=True))


def _operation_digest(operation: Operation, device: Device, examples: Iterable[Record]) -> str:
    return _digest(operation.features(problem, device) for problem in examples)


def _compare(folder: Path, name: str, found: str, trained: object) -> None:
    if found != trained:
        raise ModelError(
            f"{folder}: the features of {name} are computed otherwise than when the model was "
            f"trained (their digest is {found}, and was {trained}): train it again"
        )


def _digest(matrices: Iterable[NDArray[np.float32]]) -> str:
    """16 hex digits of the SHA-256 of the features to five digits, because the last bits of a
    logarithm depend on the processor."""
    state = hashlib.sha256()
    for matrix in matrices:
        state.update(("%.5g " * matrix.size % tuple(matrix.ravel().tolist())).encode())
    return state.hexdigest()[:16]

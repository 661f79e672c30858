"""An *assignment*: a problem and the candidate that is to compute it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import family_of, operation_named, operation_of
from confpred.problem.operation import Launch
from confpred.problem.record import Record

#: Texts whose meaning is remembered.
MOST_READ = 65_536


class Chosen(Protocol):
    """A problem with the candidate that was chosen for it, such as a `Choice`."""

    @property
    def problem(self) -> Record: ...
    @property
    def candidate(self) -> Candidate: ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """A problem and the candidate that is to compute it, without the reasons. Its hash is worked
    out once, as each launch looks its assignment up."""

    problem: Record
    candidate: Candidate = PYTORCH_OPERATOR
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.problem, self.candidate)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Assignment, (self.problem, self.candidate)  # another process has other hashes

    @classmethod
    def of(cls, choice: Chosen) -> Assignment:
        """Return a choice without its times and its source."""
        return cls(choice.problem, choice.candidate)

    @property
    def launch(self) -> Launch:
        """How the candidate, which is a config of a family, computes the problem."""
        return family_of(self.candidate).launch(self.problem, self.candidate.config_id)

    def to_json(self) -> list[Any]:
        """Return JSON's types, which `from_json` reads; values go by position, as texts that an
        operator is given should be short."""
        values = list(self.problem.to_json().values())
        operation = operation_of(self.problem).name
        return [operation, values, self.candidate.provider, self.candidate.config_id]

    @staticmethod
    def from_json(facts: list[Any]) -> Assignment:
        """Return the assignment of `to_json`."""
        operation, values, *candidate = facts
        return Assignment(operation_named(operation).problem(*values), Candidate(*candidate))

    def text(self) -> str:
        """Return one text, which `read` reads: a dispatcher takes time for each argument."""
        return text_of(self.to_json())

    @staticmethod
    @lru_cache(MOST_READ)
    def read(text: str) -> Assignment:
        """Return the assignment whose `text` this is."""
        return Assignment.from_json(json.loads(text))


def text_of(facts: Any) -> str:
    """Return JSON's types as one short text."""
    return json.dumps(facts, separators=(",", ":"))

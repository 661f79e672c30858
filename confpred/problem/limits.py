"""Limits that a caller sets on choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confpred.errors import InvalidInput
from confpred.problem.operation import Launch
from confpred.problem.record import Record

#: Relative error in the 2-norm, against float64, of sums in float32 that are rounded to the dtype
#: once or twice, as in confpred's kernels and cuBLAS. The largest of confpred's kernels in
#: ``datasets/h200`` are 3.0e-4, 1.8e-3 and 9e-7. A library's plan has `LibraryPlan.error`.
ORDINARY_ERROR: Mapping[str, float] = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 2e-6}
#: The same where float32 inputs are rounded to TF32.
TF32_ERROR = 6e-4
_MOST_BYTES = 2**63 - 1
#: JSON schema of each limit.
SCHEMA: Mapping[str, Mapping[str, Any]] = {
    "workspace_bytes": {"type": ["integer", "null"], "minimum": 0, "maximum": _MOST_BYTES},
    "deterministic": {"type": "boolean", "default": False},
    "tf32": {"type": "boolean", "default": True},
    "max_error": {"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 1},
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the workspace and the error of a choice. By default, everything that is as exact
    as PyTorch's operator is allowed.

    PyTorch's operator is never refused: PyTorch's own switches set its workspace and whether it
    repeats to the bit.

    Attributes:
        workspace_bytes: most device memory beside the operands that a launch may need; None for
            any amount.
        deterministic: whether the result must be the same to the bit at every call.
        tf32: whether float32 inputs may be rounded to TF32.
        max_error: largest relative error of an output in the 2-norm, against float64; None for that
            of PyTorch's own operator. Only algorithms that compute another sum, such as Strassen's,
            are less exact than that.

    Raises:
        InvalidInput: a value is out of range.
    """

    workspace_bytes: int | None = None
    deterministic: bool = False
    tf32: bool = True
    max_error: float | None = None

    def __post_init__(self) -> None:
        size, error = self.workspace_bytes, self.max_error
        if size is not None and (type(size) is not int or not 0 <= size <= _MOST_BYTES):
            raise InvalidInput("workspace_bytes", size, "a number of bytes, 0 or more, or null")
        for name in ("deterministic", "tf32"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(name, getattr(self, name), "true or false")
        if error is not None and (
            isinstance(error, bool) or not isinstance(error, (int, float)) or not 0 < error < 1
        ):
            raise InvalidInput("max_error", error, "a relative error between 0 and 1, or null")

    @classmethod
    def from_json(cls, value: object) -> Limits:
        """Return the limits that a JSON object of some of the attributes names.

        Raises:
            InvalidInput: `value` is no such object.
        """
        fields = cls.__dataclass_fields__
        if not isinstance(value, dict) or not set(value) <= set(fields):
            raise InvalidInput("limits", value, f"an object of {', '.join(fields)}")
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __and__(self, other: Limits) -> Limits:
        """Return limits that keep within both; one that only one of them sets is that one's."""
        if other is UNLIMITED:  # at nearly every launch
            return self

        def least(name: str) -> Any:
            values = [getattr(self, name), getattr(other, name)]
            return min((value for value in values if value is not None), default=None)

        return Limits(
            least("workspace_bytes"),
            self.deterministic or other.deterministic,
            self.tf32 and other.tf32,
            least("max_error"),
        )

    def allow(self, problem: Record, launch: Launch) -> bool:
        """Return whether `launch`, which computes `problem`, keeps within the limits. The workspace
        of a library's plan counts as 0 until the plan is built."""
        if self.workspace_bytes is not None and launch.workspace_bytes > self.workspace_bytes:
            return False
        if launch.tf32 and not self.tf32:
            return False
        ordinary = TF32_ERROR if launch.tf32 else ORDINARY_ERROR[problem.dtype]
        if launch.plan is not None and launch.plan.error is not None:
            ordinary = launch.plan.error
        error = ordinary if launch.error is None else launch.error
        return error <= (ordinary if self.max_error is None else self.max_error)


#: No limits.
UNLIMITED = Limits()

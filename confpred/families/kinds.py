"""What of a layer its compiled kernels depend on.

Sizes are given to kernels at run time, and what changes the inner loop is compiled in. So all
layers of a *kind* share their kernels, and what the compiler made of one is known for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from confpred.problem.conv2d import Problem


class Kind(NamedTuple):
    """The fields of a problem that a kernel may be compiled for; names as in `Problem`."""

    direction: str
    dtype: str
    r: int
    s: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    group_width: int
    multiplier: int
    bias: bool
    activation: str
    residual: bool

    @classmethod
    def of(cls, problem: Problem) -> Kind:
        """The kind of `problem`."""
        p = problem
        return cls(
            p.direction, p.dtype, p.r, p.s, p.stride, p.dilation, p.group_width, p.k // p.c,
            p.bias, p.activation, p.residual,
        )  # fmt: skip

    def __str__(self) -> str:
        epilogue = "+".join(
            name for name, has in (("bias", self.bias), ("residual", self.residual)) if has
        )
        (up, across), (tall, wide) = self.stride, self.dilation
        return (
            f"{self.direction} {self.dtype} {self.r}x{self.s} stride {up}x{across} "
            f"dilation {tall}x{wide} width {self.group_width} x{self.multiplier} "
            f"{self.activation} {epilogue or 'plain'}"
        )

    def stand_ins(self) -> tuple[Kind, ...]:
        """Kinds whose kernels are most like its own, the best first: with less of an epilogue, then
        of the other dtype of that size."""
        fewer = (
            self,
            self._replace(activation="none"),
            self._replace(activation="none", bias=False, residual=False),
        )
        other = {"float16": "bfloat16", "bfloat16": "float16"}.get(self.dtype)
        found = fewer if other is None else (*fewer, *(k._replace(dtype=other) for k in fewer))
        return tuple(dict.fromkeys(found))[1:]

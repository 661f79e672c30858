"""Batch norm with its activation: the normalisation of channels-last activations by the statistics
of each channel, what is added to it, and the activation after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from confpred.errors import InvalidProblem
from confpred.problem.activation import (
    ACTIVATIONS,
    activated,
    activation_feature,
    activation_macro,
    argument_grad,
    saved_of,
)
from confpred.problem.conv2d import DTYPES, dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import REFERENCE, KernelSpec, Operand, Step
from confpred.problem.record import Record

if TYPE_CHECKING:
    import torch

DIRECTIONS = ("forward", "backward")
#: Most rows (images times pixels): kernels count them, and a step beyond them, in 32 bits.
MOST_ROWS = 2**30
#: PyTorch's defaults, which the operands ``eps`` and ``momentum`` hold where they are made up.
EPS, MOMENTUM = 1e-5, 0.1


@dataclass(frozen=True, slots=True)
class OfActivations(Record):
    """Base of the problems of norms: the properties that do not depend on what statistics are taken
    of."""

    if TYPE_CHECKING:

        @property
        def c(self) -> int: ...
        @property
        def activation(self) -> str: ...
        @property
        def residual(self) -> bool: ...
        @property
        def direction(self) -> str: ...

    def __post_init__(self) -> None:
        Record.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.residual and self.is_backward and self.activation == "none":
            raise InvalidProblem("residual", True, "false in direction backward and no activation")

    @property
    def rows(self) -> int:
        """Pixels of all samples."""
        raise NotImplementedError

    @property
    def is_read_once(self) -> bool:
        """Whether the output can be written without reading the input a second time."""
        raise NotImplementedError

    @property
    def is_backward(self) -> bool:
        return self.direction == "backward"

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the activations."""
        return self.itemsize * self.rows * self.c

    @property
    def tensors(self) -> int:
        """How many tensors of the activations' shape are read or written."""
        if self.is_backward:
            return 5 if self.residual else 3
        return 3 if self.residual else 2

    @property
    def passes(self) -> int:
        """Tensors that cross device memory if none fits into a cache, each counted as often as it
        does. Nothing can be written before statistics of the whole input are computed, so it is
        read twice. Backward reads two tensors again; with a residual, the first pass wrote one of
        them."""
        return self.tensors + (0 if self.is_read_once else 1 + self.is_backward)

    @property
    def flops(self) -> int:
        """Additions and multiplications, those of the activation left out."""
        return self.rows * self.c * (12 if self.is_backward else 6)

    @property
    def kind(self) -> str:
        return f"{self.direction} {self.grouping}"


@dataclass(frozen=True, slots=True)
class BatchNorm(OfActivations):
    """``out = activation((in - mean) / sqrt(variance + eps) * weight + bias + residual)``, with the
    mean and variance of each channel; or the gradients of that.

    Attributes:
        n, h, w, c: batch, height, width and channels of the activations.
        dtype: of the activations and their gradients. Statistics, weight, bias and the gradients of
            the two are in float32.
        activation: applied last.
        residual: a tensor of the activations' shape is added before the activation. In direction
            backward without an activation it changes nothing, and is refused.
        direction: ``forward``, or ``backward``: gradients of all inputs from that of the output.
        affine: there are a weight and a bias.
        frozen: mean and variance are the running ones, which stay as they are.

    Raises:
        InvalidProblem: a field is out of range, there is a single row to take statistics of, or
            there are more than ``MOST_ROWS``.
    """

    LIMITS: ClassVar[Mapping[str, tuple[int, int]]] = dict.fromkeys("nhwc", (1, 65_536))
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dtype": DTYPES,
        "activation": ACTIVATIONS,
        "direction": DIRECTIONS,
    }

    n: int
    h: int
    w: int
    c: int
    dtype: str = "float16"
    activation: str = "none"
    residual: bool = False
    direction: str = "forward"
    affine: bool = True
    frozen: bool = False

    def __post_init__(self) -> None:
        OfActivations.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.rows > MOST_ROWS:
            raise InvalidProblem("n", self.n, f"n * h * w of at most {MOST_ROWS}")
        if self.rows == 1 and not self.frozen:
            raise InvalidProblem("n", self.n, "more than one value a channel, unless frozen")

    def layer(self) -> BatchNorm:
        """Return the problem with fixed values for all that a user chooses: batch, dtype,
        direction."""
        return BatchNorm(2, self.h, self.w, self.c)

    @property
    def rows(self) -> int:
        """Values of each channel."""
        return self.n * self.h * self.w

    @property
    def is_read_once(self) -> bool:
        return self.frozen

    @property
    def statistics(self) -> tuple[str, str]:
        """Operands from which a normalised value is computed."""
        return ("running_mean", "running_var") if self.frozen else ("mean", "invstd")

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must cross device memory: every operand read or written once."""
        return self.tensors * self.tensor_bytes + 4 * self.c * 4

    @property
    def grouping(self) -> str:
        return "norm"


_ROW_THREADS, _COLUMN_THREADS = 32, 32  # of the reference's blocks


class BatchNorms:
    """Operands: ``in``, ``out``, ``residual``, ``in_grad``, ``out_grad`` and ``residual_grad`` of
    (n, h, w, c); ``weight`` and ``bias``, their gradients and the statistics, of (c); and ``eps``
    and ``momentum``, one number each, in device memory as a momentum may differ from step to step.

    Forward returns ``mean`` and ``invstd`` (1 over the root of variance and eps), which backward
    takes, and the running statistics' new values. They may be written to where the old ones are.
    """

    name = "batch_norm"
    problem: type[Record] = BatchNorm
    feature_names: tuple[str, ...] = (
        "log_rows", "log_channels", "align_c", "dtype", "activation", "residual", "backward",
        "affine", "frozen", "log_bytes", "log_tensor", "l2_share", "log_roofline",
    )  # fmt: skip

    def operands(self, problem: BatchNorm) -> tuple[Operand, ...]:
        p, image, channels = problem, (problem.n, problem.h, problem.w, problem.c), (problem.c,)

        def images(names: tuple[str, ...], terms: int = 0) -> list[Operand]:
            return [Operand(name, image, p.dtype, terms) for name in names]

        def vectors(names: tuple[str, ...], terms: int = 0) -> list[Operand]:
            return [Operand(name, channels, "float32", terms) for name in names]

        affine, more = ("weight", "bias") if p.affine else (), ("residual",) if p.residual else ()
        running = [
            Operand("running_mean", channels, "float32"),
            Operand("running_var", channels, "float32", scale=0.75, center=1.0),
        ]
        eps = Operand("eps", (1,), "float32", scale=0.0, center=EPS)
        if p.is_backward:
            gradients = tuple(f"{name}_grad" for name in ("in", *more))
            saved = [*running, eps] if p.frozen else vectors(p.statistics)
            return (
                *images(gradients, p.rows),
                *vectors(tuple(f"{name}_grad" for name in affine), p.rows),
                *images(("out_grad", "in", *more)),
                *vectors(affine),
                *saved,
            )
        made = () if p.frozen else ("mean", "invstd", "new_running_mean", "new_running_var")
        momentum = Operand("momentum", (1,), "float32", scale=0.0, center=MOMENTUM)
        return (
            *images(("out",), 1),
            *vectors(made, 1),
            *images(("in", *more)),
            *vectors(affine),
            *running,
            eps,
            *(() if p.frozen else (momentum,)),
        )

    def features(self, problem: BatchNorm, device: Device) -> NDArray[np.float32]:
        """Return the features. Logarithms are to base 2; `l2_share` is the activations' share of
        the L2 cache."""
        p = problem
        sizes = (p.rows, p.c, p.minimum_bytes, p.tensor_bytes, device.roofline_s(p))
        rows, channels, moved, tensor, roofline = np.log2(np.array(sizes, np.float64)).tolist()
        row = (
            rows, channels, min(p.c & -p.c, 64), DTYPES.index(p.dtype),
            activation_feature(p.activation), p.residual, p.is_backward, p.affine, p.frozen,
            moved, tensor, p.tensor_bytes / device.l2_bytes, roofline,
        )  # fmt: skip
        return np.array([row], np.float32)

    def reference(self, problem: BatchNorm, output: str) -> Step:
        p = problem
        inputs: tuple[str, ...] = ("in", "weight", "bias", "residual", "running_mean")
        inputs = (*inputs, "running_var", "eps", "momentum")
        if p.is_backward:
            inputs = ("out_grad", "in", "weight", "bias", "residual", *p.statistics, "eps")
        entry = f"reference_batch_norm{'_backward' if p.is_backward else ''}"
        defines = (dtype_macro(p), activation_macro(p.activation), ("FROZEN", int(p.frozen)))
        return Step(
            KernelSpec("reference_norm.cu", entry, defines),
            grid=(-(-p.c // _COLUMN_THREADS), 1, 1),
            block=(_COLUMN_THREADS, _ROW_THREADS, 1),
            smem_bytes=0,
            operands=(REFERENCE, *inputs),
            scalars={"rows": p.rows, "channels": p.c, "output": _OUTPUTS.index(output)},
        )

    def prepared(
        self, problem: BatchNorm, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return `tensors`, and the tensors that PyTorch's forward pass saves for backward."""
        import torch

        p, t = problem, dict(tensors)
        if not p.is_backward:
            return t
        x, buffers = _image(t["in"]), (t.get("running_mean"), t.get("running_var"))
        out, mean, deviation, reserve, used = torch._batch_norm_impl_index(
            x, t.get("weight"), t.get("bias"), *buffers, not p.frozen, MOMENTUM, EPS, True
        )
        if p.residual:
            out = out + _image(t["residual"])
        saved = saved_of(p.activation, out)
        t |= {"saved": saved, "saved_mean": mean, "saved_invstd": deviation, "reserve": reserve}
        return t | {"implementation": torch.tensor(used)}

    def pytorch(self, problem: BatchNorm, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the output, or the gradients, by the operators that eager PyTorch calls. Forward
        updates the running statistics in place; backward takes the tensors of `prepared`."""
        import torch
        import torch.nn.functional as F

        p, t = problem, tensors
        if not p.is_backward:
            out = F.batch_norm(
                _image(t["in"]), t["running_mean"], t["running_var"], t.get("weight"),
                t.get("bias"), not p.frozen, MOMENTUM, EPS,
            )  # fmt: skip
            return activated(p.activation, out + _image(t["residual"]) if p.residual else out)
        t = t if "saved" in t else self.prepared(p, t)
        grad = argument_grad(p.activation, _image(t["out_grad"]), t["saved"])
        grads = torch.ops.aten._batch_norm_impl_index_backward(
            int(t["implementation"]), _image(t["in"]), grad, t.get("weight"),
            t.get("running_mean"), t.get("running_var"), t["saved_mean"], t["saved_invstd"],
            not p.frozen, EPS, [True, p.affine, p.affine], t["reserve"],
        )  # fmt: skip
        return grads[0], *((grad,) if p.residual else ()), *(grads[1:] if p.affine else ())


#: Outputs of the reference's kernels, by their numbers.
_OUTPUTS = (
    "out", "mean", "invstd", "new_running_mean", "new_running_var",
    "in_grad", "residual_grad", "weight_grad", "bias_grad",
)  # fmt: skip


def _image(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 3, 1, 2)


BATCH_NORM = BatchNorms()

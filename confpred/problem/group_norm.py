"""Normalisation by the statistics of groups of channels, with its activation: group, instance,
layer and RMS norm of channels-last activations of any rank.

    layer                      samples   pixels   groups
    group norm                 N         H * W    as it says
    instance norm              N         H * W    C
    layer and RMS norm, of     N * H * W   1        1
    the channels of a pixel
"""

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
    activation_macro,
    argument_grad,
    saved_of,
)
from confpred.problem.conv2d import DTYPES, dtype_macro
from confpred.problem.device import Device
from confpred.problem.norm import DIRECTIONS, EPS, MOST_ROWS
from confpred.problem.operation import REFERENCE, KernelSpec, Operand, Step
from confpred.problem.record import ITEMSIZES, Record

if TYPE_CHECKING:
    import torch

#: What a norm is multiplied by and what is added: nothing; a weight; a weight and a bias.
AFFINE = ("none", "weight", "full")


@dataclass(frozen=True, slots=True)
class Norm(Record):
    """``out = activation((in - mean) / sqrt(variance + eps) * weight + bias + residual)``, with the
    mean and variance of each sample and group of channels; or the gradients of that.

    Attributes:
        n, p, c: samples, pixels of each, channels of each pixel.
        groups: of neighbouring channels; it divides `c`.
        dtype: of the activations and their gradients. Statistics are in float32.
        activation: applied last.
        residual: a tensor of the activations' shape is added before the activation. In direction
            backward without an activation it changes nothing, and is refused.
        direction: ``forward``, or ``backward``: gradients of all inputs from that of the output.
        affine: ``full``: there are a weight and a bias; ``weight``: a weight alone; ``none``.
        weights: dtype of weight and bias and of their gradients: float32, or that of `dtype`.
        adaptive: each sample has a weight and a bias of its own.
        centred: the mean is subtracted; false for RMS norm, whose variance is the mean square.

    Raises:
        InvalidProblem: a field is out of range, or does not go with another one.
    """

    LIMITS: ClassVar[Mapping[str, tuple[int, int]]] = {
        "n": (1, MOST_ROWS), "p": (1, MOST_ROWS), "c": (1, 65_536), "groups": (1, 65_536),
    }  # fmt: skip
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dtype": DTYPES,
        "activation": ACTIVATIONS,
        "direction": DIRECTIONS,
        "affine": AFFINE,
        "weights": DTYPES,
    }

    n: int
    p: int
    c: int
    groups: int = 1
    dtype: str = "float16"
    activation: str = "none"
    residual: bool = False
    direction: str = "forward"
    affine: str = "full"
    weights: str = "float32"
    adaptive: bool = False
    centred: bool = True

    def __post_init__(self) -> None:
        Record.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.n * self.p > MOST_ROWS:
            raise InvalidProblem("n", self.n, f"n * p of at most {MOST_ROWS}")
        if self.c % self.groups:
            raise InvalidProblem("groups", self.groups, f"a divisor of {self.c} channels")
        if self.residual and self.is_backward and self.activation == "none":
            raise InvalidProblem("residual", True, "false in direction backward and no activation")
        if self.weights not in ("float32", self.dtype):
            raise InvalidProblem("weights", self.weights, f"float32 or {self.dtype}")
        if self.affine == "none" and (self.adaptive or self.weights != "float32"):
            raise InvalidProblem("affine", "none", "weight or full, where weights are described")
        if not self.centred and (self.p, self.groups) != (1, 1):
            raise InvalidProblem("centred", False, "true, unless p and groups are 1")

    def layer(self) -> Norm:
        """`self` with all that a user chooses made the same: batch, dtype, direction."""
        return Norm(1, self.p, self.c, self.groups, centred=self.centred)

    @property
    def rows(self) -> int:
        """Pixels of all samples."""
        return self.n * self.p

    @property
    def width(self) -> int:
        """Channels of a group."""
        return self.c // self.groups

    @property
    def is_backward(self) -> bool:
        return self.direction == "backward"

    @property
    def is_widened(self) -> bool:
        """Whether PyTorch computes it in float32, as autocast does, and rounds at the end."""
        return self.affine != "none" and self.weights != self.dtype

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
        """How often such a tensor crosses device memory where none fits into a cache: statistics
        are known only when all of a group was read, and are needed to write anything. The channels
        of a pixel are held in registers."""
        if self.p == 1:
            return self.tensors
        return self.tensors + (2 if self.is_backward else 1)

    @property
    def parameters(self) -> int:
        """Elements of the weight, as many as of the bias."""
        return self.c * (self.n if self.adaptive else 1)

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must cross device memory: every operand read or written once."""
        vectors = AFFINE.index(self.affine) * (2 if self.is_backward else 1)
        statistics = 4 * (1 + self.centred) * self.n * self.groups
        weights = vectors * ITEMSIZES[self.weights] * self.parameters
        return self.tensors * self.tensor_bytes + statistics + weights

    @property
    def flops(self) -> int:
        """Additions and multiplications, those of the activation left out."""
        return self.rows * self.c * (12 if self.is_backward else 6)

    @property
    def grouping(self) -> str:
        if self.p == 1 and self.groups == 1:
            return "layer norm" if self.centred else "RMS norm"
        return "instance norm" if self.groups == self.c else "group norm"

    @property
    def kind(self) -> str:
        return f"{self.direction} {self.grouping}"


_THREADS, _SIDE = 256, 32  # of the reference's blocks


class Norms:
    """Operands: ``in``, ``out``, ``residual``, ``in_grad``, ``out_grad`` and ``residual_grad`` of
    (n, p, c); ``weight``, ``bias`` and their gradients of (c), or (n, c) where they are adaptive;
    the statistics ``mean`` and ``invstd`` (1 over the root of variance and eps) of (n, groups),
    which forward returns and backward takes; and ``eps``, one number in device memory.
    """

    name = "norm"
    problem: type[Record] = Norm
    feature_names: tuple[str, ...] = (
        "log_samples", "log_pixels", "log_channels", "log_width", "log_groups", "align_c",
        "align_width", "dtype", "activation", "residual", "backward", "affine", "weights",
        "adaptive", "centred", "log_bytes", "log_tensor", "l2_share", "sample_l2_share",
        "log_roofline",
    )  # fmt: skip

    def operands(self, problem: Norm) -> tuple[Operand, ...]:
        p, image = problem, (problem.n, problem.p, problem.c)
        parameters = (p.n, p.c) if p.adaptive else (p.c,)

        def images(names: tuple[str, ...], terms: int = 0) -> list[Operand]:
            return [Operand(name, image, p.dtype, terms) for name in names]

        def vectors(names: tuple[str, ...], terms: int = 0) -> list[Operand]:
            return [Operand(name, parameters, p.weights, terms) for name in names]

        def statistics(terms: int = 0) -> list[Operand]:
            names = ("mean", "invstd") if p.centred else ("invstd",)
            return [Operand(name, (p.n, p.groups), "float32", terms) for name in names]

        affine = ("weight", "bias")[: AFFINE.index(p.affine)]
        more, values = ("residual",) if p.residual else (), p.p * p.width
        if p.is_backward:
            return (
                *images(tuple(f"{name}_grad" for name in ("in", *more)), values),
                *vectors(tuple(f"{name}_grad" for name in affine), p.p if p.adaptive else p.rows),
                *images(("out_grad", "in", *more)),
                *vectors(affine),
                *statistics(),
            )
        return (
            *images(("out",), 1),
            *statistics(1),
            *images(("in", *more)),
            *vectors(affine),
            Operand("eps", (1,), "float32", scale=0.0, center=EPS),
        )

    def features(self, problem: Norm, device: Device) -> NDArray[np.float32]:
        """Logarithms are to base 2; shares are those that the activations, and a sample of them,
        have of the L2 cache."""
        p = problem
        sizes = (
            p.n, p.p, p.c, p.width, p.groups, p.minimum_bytes, p.tensor_bytes, device.roofline_s(p),
        )  # fmt: skip
        *logs, moved, tensor, roofline = np.log2(np.array(sizes, np.float64)).tolist()
        share = p.tensor_bytes / device.l2_bytes
        row = (
            *logs, min(p.c & -p.c, 64), min(p.width & -p.width, 64), DTYPES.index(p.dtype),
            ACTIVATIONS.index(p.activation), p.residual, p.is_backward, AFFINE.index(p.affine),
            DTYPES.index(p.weights), p.adaptive, p.centred, moved, tensor, share, share / p.n,
            roofline,
        )  # fmt: skip
        return np.array([row], np.float32)

    def reference(self, problem: Norm, output: str) -> Step:
        p = problem
        inputs: tuple[str, ...] = ("in", "weight", "bias", "residual", "eps")
        entry, blocks, threads = "reference_norm", p.n * p.groups, (_THREADS, 1, 1)
        if p.is_backward:
            inputs = ("out_grad", "in", "weight", "bias", "residual", "mean", "invstd")
            entry = "reference_norm_backward"
        if output in ("weight_grad", "bias_grad"):
            entry, blocks, threads = "reference_norm_weights", -(-p.c // _SIDE), (_SIDE, _SIDE, 1)
        defines = (dtype_macro(p), activation_macro(p.activation), *norm_macros(p))
        rows = {"samples": p.n, "pixels": p.p, "channels": p.c, "groups": p.groups}
        return Step(
            KernelSpec("reference_group_norm.cu", entry, defines),
            grid=(blocks, 1, 1),
            block=threads,
            smem_bytes=0,
            operands=(REFERENCE, *inputs),
            scalars=rows | {"output": _OUTPUTS.index(output)},
        )

    def prepared(
        self, problem: Norm, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return `tensors`, and what PyTorch's own forward pass leaves to its backward pass."""
        import torch

        p, t = problem, dict(tensors)
        if not p.is_backward:
            return t
        with torch.enable_grad():
            leaves: dict[str, torch.Tensor] = {
                name: t[name].detach().requires_grad_()
                for name in ("in", "weight", "bias", "residual")
                if name in t
            }
            out = _normalised(p, leaves)
            if "residual" in leaves:
                out = out + _image(p, leaves["residual"])
        saved = saved_of(p.activation, out.detach())
        return t | {f"leaf_{name}": leaf for name, leaf in leaves.items()} | {
            "normalised": out, "saved": saved,
        }  # fmt: skip

    def pytorch(self, problem: Norm, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the output, or the gradients, by the operators that eager PyTorch calls;
        `prepared` saves backward the forward pass."""
        import torch

        p, t = problem, tensors
        if not p.is_backward:
            out = _normalised(p, t)
            out = activated(p.activation, out + _image(p, t["residual"]) if p.residual else out)
            return out.to(t["in"].dtype)
        t = t if "saved" in t else self.prepared(p, t)
        grad = argument_grad(
            p.activation, _image(p, t["out_grad"]).to(t["saved"].dtype), t["saved"]
        )
        leaves = [t[f"leaf_{n}"] for n in ("in", "residual", "weight", "bias") if f"leaf_{n}" in t]
        grads = torch.autograd.grad(t["normalised"], leaves, grad, retain_graph=True)
        return tuple(_image(p, g) if g.dim() == 3 and g.shape[1] == p.p else g for g in grads)


def _normalised(p: Norm, t: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the normalised tensor (n, c, p) by the operator that users call. Where weights are in
    float32 and activations are not, autocast has it in float32."""
    import torch.nn.functional as F

    x, weight, bias = t["in"], t.get("weight"), t.get("bias")
    x = x.float() if p.is_widened else x
    own = (None, None) if p.adaptive else (weight, bias)  # what the operator takes
    if p.p == 1 and p.groups == 1:
        if p.centred:
            out = _image(p, F.layer_norm(x, (p.c,), *own, eps=EPS))
        else:
            out = _image(p, F.rms_norm(x, (p.c,), own[0], eps=EPS))
            out = out if own[1] is None else out + _of_channels(p, own[1])
    elif p.groups == p.c and p.p > 1:  # of one pixel it is refused
        out = F.instance_norm(_image(p, x), weight=own[0], bias=own[1], eps=EPS)
    else:
        out = F.group_norm(_image(p, x), p.groups, *own, eps=EPS)
    if p.adaptive and weight is not None:
        out = out * _of_channels(p, weight)
        out = out if bias is None else out + _of_channels(p, bias)
    return out


def _of_channels(p: Norm, vector: torch.Tensor) -> torch.Tensor:
    return vector.view(-1, p.c, 1)


def _image(p: Norm, x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 1)


def norm_macros(problem: Norm) -> tuple[tuple[str, int | str], ...]:
    """Macros of the norm: whether it subtracts a mean, and what its weights are."""
    p = problem
    return (
        ("CENTRED", int(p.centred)),
        ("OWN_WEIGHTS", int(p.weights == p.dtype)),
        ("ADAPTIVE", int(p.adaptive)),
    )


#: Outputs of the reference's kernels, by their numbers.
_OUTPUTS = ("out", "mean", "invstd", "in_grad", "residual_grad", "weight_grad", "bias_grad")

NORM = Norms()

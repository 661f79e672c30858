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
    activation_feature,
    activation_macro,
    argument_grad,
    saved_of,
)
from confpred.problem.conv2d import DTYPES, dtype_macro
from confpred.problem.device import Device
from confpred.problem.norm import DIRECTIONS, EPS, MOST_ROWS, OfActivations
from confpred.problem.operation import REFERENCE, KernelSpec, Operand, Step
from confpred.problem.record import ITEMSIZES, Record

if TYPE_CHECKING:
    import torch

#: Parameters of a norm: none; a weight; a weight, and a bias that is added.
AFFINE = ("none", "weight", "full")


@dataclass(frozen=True, slots=True)
class Norm(OfActivations):
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
        OfActivations.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.n * self.p > MOST_ROWS:
            raise InvalidProblem("n", self.n, f"n * p of at most {MOST_ROWS}")
        if self.c % self.groups:
            raise InvalidProblem("groups", self.groups, f"a divisor of {self.c} channels")
        if self.weights not in ("float32", self.dtype):
            raise InvalidProblem("weights", self.weights, f"float32 or {self.dtype}")
        if self.affine == "none" and (self.adaptive or self.weights != "float32"):
            raise InvalidProblem("affine", "none", "weight or full, where weights are described")
        if not self.centred and not self.is_of_rows:
            raise InvalidProblem("centred", False, "true, unless p and groups are 1")

    def layer(self) -> Norm:
        """Return the problem with fixed values for all that a user chooses: batch, dtype,
        direction."""
        return Norm(1, self.p, self.c, self.groups, centred=self.centred)

    @property
    def rows(self) -> int:
        return self.n * self.p

    @property
    def is_read_once(self) -> bool:
        return self.p == 1  # the channels of a pixel are held in registers

    @property
    def width(self) -> int:
        """Channels of a group."""
        return self.c // self.groups

    @property
    def is_of_rows(self) -> bool:
        """Whether the channels of a pixel are one group, as of layer norm and RMS norm."""
        return self.p == 1 and self.groups == 1

    @property
    def is_instance_norm(self) -> bool:
        """Whether each channel is a group; PyTorch's instance norm refuses a single pixel."""
        return self.groups == self.c and self.p > 1

    @property
    def is_trivial(self) -> bool:
        """Whether a group has so few values that the input's gradient would be 0 but for `eps`."""
        return self.p * self.width <= 2

    @property
    def is_widened(self) -> bool:
        """Whether PyTorch computes it in float32, as autocast does, and rounds at the end."""
        return self.affine != "none" and self.weights != self.dtype

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
    def grouping(self) -> str:
        if self.is_of_rows:
            return "layer norm" if self.centred else "RMS norm"
        return "instance norm" if self.is_instance_norm else "group norm"


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
        """Return the features. Logarithms are to base 2; shares are those of the L2 cache that the
        activations, and one sample of them, take."""
        p = problem
        sizes = (
            p.n, p.p, p.c, p.width, p.groups, p.minimum_bytes, p.tensor_bytes, device.roofline_s(p),
        )  # fmt: skip
        *logs, moved, tensor, roofline = np.log2(np.array(sizes, np.float64)).tolist()
        share = p.tensor_bytes / device.l2_bytes
        row = (
            *logs, min(p.c & -p.c, 64), min(p.width & -p.width, 64), DTYPES.index(p.dtype),
            activation_feature(p.activation), p.residual, p.is_backward, AFFINE.index(p.affine),
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
        """Return `tensors`, and the tensors that PyTorch's forward pass saves for backward."""
        p, t = problem, dict(tensors)
        if not p.is_backward:
            return t
        out, saved = _normalised(p, t)
        if p.residual:
            out = out + _image(p, t["residual"])
        return t | saved | {"saved": saved_of(p.activation, out)}

    def pytorch(self, problem: Norm, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the output, or the gradients, by the operators that eager PyTorch calls;
        backward takes the tensors of `prepared`."""
        p, t = problem, tensors
        if not p.is_backward:
            out, _ = _normalised(p, t)
            out = activated(p.activation, out + _image(p, t["residual"]) if p.residual else out)
            return out.to(t["in"].dtype)
        t = t if "saved" in t else self.prepared(p, t)
        out_grad = _image(p, t["out_grad"]).to(t["saved"].dtype)
        grad = argument_grad(p.activation, out_grad, t["saved"])
        residual = (grad.to(t["in"].dtype),) if p.residual else ()
        in_grad, *of_weights = _gradients(p, t, grad)
        return in_grad.to(t["in"].dtype), *residual, *of_weights[: AFFINE.index(p.affine)]


# PyTorch's operators, as its functions call them on a GPU: group and instance norm copy what is not
# channels first, and autocast has all of them in float32 (`Norm.is_widened`).


def _normalised(
    p: Norm, t: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the normalised tensor (n, c, p), and the tensors that `_gradients` needs."""
    import torch

    x, weight, bias = t["in"], t.get("weight"), t.get("bias")
    x = x.float() if p.is_widened else x
    own = (None, None) if p.adaptive else (weight, bias)  # what the operator takes
    if p.is_of_rows:
        if p.centred:
            out, *saved = torch.native_layer_norm(x, [p.c], *own, EPS)
        else:
            out, *saved = torch.ops.aten._fused_rms_norm(x, [p.c], own[0], EPS)
            out = out if own[1] is None else out + own[1]
        out = _image(p, out)
    else:
        x = _image(p, x).contiguous()
        if p.is_instance_norm:
            own_weight, own_bias = (None if v is None else v.repeat(p.n) for v in own)
            out, *saved, used = torch._batch_norm_impl_index(
                x.view(1, -1, p.p), own_weight, own_bias, None, None, True, 0.0, EPS, True
            )
            out, saved = out.view(x.shape), [*saved, torch.tensor(used)]
        else:
            out, *saved = torch.native_group_norm(x, *own, p.n, p.c, p.p, p.groups, EPS)
    kept = {"x": x, **{f"saved_{i}": tensor for i, tensor in enumerate(saved)}}
    if p.adaptive and weight is not None:
        kept["unit"] = out
        out = out * weight[..., None]
        out = out if bias is None else out + bias[..., None]
    return out, kept


def _gradients(
    p: Norm, t: Mapping[str, torch.Tensor], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the input (n, p, c), weight and bias, from that of the normalised
    tensor and the tensors that `_normalised` saved."""
    import torch

    aten, x, weight, bias = torch.ops.aten, t["x"], t.get("weight"), t.get("bias")
    adaptive = None
    if p.adaptive and weight is not None:
        adaptive = (grad * t["unit"]).sum(2), grad.sum(2)
        grad, weight, bias = grad * weight[..., None], None, None
    saved = [t[f"saved_{i}"] for i in range(sum(name[:6] == "saved_" for name in t))]
    mask = [True, weight is not None, bias is not None]
    grads: Any
    if p.is_of_rows:
        rows = _image(p, grad)
        if p.centred:
            grads = aten.native_layer_norm_backward(rows, x, [p.c], *saved, weight, bias, mask)
        else:
            grads = aten._fused_rms_norm_backward(rows, x, [p.c], *saved, weight, mask[:2])
            grads = *grads, rows.sum((0, 1))
    else:
        grad = grad.contiguous()
        if p.is_instance_norm:
            *statistics, reserve, used = saved
            wide = None if weight is None else weight.repeat(p.n)
            grads = aten._batch_norm_impl_index_backward(
                int(used), x.view(1, -1, p.p), grad.view(1, -1, p.p), wide, None, None, *statistics,
                True, EPS, mask, reserve,
            )  # fmt: skip
            of_weights = (g if g is None else g.view(p.n, p.c).sum(0) for g in grads[1:])
            grads = grads[0].view(x.shape), *of_weights
        else:
            grads = aten.native_group_norm_backward(
                grad, x, *saved, weight, p.n, p.c, p.p, p.groups, mask
            )
        grads = _image(p, grads[0]), *grads[1:]
    return grads if adaptive is None else (grads[0], *adaptive)


def _image(p: Norm, x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 1)


def norm_macros(problem: Norm) -> tuple[tuple[str, int | str], ...]:
    """Return the macros of the norm: whether it subtracts a mean, and the shape of its weights."""
    p = problem
    return (
        ("CENTRED", int(p.centred)),
        ("OWN_WEIGHTS", int(p.weights == p.dtype)),
        ("ADAPTIVE", int(p.adaptive)),
    )


#: Outputs of the reference's kernels, by their numbers.
_OUTPUTS = ("out", "mean", "invstd", "in_grad", "residual_grad", "weight_grad", "bias_grad")

NORM = Norms()

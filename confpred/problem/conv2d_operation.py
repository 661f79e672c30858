"""The operation that this project is for: grouped and depthwise convolution in three directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from confpred.problem.conv2d import ACTIVATIONS, DIRECTIONS, DTYPES, Problem
from confpred.problem.device import Device
from confpred.problem.operation import REFERENCE, KernelSpec, Operand, Step
from confpred.problem.record import Record

if TYPE_CHECKING:
    import torch

_THREADS = 256
#: What the kernels of the reference are told of a problem, in their order.
_SIZES = "n c h w k r s p q stride_h stride_w pad_h pad_w dilation_h dilation_w groups"
#: Into how many parts the reference cuts the pixels that a filter element's gradient sums over.
_SLICES = 512
#: The reference of a dense convolution: rows and columns of a block's tile, and how many blocks are
#: enough to fill a GPU.
_TILE, _BLOCKS = 64, 1024


_MOST_ALIGNED = 64


def product(p: Problem) -> tuple[int, int, int]:
    """Rows, columns and terms of a sum, of the matrix product that a group's convolution is."""
    taps, pixels, width, depth = p.r * p.s, p.n * p.p * p.q, p.group_width, p.k // p.groups
    if p.direction == "fprop":
        return pixels, depth, taps * width
    if p.direction == "dgrad":
        return p.n * p.h * p.w, width, taps * depth
    return depth, taps * width, pixels


class Convolution:
    """Activations are N H W C (and N P Q K), filters K R S C/groups; names as in `operands`."""

    name = "conv2d"
    problem: type[Record] = Problem
    feature_names: tuple[str, ...] = (
        "direction", "dtype", "log_n", "log_c", "log_k", "log_p", "log_q", "r", "s",
        "group_width", "log_groups", "stride_h", "stride_w", "dilation_h", "dilation_w",
        "padding_h", "padding_w", "bias", "activation", "residual", "deterministic",
        "log_bytes", "log_intensity", "log_roofline",
        "log_rows", "log_columns", "log_terms", "align_c", "align_k",
    )  # fmt: skip

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        p = problem
        image, output = (p.n, p.h, p.w, p.c), (p.n, p.p, p.q, p.k)
        filters = (p.k, p.r, p.s, p.group_width)
        taps = p.r * p.s
        found: tuple[tuple[str, tuple[int, ...], int], ...]
        if p.direction == "fprop":
            found = (
                ("out", output, taps * p.group_width),
                ("in", image, 0),
                ("filter", filters, 0),
            )
            found += (("bias", (p.k,), 0),) if p.bias else ()
            found += (("residual", output, 0),) if p.residual else ()
        elif p.direction == "dgrad":
            found = (("in_grad", image, taps * (p.k // p.groups)),)
            found += (("out_grad", output, 0), ("filter", filters, 0))
        else:
            terms = p.n * p.p * p.q
            found = (("filter_grad", filters, terms),)
            found += (("bias_grad", (p.k,), terms),) if p.bias else ()
            found += (("out_grad", output, 0), ("in", image, 0))
        return tuple(Operand(name, shape, p.dtype, terms) for name, shape, terms in found)

    def features(self, problem: Problem, device: Device) -> NDArray[np.float32]:
        """Logarithms are to base 2; `align_c` is the power of two that divides `c`, up to 64, as
        tensor cores want channels in such portions."""
        p = problem
        costs = (p.minimum_bytes, p.flops / p.minimum_bytes, device.roofline_s(p))
        sizes = (p.n, p.c, p.k, p.p, p.q, p.groups, *costs, *product(p))
        n, c, k, height, width, groups, *rest = np.log2(np.array(sizes, np.float64)).tolist()
        row = (
            DIRECTIONS.index(p.direction), DTYPES.index(p.dtype),
            n, c, k, height, width, p.r, p.s,
            p.group_width, groups, *p.stride, *p.dilation, *p.padding,
            p.bias, ACTIVATIONS.index(p.activation), p.residual, p.deterministic,
            *rest, *(min(size & -size, _MOST_ALIGNED) for size in (p.c, p.k)),
        )  # fmt: skip
        return np.array([row], np.float32)

    def reference(self, problem: Problem, output: str) -> Step:
        p = problem
        inputs, elements, slices = {
            "out": (("in", "filter", "bias", "residual"), p.output_elements, 1),
            "in_grad": (("out_grad", "filter"), p.input_elements, 1),
            "filter_grad": (("out_grad", "in"), p.filter_elements, _SLICES),
            "bias_grad": (("out_grad",), p.k, _SLICES),
        }[output]
        source, grid = "reference", (-(-elements // _THREADS), slices, 1)
        if p.groups == 1 and output != "bias_grad":
            rows, columns, terms = product(p)
            tiles = -(-rows // _TILE), -(-columns // _TILE)
            slices = min(-(-_BLOCKS // (tiles[0] * tiles[1])), -(-terms // _TILE))
            source, grid = "reference_dense", (*tiles, slices if output == "filter_grad" else 1)
        return Step(
            KernelSpec(f"{source}.cu", f"{source}_{output}", (dtype_macro(p),)),
            grid=grid,
            block=(_THREADS, 1, 1),
            smem_bytes=0,
            operands=(REFERENCE, *inputs),
            scalars={
                **kernel_sizes(p, _SIZES),
                "activation": ACTIVATIONS.index(p.activation),
            },
        )

    def pytorch(self, problem: Problem, tensors: Mapping[str, torch.Tensor]) -> Any:
        import torch
        import torch.nn.functional as F

        p = problem
        t = {name: x.permute(0, 3, 1, 2) if x.dim() == 4 else x for name, x in tensors.items()}
        if p.direction == "fprop":
            out = F.conv2d(
                t["in"], t["filter"], t.get("bias"), p.stride, p.padding, p.dilation, p.groups
            )
            if p.residual:
                out = out + t["residual"]
            return out if p.activation == "none" else getattr(F, p.activation)(out)
        # The operator reads only the sizes of the operand whose gradient is asked for.
        empty = t["out_grad"].new_empty
        x = t["in"] if "in" in t else empty(p.n, p.h, p.w, p.c).permute(0, 3, 1, 2)
        weight = (
            t["filter"]
            if "filter" in t
            else empty(p.k, p.r, p.s, p.group_width).permute(0, 3, 1, 2)
        )
        mask = [p.direction == "dgrad", p.direction == "wgrad", p.bias]
        with torch.backends.cudnn.flags(
            enabled=True,
            benchmark=torch.backends.cudnn.benchmark,
            deterministic=p.deterministic,
            allow_tf32=torch.backends.cudnn.allow_tf32,
        ):
            return torch.ops.aten.convolution_backward(
                t["out_grad"], x, weight, [p.k] if p.bias else None,
                p.stride, p.padding, p.dilation, False, (0, 0), p.groups, mask,
            )  # fmt: skip


def kernel_sizes(problem: Problem, names: str) -> dict[str, int]:
    """What kernels are told of a problem: the sizes in `names`, such as ``n c h w pad_h pad_w``, in
    that order."""
    p = problem
    known = {name: getattr(p, name) for name in ("n", "c", "h", "w", "k", "r", "s", "p", "q")}
    for name, (down, across) in (
        ("stride", p.stride),
        ("pad", p.padding),
        ("dilation", p.dilation),
    ):
        known |= {f"{name}_h": down, f"{name}_w": across}
    known["groups"] = p.groups
    return {name: known[name] for name in names.split()}


def dtype_macro(problem: Problem) -> tuple[str, str]:
    """``DTYPE``, as ``kernels/common.cuh`` knows it."""
    return "DTYPE", f"DTYPE_{problem.dtype.upper()}"


CONVOLUTION = Convolution()

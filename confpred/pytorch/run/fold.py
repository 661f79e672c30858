"""Batch norms by known statistics, folded for up to `LAYERS` layers in one launch.

A layer with a filter gets the filter times the norm's scale, and a bias; others get scale and shift
in float32 (``kernels/fold.cu``). The launch is part of the captured graph, so writes to weights and
statistics take effect.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from confpred.cuda.driver import launch_with
from confpred.errors import ConfpredError
from confpred.launch.runner import loaded
from confpred.problem.operation import KernelSpec
from confpred.pytorch.run.loading import CHANNELS_LAST, in_context

log = logging.getLogger(__name__)
#: Most layers of one launch: its parameters fit in the 4 KiB that every driver passes.
LAYERS = 36
_THREADS, _WARPS, _MOST_BLOCKS = 256, 8, 128
_VECTOR = 8  # elements that a lane of the kernel reads at once
KERNEL = KernelSpec("fold.cu", "fold", (("LAYERS", LAYERS),))
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # DTYPE_... of common.cuh
Tensors = Sequence["Tensor | None"]
#: Gamma, beta, mean, variance of a norm; bias and filter of the convolution before it.
Parts = tuple["Tensor | None", "Tensor | None", Tensor, Tensor, "Tensor | None", "Tensor | None"]


class _FoldLayer(ctypes.Structure):
    """``Layer`` of ``kernels/fold.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gamma", "beta", "mean", "variance")),
        *((name, ctypes.c_void_p) for name in ("bias", "filter", "first", "second")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("channels", "width", "filter_rows", "filter_columns")),
        *((f"stride_{axis}", ctypes.c_int) for axis in "kcrs"),
        ("types", ctypes.c_uint),
    )


class _FoldLayers(ctypes.Structure):
    _fields_ = (("layer", _FoldLayer * LAYERS),)


def fold(
    gammas: Tensors, betas: Tensors, means: Sequence[Tensor], variances: Sequence[Tensor],
    biases: Tensors, filters: Tensors, eps: Sequence[float], dtypes: Sequence[str],
) -> list[Tensor]:  # fmt: skip
    """Fold one norm for each position in these lists, and return two tensors a norm, as of `empty`:
    filter and bias, or scale and shift where there is no filter.

    `biases` and `filters` are those of the convolutions before the norms, shapes (K,) and
    (K, C / groups, ...); `dtypes` those of the activations, such as ``float16``.
    """
    results = [t for norm in zip(means, filters, dtypes, strict=True) for t in empty(*norm)]
    out = [_of_image(t) for t in results]
    of_images = [None if t is None else _of_image(t) for t in filters]
    layers = list(zip(gammas, betas, means, variances, biases, of_images, strict=True))
    if _can_launch(layers, out):
        try:
            for start in range(0, len(layers), LAYERS):
                part = slice(start, start + LAYERS)
                _launch(layers[part], eps[part], out[2 * start : 2 * (start + LAYERS)])
            return results
        except ConfpredError as error:
            log.warning("folding batch norms by PyTorch's operators: %s", error)
    for i, (gamma, beta, mean, variance, bias, filter) in enumerate(layers):
        scale = 1.0 / torch.sqrt(variance.float() + eps[i])
        scale = scale if gamma is None else scale * gamma.float()
        shift = -mean.float() if bias is None else bias.float() - mean.float()
        shift = shift * scale
        out[2 * i + 1].copy_(shift if beta is None else shift + beta.float())
        out[2 * i].copy_(scale if filter is None else filter.float() * scale.view(-1, 1, 1, 1))
    return results


def loses_precision(gamma: Tensor | None, variance: Tensor, filter: Tensor, eps: float) -> bool:
    """Return whether float16 cannot hold the filter (K, C / groups, R, S) times the scale.

    Elements below 2**-14 are rounded to multiples of 2**-24, so a channel whose root mean square is
    below 2**-13 loses more than 2**-13 of itself. A channel counts by the spread of its normalised
    outputs: one that is dead may lose all. Elements above 65504 become infinite.
    """
    size, dims = filter[0].numel(), tuple(range(1, filter.dim()))
    norm = partial(torch.linalg.vector_norm, filter, dim=dims, dtype=torch.float32)
    two, largest, variance = norm().cpu(), norm(ord=torch.inf).cpu(), variance.cpu().float()
    scale = torch.rsqrt(variance + eps).abs()
    scale = scale if gamma is None else scale * gamma.cpu().float().abs()
    rms, spread = scale * two / size**0.5, scale * variance.sqrt()
    lossy = (rms > 0) & (spread > 2.0**13 * rms * spread.max())
    return bool((lossy | (scale * largest > 65504)).any())


def empty(mean: Tensor, filter: Tensor | None, dtype: str) -> tuple[Tensor, Tensor]:
    """Return the two results of one norm, not yet written: filter, channels last, and bias in the
    activations' dtype; or scale and shift in float32."""
    kind = torch.float32 if filter is None else getattr(torch, dtype)
    second = torch.empty_like(mean, dtype=kind)
    if filter is None:
        return torch.empty_like(second), second
    rows, columns, *axes = filter.shape
    return filter.new_empty(rows, *axes, columns, dtype=kind).movedim(-1, 1), second


def _of_image(t: Tensor) -> Tensor:
    """Return a filter of any rank as that of an image, a view if it is channels last or first: a
    line has height 1, and a volume's depth and height become one axis."""
    return t.unsqueeze(2) if t.dim() == 3 else t.flatten(2, 3) if t.dim() == 5 else t


def _can_launch(layers: Sequence[Parts], out: Sequence[Tensor]) -> bool:
    """Return whether the kernel takes these tensors; `out` are its results."""
    for gamma, beta, mean, variance, *_ in layers:
        for left, right in ((gamma, beta), (mean, variance)):
            if left is not None and right is not None and left.dtype is not right.dtype:
                return False  # the kernel has one dtype for both
    tensors = [t for parts in (*layers, out) for t in parts if t is not None]
    return tensors[0].is_cuda and all(
        t.dtype in _CODES
        and t.device == tensors[0].device
        and (t.dim() == 4 or t.is_contiguous())
        and not t.is_neg()
        for t in tensors
    )


def _launch(layers: Sequence[Parts], eps: Sequence[float], out: Sequence[Tensor]) -> None:
    """Fold at most `LAYERS` norms in one launch; `out` has two tensors for each."""
    argument, blocks = _FoldLayers(), 1
    for i, (gamma, beta, mean, variance, bias, filter) in enumerate(layers):
        layer = argument.layer[i]
        layer.gamma, layer.beta = _address(gamma), _address(beta)
        layer.mean, layer.variance = mean.data_ptr(), variance.data_ptr()
        layer.bias, layer.filter = _address(bias), _address(filter)
        layer.first, layer.second = out[2 * i].data_ptr(), out[2 * i + 1].data_ptr()
        layer.eps, layer.channels = eps[i], len(mean)
        if filter is not None:
            _, layer.width, layer.filter_rows, layer.filter_columns = filter.shape
            layer.stride_k, layer.stride_c, layer.stride_r, layer.stride_s = filter.stride()
        affine = next((t for t in (gamma, beta) if t is not None), mean)
        kinds = (affine, mean, bias, filter, out[2 * i])
        codes = [0 if t is None else _CODES[t.dtype] for t in kinds]
        # Four bits for each dtype; bit 20 says that vectors can be read and written as they lie.
        layer.types = sum(code << 4 * place for place, code in enumerate(codes))
        if filter is not None and _is_in_order(filter):
            layer.types |= 1 << 20
        blocks = max(blocks, min(_MOST_BLOCKS, -(-len(mean) // _WARPS)))
    ordinal = out[0].get_device()
    with torch.cuda.device(ordinal):
        kernel = loaded(KERNEL, ordinal)
        grid = (blocks, len(layers), 1)
        in_context(ordinal, lambda stream: launch_with(kernel, grid, _THREADS, stream, argument))


def _is_in_order(filter: Tensor) -> bool:
    """Return whether a filter lies as its fold does, and a channel of it in whole vectors."""
    return (
        filter.is_contiguous(memory_format=CHANNELS_LAST)
        and filter[0].numel() % _VECTOR == 0
        and filter.data_ptr() % 16 == 0
    )


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()

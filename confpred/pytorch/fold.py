"""Batch norms by known statistics, folded for all layers of a graph in one launch.

A layer with a filter gets the filter times the norm's scale, channels last, and a bias; a layer
without one gets scale and shift in float32 (``kernels/fold.cu`` has the formulas). The launch is
part of the captured graph, so that no write to a weight can be missed.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from confpred.cuda.launch import launch_with
from confpred.errors import ConfpredError
from confpred.problem.operation import KernelSpec
from confpred.pytorch.loading import CHANNELS_LAST, DTYPES, current_stream, in_context, loaded

log = logging.getLogger(__name__)
#: Layers of one launch: its parameters fit in the 4 KiB that every driver passes.
LAYERS = 36
_THREADS, _WARPS, _MOST_BLOCKS = 256, 8, 64
KERNEL = KernelSpec("fold.cu", "fold", (("LAYERS", LAYERS),))
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # DTYPE_... of common.cuh
Tensors = Sequence["Tensor | None"]


class _Layer(ctypes.Structure):
    """``Layer`` of ``kernels/fold.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gamma", "beta", "mean", "variance")),
        *((name, ctypes.c_void_p) for name in ("bias", "filter", "first", "second")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("channels", "width", "filter_rows", "filter_columns")),
        *((name, ctypes.c_int) for name in ("stride_k", "stride_c", "stride_r", "stride_s")),
        ("types", ctypes.c_uint),
    )


class _Layers(ctypes.Structure):
    _fields_ = (("layer", _Layer * LAYERS),)


def fold(
    gammas: Tensors,
    betas: Tensors,
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    biases: Tensors,
    filters: Tensors,
    eps: Sequence[float],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """Fold one norm a place in these lists.

    Args:
        gammas, betas: weight and bias of the norms, shape (K,), or None.
        means, variances: their running statistics, shape (K,).
        biases: of the convolutions before the norms, shape (K,), or None.
        filters: of these convolutions, shape (K, C / groups, R, S), or None for scale and shift.
        eps: of the norms.
        dtypes: of the activations.

    Returns:
        Two tensors a norm: filter, channels last, and bias, in the activations' dtype; or scale and
        shift, in float32.
    """
    places = range(len(means))
    out = [t for i in places for t in empty(means[i], filters[i], dtypes[i])]
    given = [*gammas, *betas, *means, *variances, *biases, *filters]
    if _can_launch(given, dtypes):
        columns = (gammas, betas, means, variances, biases, filters)
        try:
            for start in range(0, len(means), LAYERS):
                part = slice(start, start + LAYERS)
                results = out[2 * start : 2 * (start + LAYERS)]
                _launch([c[part] for c in columns], eps[part], dtypes[part], results)
            return out
        except ConfpredError as error:
            log.warning("folding batch norms by PyTorch's operators: %s", error)
    for i in places:
        gamma, beta, bias, filters_ = gammas[i], betas[i], biases[i], filters[i]
        scale = 1.0 / torch.sqrt(variances[i].float() + eps[i])
        scale = scale if gamma is None else scale * gamma.float()
        shift = -means[i].float() if bias is None else bias.float() - means[i].float()
        shift = shift * scale
        out[2 * i + 1].copy_(shift if beta is None else shift + beta.float())
        wide = scale if filters_ is None else filters_.float() * scale.view(-1, 1, 1, 1)
        out[2 * i].copy_(wide)
    return out


def empty(mean: Tensor, filters: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the two results of one norm, not yet written."""
    if filters is None:
        return tuple(torch.empty_like(mean, dtype=torch.float32) for _ in "ab")  # type: ignore[return-value]
    first = torch.empty_like(filters, dtype=dtype, memory_format=CHANNELS_LAST)
    return first, torch.empty_like(mean, dtype=dtype)


def _can_launch(given: Tensors, dtypes: Sequence[torch.dtype]) -> bool:
    tensors, count = [t for t in given if t is not None], len(dtypes)
    for a, b in ((0, 1), (2, 3)):  # gamma and beta, mean and variance: the kernel has one dtype
        for i in range(count):
            left, right = given[a * count + i], given[b * count + i]
            if left is not None and right is not None and left.dtype is not right.dtype:
                return False
    return (
        tensors[0].is_cuda
        and all(dtype in DTYPES for dtype in dtypes)
        and all(t.dtype in _CODES and t.device == tensors[0].device for t in tensors)
        and all((t.dim() == 4 or t.is_contiguous()) and not t.is_neg() for t in tensors)
    )


def _launch(
    columns: Sequence[Tensors],
    eps: Sequence[float],
    dtypes: Sequence[torch.dtype],
    results: Sequence[Tensor],
) -> None:
    layers, blocks = _Layers(), 1
    for i, (gamma, beta, mean, variance, bias, filters) in enumerate(zip(*columns, strict=True)):
        if mean is None or variance is None:
            continue
        layer = layers.layer[i]
        layer.gamma, layer.beta = _address(gamma), _address(beta)
        layer.mean, layer.variance = mean.data_ptr(), variance.data_ptr()
        layer.bias, layer.filter = _address(bias), _address(filters)
        layer.first, layer.second = results[2 * i].data_ptr(), results[2 * i + 1].data_ptr()
        layer.eps, layer.channels = eps[i], len(mean)
        result = torch.float32
        if filters is not None:
            _, layer.width, layer.filter_rows, layer.filter_columns = filters.shape
            layer.stride_k, layer.stride_c, layer.stride_r, layer.stride_s = filters.stride()
            result = dtypes[i]
        affine = next((t for t in (gamma, beta) if t is not None), mean)
        kinds = (affine, mean, bias, filters)
        codes = [0 if t is None else _CODES[t.dtype] for t in kinds] + [_CODES[result]]
        layer.types = sum(code << 4 * place for place, code in enumerate(codes))
        blocks = max(blocks, min(_MOST_BLOCKS, -(-len(mean) // _WARPS)))
    ordinal = results[0].get_device()
    with torch.cuda.device(ordinal):
        kernel = loaded(KERNEL, 0, ordinal)
        grid, stream = (blocks, len(results) // 2, 1), current_stream(ordinal)
        in_context(ordinal, lambda: launch_with(kernel, grid, _THREADS, stream, layers))


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()

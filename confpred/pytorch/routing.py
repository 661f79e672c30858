"""PyTorch's functions of convolution, by the fastest kernel: what `confpred.enable` puts in place.

Where no model knows a library's plans, a dense layer goes straight on to PyTorch's function. That
costs it a third of a microsecond; an override of ``aten::convolution`` at the CUDA dispatch key
would cost it three, and fifteen in the backward pass (``benchmarks/host_mechanisms.py`` compares
the ways).

    F.conv2d --+-- subclasses, torch.func, tracing, other modes --> PyTorch's function
               +-- torch.compile -----------------------> torch.ops.confpred.conv2d (chosen at run)
               `-- eager --> latest, served +-- ours, with or without gradients
                                            `-- else PyTorch's function
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from confpred.pytorch import choosing, quiet
from confpred.pytorch.autograd import InGraphs, find_convolution, find_eager
from confpred.pytorch.choosing import latest, note, remember, served
from confpred.pytorch.fallback import (
    PYTORCH_CONV1D,
    PYTORCH_CONV2D,
    PYTORCH_CONV_TRANSPOSE2D,
)
from confpred.pytorch.layers import Geometry
from confpred.pytorch.layouts import is_channels_last
from confpred.pytorch.operators import traced
from confpred.pytorch.tracing import dense_may_be_ours

_PLAIN = frozenset((Tensor, Parameter))
_peek = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_tracing = torch._C._get_tracing_state
_is_dynamo = torch.compiler.is_dynamo_compiling  # a constant to the compiler, and cheap to call
_is_autocast, _low = torch.is_autocast_enabled, torch.get_autocast_dtype
_is_grad_enabled = torch.is_grad_enabled
_NO_GRADIENTS = (False, False, False)


def _is_cuda(x: object) -> bool:
    return getattr(x, "is_cuda", False)  # of what is no tensor PyTorch says so


def _is_exporting() -> bool:
    """Whether `torch.export` is at work; PyTorch 2.6 cannot tell.

    What ``torch.compiler.is_exporting`` returns, but for `torch.compile`: in PyTorch 2.11 that
    takes the function to be true wherever it compiles.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    layer: nn.Module | None = None,
) -> Tensor:
    """``torch.nn.functional.conv2d``, by the fastest kernel; what `enable` puts in its place.

    `layer` is what calls from there again and again, and may rest (`confpred.pytorch.quiet`); by
    default the weight is taken for that, and never rests.
    """
    if _is_dynamo():
        run = PYTORCH_CONV2D if groups == 1 and not dense_may_be_ours() else _special
        return run(input, weight, bias, stride, padding, dilation, groups)
    if groups == 1 and not choosing.may_serve_dense:
        return PYTORCH_CONV2D(input, weight, bias, stride, padding, dilation, groups)
    place = id(weight if layer is None else layer), input.shape  # a layer may get several in turn
    records = _is_grad_enabled()
    try:
        known = latest.get(place)
    except TypeError:  # sizes that a trace leaves open have no hash
        return _special(input, weight, bias, stride, padding, dilation, groups)
    if known is not None:
        serve, agrees, facts = known
        if serve is None:
            # The answer is PyTorch's whatever else has changed, so what counts is that it is quick.
            if facts is (records and weight.requires_grad) and agrees(input):
                if layer is not None:
                    quiet.rest(layer)
                return PYTORCH_CONV2D(input, weight, bias, stride, padding, dilation, groups)
        elif (
            facts == (stride, padding, dilation, groups, bias is None, records, _low("cuda"))
            and (agrees(input, weight) if bias is None else agrees(input, weight, bias))
            and not _function_modes()
            and forward_ad._current_level < 0
        ):
            return serve(input, weight, bias)  # type: ignore[no-any-return]
    elif groups == 1 and not _is_cuda(input):
        return PYTORCH_CONV2D(input, weight, bias, stride, padding, dilation, groups)
    if not _is_plain(input, weight, bias):
        return _special(input, weight, bias, stride, padding, dilation, groups)
    dtype = x_dtype = input.dtype
    casts = _is_autocast("cuda")
    if casts and x_dtype is not torch.float64:
        dtype = _low("cuda")
    mask = _NO_GRADIENTS
    if records:
        mask = (input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    key = (
        input.shape,
        input.stride(),
        weight.shape,
        weight.stride(),
        x_dtype,
        weight.dtype,
        dtype,
        casts,
        input.get_device(),
        weight.get_device(),
        bias if bias is None else (bias.dtype, bias.get_device(), bias.shape, bias.stride()),
        mask,
        stride,
        padding,
        dilation,
        groups,
    )
    try:
        serve = served[key]
    except KeyError:
        serve = _find_conv2d(key, input, weight, bias, dtype, mask)
    except TypeError:  # lists have no hash
        if list in (type(stride), type(padding), type(dilation)):
            return conv2d(
                input, weight, bias, _tuple(stride), _tuple(padding), _tuple(dilation), groups
            )
        serve = None
    else:
        if serve is None or type(serve) is InGraphs:
            trains = records and weight.requires_grad
            note(place, None, (input,), trains, outside_graphs=serve is not None)
        else:
            facts = (stride, padding, dilation, groups, bias is None, records, _low("cuda"))
            note(place, serve, (input, weight, bias), facts)
            if layer is not None:
                quiet.serve(layer)
    if serve is None:
        return PYTORCH_CONV2D(input, weight, bias, stride, padding, dilation, groups)
    return serve(input, weight, bias)  # type: ignore[no-any-return]


def _find_conv2d(
    key: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    mask: tuple[bool, bool, bool],
) -> Any:
    stride, padding, dilation, groups = key[-4:]
    geometry = _geometry(stride, padding, dilation, groups)
    if geometry is None:
        return remember(key, None)

    original = partial(
        PYTORCH_CONV2D, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    return find_convolution(key, x, weight, bias, geometry, original, dtype=dtype, mask=mask)


def _special(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    """A convolution that is not an eager one of plain tensors."""

    def original() -> Tensor:
        return PYTORCH_CONV2D(x, weight, bias, stride, padding, dilation, groups)

    geometry = _geometry(stride, padding, dilation, groups)
    # Dynamo may take this function for PyTorch's own, by its name; AOTAutograd traces it then.
    compiling = torch.compiler.is_compiling() or type(x) is FunctionalTensor
    if not compiling or geometry is None or not x.is_cuda or x.dim() != 4:
        return original()
    return compiled(x, weight, bias, geometry, original)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    def original(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return PYTORCH_CONV_TRANSPOSE2D(
            x, weight, bias, stride, padding, output_padding, groups, dilation
        )

    if groups == 1 or _is_dynamo() or not _is_plain(input, weight, bias):
        return original(input, weight, bias)
    geometry, extra = _geometry(stride, padding, dilation, groups), _pair(output_padding)
    if geometry is None or extra is None:
        return original(input, weight, bias)
    serve = find_eager(
        input, weight, bias, geometry, original, transposed=True, output_padding=extra
    )
    return original(input, weight, bias) if serve is None else serve(input, weight, bias)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    def original(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return PYTORCH_CONV1D(x, weight, bias, stride, padding, dilation, groups)

    if groups == 1 or _is_dynamo() or not _is_plain(input, weight, bias) or input.dim() != 3:
        return original(input, weight, bias)
    steps = [_single(value) for value in (stride, padding, dilation)]
    wants = _is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (input, weight, bias)
    )
    if wants or weight.dim() != 3 or None in steps:
        return original(input, weight, bias)

    def flat(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return original(x.squeeze(2), weight.squeeze(2), bias).unsqueeze(2)

    # An image of one row. PyTorch takes it with its channels first, whatever its strides are.
    along: Any = tuple((least, step) for least, step in zip((1, 0, 1), steps, strict=True))
    image, filters = input.contiguous().unsqueeze(2), weight.unsqueeze(2)
    serve = find_eager(image, filters, bias, (*along, groups), flat)
    if serve is None:
        return original(input, weight, bias)
    return serve(image, filters, bias).squeeze(2)


def _single(value: Any) -> int | None:
    if isinstance(value, (tuple, list)) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int) else None


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether nothing but plain CUDA tensors decides what is computed: no subclass, and no
    transform, mode or tracer that is to see the call."""
    return (
        type(x) in _PLAIN
        and type(weight) in _PLAIN
        and (bias is None or type(bias) in _PLAIN)
        and x.is_cuda
        and not is_watched()
    )


def is_watched() -> bool:
    """Whether a transform, mode or tracer is to see each call of PyTorch's operators."""
    return bool(
        _modes()
        or _peek() is not None
        or _is_tracing() is not None
        or forward_ad._current_level >= 0
        or (_function_modes() and not _only_default_device())
    )


def _only_default_device() -> bool:
    """Whether no mode is to see the call but that of ``torch.set_default_device``."""
    modes = torch.overrides._get_current_function_mode_stack()
    return all(type(mode) is DeviceContext for mode in modes)


def compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    original: Callable[[], Tensor],
) -> Tensor:
    """A convolution in a program that is being compiled: PyTorch's own where the layout leaves no
    kernel of ours, so that Inductor may choose another, else an operator that chooses at run
    time."""
    if _is_exporting() or not is_channels_last(x):
        return original()
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype is torch.float64 or weight.dtype is not x.dtype:
        return original()
    return traced(x, weight, bias, None, geometry, "none")


def _geometry(stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry | None:
    """The arguments as pairs; None for others, such as padding by name."""
    if type(stride) is tuple and type(padding) is tuple and type(dilation) is tuple:
        if len(stride) == 2 and len(padding) == 2 and len(dilation) == 2:
            return stride, padding, dilation, groups
        return None
    pairs = _pair(stride), _pair(padding), _pair(dilation)
    if pairs[0] is None or pairs[1] is None or pairs[2] is None:
        return None
    return pairs[0], pairs[1], pairs[2], groups


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, (tuple, list)) and all(isinstance(v, int) for v in value):
        if len(value) == 2:
            return value[0], value[1]
        if len(value) == 1:
            return value[0], value[0]
    return None


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

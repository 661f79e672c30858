"""The convolution problems of a network, found by running it on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from confpred.errors import ConfpredError, InvalidInput, InvalidProblem
from confpred.network.chains import Program, Site, fuse
from confpred.network.instance_forward import remove
from confpred.network.modules import autocast_dtype, geometry_of
from confpred.network.tracing import convolutions_of, trace_parts
from confpred.problem.conv2d import Problem
from confpred.pytorch.fallback import PYTORCH_CONV2D
from confpred.pytorch.layers import described, sums_bias
from confpred.pytorch.layouts import is_channels_last
from confpred.pytorch.ready import CHANNELS_LAST, DTYPES

_OTHERS: Mapping[Any, str] = {
    F.conv1d: "one-dimensional",
    F.conv3d: "three-dimensional",
    F.conv_transpose1d: "transposed",
    F.conv_transpose2d: "transposed",
    F.conv_transpose3d: "transposed",
}

#: Why a layer whose tensors have their channels first is left to PyTorch.
CHANNELS_FIRST = "layout NCHW"
#: A tensor of one pixel or one channel has either layout; PyTorch's operator is left with it.
EITHER_LAYOUT = "one pixel or one channel"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One convolution of one call of a layer.

    Attributes:
        name: the module's name in the network; empty where a forward computes its filter.
        problem: what is computed; None where no `Problem` describes it.
        direction: the problem's, also where there is none.
        hindrance: why our kernels cannot take the tensors, whatever they are predicted to win; None
            if they can.
    """

    name: str
    problem: Problem | None
    direction: str
    hindrance: str | None = None


def as_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments from a tensor, a tuple or list, or a dictionary.

    Raises:
        InvalidInput: it is something else.
    """
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    allowed = "a tensor, a tuple or list of arguments, or a dictionary of them by name"
    raise InvalidInput("example_inputs", example_inputs, allowed)


def network_problems(
    model: nn.Module,
    example_inputs: Any,
    *,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> list[LayerCall]:
    """Every convolution of one step of `model`, in the order of the forward.

    For inference they are what they are after `confpred.optimize`, with bias, residual and
    activation in the problem; for training each call of a layer has its forward and its gradients.
    Nothing is computed: the model's copy has tensors without memory, and needs no GPU.

    Args:
        model: the network, optimized or not; it is not changed.
        example_inputs: see `confpred.optimize`.
        training: which step.
        dtype: as if the model and its inputs were of this dtype; None: as they are, and as autocast
            has it where this is called.

    Raises:
        InvalidInput: `model` is no module, or `example_inputs` are no arguments.
        ConfpredError: the forward cannot run so, for example as it depends on values.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", model, "a torch.nn.Module")
    args, kwargs = as_arguments(example_inputs)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        copy = _copy_without_memory(model, mode)
        names = {id(p): n for n, p in copy.named_parameters(remove_duplicate=False)}
        recorder = _Recorder(names, training, dtype)
        copy.train(training)
        if not training:
            _install(copy, recorder)
        args, kwargs = _pytree.tree_map(
            lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        with mode, recorder, torch.set_grad_enabled(training):
            copy(*args, **kwargs)
    except Exception as error:  # whatever a forward may raise
        raise ConfpredError(
            f"{type(model).__name__} does not run on tensors without values: {error}"
        ) from error
    return recorder.calls


def _copy_without_memory(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A deep copy of `model` with tensors that have a shape only, convolutions channels last."""
    memo: dict[int, Any] = {}
    filters = {id(m.weight) for m in model.modules() if type(m) is nn.Conv2d}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = mode.from_tensor(tensor)
        if id(tensor) in filters:
            with mode:
                fake.data = fake.data.contiguous(memory_format=CHANNELS_LAST)
        memo[id(tensor)] = fake
    copy = deepcopy(model, memo)
    remove(copy)
    return copy


def _install(model: nn.Module, recorder: _Recorder) -> None:
    """Let the parts of `model` that `optimize` would optimize run that way, recorded."""
    convolutions = convolutions_of(model, lambda *_: True)
    for part in list(trace_parts(model, convolutions)):
        program = fuse(part, convolutions)
        part.module.__dict__["forward"] = _recorded(part.module, program, recorder)


def _recorded(module: nn.Module, program: Program, recorder: _Recorder) -> Callable[..., Any]:
    calls = SimpleNamespace(
        **program.others,
        **{key: _RecordedSite(site, recorder) for key, site in program.sites.items()},
    )
    original = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        names = program.arguments[len(args) :]
        if set(names) != kwargs.keys():
            return original(module, *args, **kwargs)
        args = (*args, *(kwargs[name] for name in names))
        if not all(isinstance(x, Tensor) for x in args):
            return original(module, *args)
        return program.run(calls, *(_channels_last(x) for x in args))

    return forward


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() == 4 and x.is_floating_point():
        return x.contiguous(memory_format=CHANNELS_LAST)
    return x


class _RecordedSite:
    def __init__(self, site: Site, recorder: _Recorder) -> None:
        self._site, self._recorder = site, recorder

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        site, recorder = self._site, self._recorder
        with recorder.paused():
            weight, bias = site.convolution.weight, site.convolution.bias
            geometry = geometry_of(site.convolution)
            out = recorder.output(x, weight, bias, *geometry)
            fits = residual is not None and residual.shape == out.shape
            epilogue = {
                "bias": bias is not None or site.norm is not None,
                "activation": site.activation if fits or residual is None else "none",
                "residual": fits,
            }
            recorder.note(site.name, x, weight, geometry, out, epilogue)
            return out if residual is None else out + residual


class _Recorder(TorchFunctionMode):
    """Notes convolutions, above autograd and autocast."""

    def __init__(self, names: dict[int, str], training: bool, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []
        self._names = names
        self._training = training
        self._dtype = dtype
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is PYTORCH_CONV2D:
            return self._conv2d(*args, **kwargs)
        if func in _OTHERS:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            self._add(self._name(weight), None, "fprop", _OTHERS[func])
        return func(*args, **kwargs)

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        out = self.output(input, weight, bias, stride, padding, dilation, groups)
        name = self._name(weight)
        if isinstance(padding, str) or input.dim() != 4:
            self._add(name, None, "fprop", "padding in words or no batch")
            return out
        geometry = (_pair(stride), _pair(padding), _pair(dilation), groups)
        self.note(name, input, weight, geometry, out, {"bias": bias is not None})
        return out

    def output(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
    ) -> Tensor:
        """The convolution's output, laid out as cuDNN does it: channels last if the input or the
        filter is."""
        kept = self._cast(x)
        if kept is not x.dtype:
            x, weight = x.to(kept), weight.to(kept)
            bias = None if bias is None else bias.to(kept)
        out = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        last = any(is_channels_last(t) for t in (x, weight))
        return out.contiguous(memory_format=CHANNELS_LAST) if last and out.dim() == 4 else out

    def note(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        geometry: Any,
        out: Tensor,
        epilogue: dict[str, Any],
    ) -> None:
        """Add the forward of a layer, and its gradients where they are needed."""
        dtype = self._dtype or self._cast(x)
        hindrance = None if is_channels_last(x) else CHANNELS_FIRST
        if hindrance and x.is_contiguous(memory_format=CHANNELS_LAST):
            hindrance = EITHER_LAYOUT
        kinds = [("fprop", epilogue)]
        if self._training and x.requires_grad:
            kinds.append(("dgrad", {}))
        if self._training and weight.requires_grad:
            exact = (
                torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
            )
            bias = epilogue["bias"] and sums_bias(geometry[3])
            kinds.append(("wgrad", {"bias": bias, "deterministic": exact}))
        for direction, fields in kinds:
            if dtype not in DTYPES:
                self._add(name, None, direction, f"dtype {str(dtype).removeprefix('torch.')}")
                continue
            try:
                problem = described(direction, x.shape, weight.shape, dtype, geometry, **fields)
            except InvalidProblem as error:
                self._add(name, None, direction, str(error))
            else:
                self._add(name, problem, direction, hindrance)

    def _add(
        self, name: str, problem: Problem | None, direction: str, hindrance: str | None
    ) -> None:
        self.calls.append(LayerCall(name, problem, direction, hindrance))

    def _cast(self, x: Tensor) -> torch.dtype:
        cast = autocast_dtype(x.device.type) or autocast_dtype("cuda")
        return x.dtype if cast is None or x.dtype is torch.float64 else cast

    def _name(self, weight: object) -> str:
        return self._names.get(id(weight), "").rpartition(".")[0]


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return (values[0], values[-1])

"""What the ways into PyTorch cost, without any work inside: host microseconds of a call.

    python benchmarks/host_mechanisms.py [--device cpu] [--out FOLDER]

A convolution of ours has to be reached from ``F.conv2d``, with gradients, and a layer that is not
ours has to find its way back to PyTorch's own operator. Both ways are timed here with an empty body
that returns tensors made before, so what is left is the mechanism. The overrides are registered at
the dispatch key of the device and stand only during their own turns. On the CPU the mechanisms cost
what they cost on a GPU machine's CPU; only the operators that they lead back to are others there.

It writes ``host_mechanisms.json`` where it is told a folder. What the pages show was measured on a
CPU; ``host_overhead.py --alternatives`` records the same of a GPU machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from host_timing import Turn, interleaved_us
from provenance import provenance, write
from torch import Tensor

CALLS, RUNS = 100, 60
#: A backend that no tensor here is of. Its entry in an operator's table is the kernel that PyTorch
#: gives to every backend without one of its own, and no override of ours stands there.
ELSEWHERE = "XPU"
_BY_BACKEND = "the backend's operator (cudnn_convolution, thnn_conv2d)"
_CONVOLUTION = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


class Layer:
    """A 3x3 layer of 8 channels, so small that its arithmetic hardly counts."""

    def __init__(self, device: str, groups: int) -> None:
        dtype = torch.float16 if device == "cuda" else torch.float32

        def random(*shape: int) -> Tensor:
            values = torch.randn(shape, device=device, dtype=dtype)
            return values.contiguous(memory_format=torch.channels_last)

        self.device = device
        self.key = {"cpu": "CPU", "cuda": "CUDA"}[device]
        self.x, self.weight = random(1, 8, 4, 4), random(8, 8 // groups, 3, 3)
        self.out, self.out_grad = random(1, 8, 4, 4), random(1, 8, 4, 4)
        self.grads = (torch.empty_like(self.x), torch.empty_like(self.weight))
        self.x_needing, self.weight_needing = (
            t.clone().requires_grad_() for t in (self.x, self.weight)
        )
        #: Arguments of ``aten::convolution`` after the tensors.
        self.geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        #: Arguments of ``F.conv2d`` after the tensors.
        self.rest = (None, 1, 1, 1, groups)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def conv2d(self, call: Callable[..., Tensor] | None = None) -> Tensor:
        return (call or F.conv2d)(self.x, self.weight, *self.rest)


@contextmanager
def overridden(
    key: str, *, forward: Any = None, backward: Any = None, suffix: str = ""
) -> Iterator[None]:
    """PyTorch's convolution and its backward replaced at a dispatch key; with the suffix
    ``_overrideable``, their twins that no backend of PyTorch itself serves."""
    library = torch.library.Library("aten", "IMPL")
    try:
        if forward is not None:
            library.impl(f"convolution{suffix}", forward, key)
        if backward is not None:
            library.impl(f"convolution_backward{suffix}", backward, key)
        yield
    finally:
        library._destroy()


def ways_in_us(layer: Layer, calls: int, runs: int) -> dict[str, dict[str, float]]:
    """Each mechanism with an empty body: without gradients, forward, and forward and backward."""
    out, grads = layer.out, (*layer.grads, None)

    def convolution(*_arguments: Any) -> Tensor:
        return out

    def convolution_backward(*_arguments: Any) -> tuple[Tensor | None, ...]:
        return grads

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, *_rest: Any) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(x, weight)
            return out

        @staticmethod
        def backward(ctx: Any, out_grad: Tensor) -> Any:  # type: ignore[override]
            _ = ctx.saved_tensors
            return (*layer.grads, None, None, None, None, None)

    name = "confpred_bench::empty_body"

    @torch.library.custom_op(name, mutates_args=())
    def operator(
        x: Tensor, weight: Tensor, bias: Tensor | None, s: int, p: int, d: int, groups: int
    ) -> Tensor:
        return out

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    def gradient(ctx: Any, out_grad: Tensor) -> Any:
        _ = ctx.saved_tensors
        return (*layer.grads, None, None, None, None, None)

    operator.register_autograd(gradient, setup_context=setup)
    with_gradient = operator._opoverload
    own = partial(overridden, layer.key, forward=convolution, backward=convolution_backward)
    ways: dict[str, Turn] = {}
    ways["F.conv2d, not overridden"] = Turn(F.conv2d)  # type: ignore[arg-type]
    ways["F.conv2d again"] = Turn(F.conv2d)  # type: ignore[arg-type]
    ways["override at the device's key"] = Turn(F.conv2d, own)  # type: ignore[arg-type]
    twin = torch.ops.aten.convolution_overrideable.default
    geometry = layer.geometry

    def routed(x: Tensor, weight: Tensor, bias: Any, s: int, p: int, d: int, groups: int) -> Tensor:
        return twin(x, weight, bias, *geometry) if groups > 1 else F.conv2d(x, weight, bias, s)

    ways["Python function to convolution_overrideable, overridden"] = Turn(
        routed,  # type: ignore[arg-type]
        partial(own, suffix="_overrideable"),
    )
    ways["torch.autograd.Function"] = Turn(Function.apply)  # type: ignore[arg-type]
    ways["custom_op with register_autograd"] = Turn(with_gradient)
    ways["a Python function"] = Turn(convolution)

    def step(call: Any, x: Tensor, weight: Tensor) -> None:
        out = call(x, weight, *layer.rest)
        torch.autograd.grad(out, (x, weight), layer.out_grad)

    plain, needing = (layer.x, layer.weight), (layer.x_needing, layer.weight_needing)
    found: dict[str, dict[str, float]] = {}
    for mode in ("no gradients", "forward", "forward + backward"):
        tensors = plain if mode == "no gradients" else needing
        turns = {}
        for way, turn in ways.items():
            if mode == "forward + backward" and way == "a Python function":
                continue
            call: Any = partial(turn.call, *tensors, *layer.rest)  # type: ignore[call-arg]
            if mode == "forward + backward":
                call = partial(step, turn.call, *tensors)
            turns[way] = Turn(call, turn.around)
        with torch.no_grad() if mode == "no gradients" else nullcontext():
            found[mode] = interleaved_us(
                turns, calls=calls, runs=runs, synchronize=layer.synchronize
            )
    return found


def ways_back_us(layer: Layer, calls: int, runs: int) -> dict[str, dict[str, float]]:
    """PyTorch's own operator reached from inside an override, against ``F.conv2d`` without one."""
    elsewhere = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, ELSEWHERE))
    cudnn = (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.allow_tf32,
    )
    forward_handle, backward_handle = _CONVOLUTION._handle, _BACKWARD._handle

    def by_convolution(*arguments: Any) -> Tensor:
        return torch._convolution(*arguments, *cudnn)

    def by_operator(*arguments: Any) -> Tensor:
        return torch.ops.aten._convolution.default(*arguments, *cudnn)

    def by_handle(*arguments: Any) -> Any:
        return forward_handle.redispatch_boxed(elsewhere, *arguments)

    def back_by_handle(*arguments: Any) -> Any:
        return backward_handle.redispatch_boxed(elsewhere, *arguments)

    def by_backend(x: Tensor, weight: Tensor, bias: Any, *geometry: Any) -> Tensor:
        stride, padding, dilation, _, _, groups = geometry
        if layer.device == "cpu":
            return torch._C._nn.thnn_conv2d(x, weight, [3, 3], bias, stride, padding)
        flags = (cudnn[0], cudnn[1], cudnn[3])
        return torch.cudnn_convolution(x, weight, padding, stride, dilation, groups, *flags)

    forwards = {
        "torch._convolution": by_convolution,
        "torch.ops.aten._convolution.default": by_operator,
        _BY_BACKEND: by_backend,
        f"redispatch to {ELSEWHERE}'s entry, through the handle": by_handle,
    }
    backwards = {f"redispatch to {ELSEWHERE}'s entry, through the handle": back_by_handle}
    if hasattr(torch.library, "get_kernel"):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, layer.key))
        kernel = torch.library.get_kernel(_CONVOLUTION, layer.key)
        kernel_back = torch.library.get_kernel(_BACKWARD, layer.key)
        forwards["torch.library.get_kernel"] = lambda *a: kernel.call_boxed(keys, *a)
        backwards["torch.library.get_kernel"] = lambda *a: kernel_back.call_boxed(keys, *a)
    theirs = _CONVOLUTION

    def replaced(*arguments: Any) -> Tensor:
        return F.conv2d(*arguments)

    plain = {
        "F.conv2d, not overridden": Turn(layer.conv2d),
        "F.conv2d again": Turn(layer.conv2d),
        "F.conv2d through one more Python function": Turn(partial(layer.conv2d, replaced)),
        "torch.convolution": Turn(
            lambda: torch.convolution(layer.x, layer.weight, None, *layer.geometry)
        ),
        "torch.ops.aten.convolution.default": Turn(
            lambda: theirs(layer.x, layer.weight, None, *layer.geometry)
        ),
    }
    for name, body in forwards.items():
        plain[name] = Turn(layer.conv2d, partial(overridden, layer.key, forward=body))
    tensors = (layer.x_needing, layer.weight_needing)

    def step() -> None:
        out = F.conv2d(*tensors, *layer.rest)
        torch.autograd.grad(out, tensors, layer.out_grad)

    def replaced_step() -> None:
        out = replaced(*tensors, *layer.rest)
        torch.autograd.grad(out, tensors, layer.out_grad)

    both = {
        "F.conv2d, not overridden": Turn(step),
        "F.conv2d again": Turn(step),
        "F.conv2d through one more Python function": Turn(replaced_step),
    }
    for name, body in backwards.items():
        for forward in dict.fromkeys((name, _BY_BACKEND)):
            around = partial(overridden, layer.key, forward=forwards[forward], backward=body)
            both[f"forward: {forward}; backward: {name}"] = Turn(step, around)
    with torch.inference_mode():
        first = interleaved_us(plain, calls=calls, runs=runs, synchronize=layer.synchronize)
    second = interleaved_us(both, calls=calls, runs=runs, synchronize=layer.synchronize)
    return {"no gradients": first, "forward + backward": second}


def parts_us(layer: Layer, calls: int, runs: int) -> dict[str, float]:
    """What one look at a tensor costs, of those that a lookup of a ready launch is made of."""
    x, weight, cl = layer.x, layer.weight, torch.channels_last
    key = (x.shape, weight.shape, x.dtype, (1, 1), (1, 1), (1, 1), 8)
    table = {key: None}
    shape, strides = x.shape, x.stride()
    parts: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "x.shape": lambda: x.shape,
        "x.stride()": lambda: x.stride(),
        "x.dtype": lambda: x.dtype,
        "x.device": lambda: x.device,
        "x.get_device()": lambda: x.get_device(),
        "x.is_cuda": lambda: x.is_cuda,
        "x.data_ptr()": lambda: x.data_ptr(),
        "x.is_contiguous(memory_format=channels_last)": lambda: x.is_contiguous(memory_format=cl),
        "type(x) is Tensor": lambda: type(x) is Tensor,
        "look up a key that exists": lambda: table[key],
        "make a key of two shapes and look it up": lambda: table[
            (x.shape, weight.shape, x.dtype, (1, 1), (1, 1), (1, 1), 8)
        ],
        "torch.empty_strided": lambda: torch.empty_strided(
            shape, strides, dtype=x.dtype, device=x.device
        ),
        "torch.empty_like": lambda: torch.empty_like(x),
        "x.new_empty_strided": lambda: x.new_empty_strided(shape, strides),
    }
    turns = {name: Turn(call) for name, call in parts.items()}
    with torch.no_grad():
        return interleaved_us(turns, calls=calls, runs=runs, synchronize=layer.synchronize)


def mechanisms_us(device: str, calls: int = CALLS, runs: int = RUNS) -> dict[str, Any]:
    """All of it, in microseconds a call: ways in, ways back, and the parts of a lookup."""
    if device == "cpu":  # MKL-DNN's operator takes ten times as long as all that is timed here
        torch._C._set_mkldnn_enabled(False)
        torch.set_num_threads(1)
    depthwise, dense = Layer(device, groups=8), Layer(device, groups=1)
    return {
        "ways in, depthwise": ways_in_us(depthwise, calls, runs),
        "ways back, dense": ways_back_us(dense, calls, runs),
        "parts of a lookup": parts_us(depthwise, calls, runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, help="write the result to this folder, too")
    arguments = parser.parse_args()
    found = mechanisms_us(arguments.device)
    print(json.dumps(found, indent=1))
    if arguments.out is not None:
        result = provenance("torch", gpu=arguments.device == "cuda") | {"mechanisms": found}
        print(f"written: {write('host_mechanisms', result, arguments.out)}")


if __name__ == "__main__":
    main()

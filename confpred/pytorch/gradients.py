"""A layer in training: its forward pass and the gradients of its input, filter and bias.

A transposed convolution is the gradient of the input of a convolution with the same filter, so its
three directions are those of that convolution, in other roles:

                    output    gradient of x    gradient of weight
    convolution     fprop     dgrad            wgrad
    transposed      dgrad     fprop            wgrad, x and the output's gradient exchanged
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confpred.pytorch import policy
from confpred.pytorch.choosing import latest, note, pytorch_ms, remember, served
from confpred.pytorch.fallback import pytorch_backward, pytorch_forward
from confpred.pytorch.host import EAGER, EAGER_TRAINING, Host
from confpred.pytorch.layers import Geometry, alike, problem_of, sums_bias, transposed_image
from confpred.pytorch.layouts import is_channels_last
from confpred.pytorch.ready import CHANNELS_LAST, ReadyLaunch, dense, is_dense

Mask = tuple[bool, bool, bool]  # which of the gradients of x, weight and bias are asked for
Grads = tuple["Tensor | None", "Tensor | None", "Tensor | None"]


@dataclass(frozen=True, slots=True)
class Shape:
    """All that decides what serves a layer.

    Attributes:
        x, weight: shapes (N, C, H, W) and (K, C / groups, R, S); of a transposed convolution
            (N, K, P, Q) and the same.
        bias: whether there is one.
        dtype: of all tensors.
        ordinal: CUDA device.
        geometry: stride, padding, dilation, groups.
        transposed: whether it is a transposed convolution.
        output_padding: of a transposed convolution, vertical and horizontal.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    bias: bool
    dtype: torch.dtype
    ordinal: int
    geometry: Geometry
    transposed: bool = False
    output_padding: tuple[int, int] = (0, 0)

    def problem(self, role: str, deterministic: bool = False) -> Any:
        """The problem of one `role`, ``out``, ``x`` or ``weight``: what is computed; None if no
        kernel of ours is made for it."""
        directions = {"out": "fprop", "x": "dgrad", "weight": "wgrad"}
        image: Sequence[int] | None = self.x
        if self.transposed:
            directions |= {"out": "dgrad", "x": "fprop"}
            image = transposed_image(self.x, self.weight, self.geometry, self.output_padding)
        if image is None:
            return None
        epilogue: dict[str, Any] = {}
        if role == "weight":
            epilogue = {"bias": self.bias and not self.bias_apart, "deterministic": deterministic}
        elif role == "out" and not self.transposed:
            epilogue = {"bias": self.bias}
        problem = problem_of(
            directions[role], image, self.weight, self.dtype, self.geometry, **epilogue
        )
        if problem is None:
            return None
        output = (problem.n, problem.k, problem.p, problem.q)
        return None if self.transposed and output != self.x else problem

    @property
    def bias_apart(self) -> bool:
        """Whether the gradient of the bias is summed apart from that of the filter; a transposed
        convolution's bias is added to what is the input here."""
        return self.transposed or not sums_bias(self.geometry[3])

    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of ``aten::convolution``."""
        stride, padding, dilation, groups = self.geometry
        return stride, padding, dilation, self.transposed, self.output_padding, groups


Run = Callable[..., Any]


class Layer:
    """What serves a layer of one shape; None stands for PyTorch's own operator.

    Attributes:
        shape: of its tensors.
        out, x: the launches of the forward pass and of the input's gradient.
        weight: those of the filter's gradient, by whether it is to be deterministic.
        dtype: of all tensors.
        forward: called with dense x, weight and bias or None, of that dtype; the layer's output,
            without gradients.
        pays: whether it is worth the host's time in an eager step, and not in a CUDA graph alone.
    """

    __slots__ = (
        "_arguments",
        "_bias_apart",
        "_flip",
        "dtype",
        "forward",
        "out",
        "pays",
        "shape",
        "weight",
        "x",
    )

    def __init__(
        self, shape: Shape, out: Run | None, x: Run | None, weight: dict[bool, Run | None]
    ) -> None:
        self.shape, self.out, self.x, self.weight = shape, out, x, weight
        self.dtype = shape.dtype
        self.pays = True
        self._arguments = shape.arguments()
        self._flip, self._bias_apart = shape.transposed, shape.bias_apart
        self.forward = self._forward if out is None or shape.transposed else out

    def _forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.out is None:
            return pytorch_forward(x, weight, bias, *self._arguments)
        out: Tensor = self.out(x, weight)
        return out if bias is None else out.add_(bias.view(-1, 1, 1))

    def backward(self, out_grad: Tensor, x: Tensor, weight: Tensor, mask: Mask) -> Grads:
        """The gradients that `mask` asks for, None for the others; `x` and `weight` are dense."""
        run_x = self.x if mask[0] else None
        run_weight = self._weight() if mask[1] else None
        if run_x is None and run_weight is None:
            return self._theirs(out_grad, x, weight, mask)
        if not out_grad.is_contiguous(memory_format=CHANNELS_LAST):
            out_grad = dense(out_grad)
        if run_x is not None and run_weight is not None and not (mask[2] and self._bias_apart):
            pair = (x, out_grad) if self._flip else (out_grad, x)
            return run_x(out_grad, weight), *run_weight(*pair)
        grad_x = grad_weight = grad_bias = None
        if run_x is not None:
            grad_x = run_x(out_grad, weight)
        if run_weight is not None:
            pair = (x, out_grad) if self._flip else (out_grad, x)
            grad_weight, grad_bias = run_weight(*pair)
        left = (
            mask[0] and grad_x is None,
            mask[1] and grad_weight is None,
            mask[2] and grad_bias is None,
        )
        if True in left:
            theirs = self._theirs(out_grad, x, weight, left)
            grad_x = theirs[0] if left[0] else grad_x
            grad_weight = theirs[1] if left[1] else grad_weight
            grad_bias = theirs[2] if left[2] else grad_bias
        return grad_x, grad_weight, grad_bias if mask[2] else None

    def _weight(self) -> Run | None:
        deterministic = policy.is_deterministic()
        if deterministic not in self.weight:  # the switch was turned after the forward pass
            problem = self.shape.problem("weight", deterministic)
            found = policy.find_at_once(problem, self.shape.ordinal)
            self.weight[deterministic] = None if found is None else found.run
        return self.weight[deterministic]

    def _theirs(self, out_grad: Tensor, x: Tensor, weight: Tensor, mask: Mask) -> Grads:
        if mask == (False, False, True):
            return None, None, out_grad.sum((0, 2, 3))
        sizes = [out_grad.shape[1]] if mask[2] else None
        return pytorch_backward(out_grad, x, weight, sizes, *self._arguments, list(mask))


def find_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    geometry: Geometry,
    mask: Mask,
    transposed: bool = False,
    output_padding: tuple[int, int] = (0, 0),
) -> Layer | policy.Pending | None:
    """What serves a layer whose gradients `mask` asks for; None where PyTorch's own operator serves
    all of it.

    Args:
        x, weight, bias: as at the call; `weight` and `bias` are going to be cast to `dtype`.
        dtype: of the computation.
        geometry: stride, padding, dilation, groups.
        mask: which gradients are going to be asked for.
        transposed, output_padding: see `Shape`.
    """
    if not alike(x) or any(t is not None and t.device != x.device for t in (weight, bias)):
        return None
    if x.dtype is not dtype or not is_channels_last(x):
        return None
    channels = weight.shape[1] * geometry[3] if transposed else weight.shape[0]
    if bias is not None and bias.shape != (channels,):
        return None  # PyTorch says what is wrong
    shape = Shape(
        tuple(x.shape), tuple(weight.shape), bias is not None, dtype, x.get_device(),
        geometry, transposed, output_padding,
    )  # fmt: skip
    deterministic = policy.is_deterministic()
    problems = [
        shape.problem("out"),
        shape.problem("x") if mask[0] else None,
        shape.problem("weight", deterministic) if mask[1] else None,
    ]
    if all(problem is None for problem in problems):
        return None
    choices = policy.decide(problems, shape.ordinal)
    if isinstance(choices, policy.Pending):
        return choices
    if not any(choices):
        return None
    found = [c if c is None else policy.prepare(c, shape.ordinal) for c in choices]
    futures = [f for one in found if isinstance(one, policy.Pending) for f in one.futures]
    if futures:
        return policy.Pending(tuple(futures))
    ready = [one if isinstance(one, ReadyLaunch) else None for one in found]
    if not any(ready):
        return None
    out, dx, dw = (None if one is None else one.run for one in ready)
    layer = Layer(shape, out, dx, {deterministic: dw})
    if any(mask) or bias is None or any(one.is_plan for one in ready if one is not None):
        layer.pays = _pays(problems, ready, EAGER_TRAINING if any(mask) else EAGER, shape)
    return layer


def _pays(
    problems: Sequence[Any], ready: Sequence[ReadyLaunch | None], host: Host, shape: Shape
) -> bool:
    """Whether what is `ready` for some of `problems` saves as much as `host` asks."""
    choices = [one.choice for one in ready if one is not None]
    saved = policy.saves_ms(choices, shape.ordinal)
    if not host.more <= saved < host.much:  # what PyTorch's operators take makes no difference
        return saved >= host.much
    taken = [pytorch_ms(problem, shape.ordinal) for problem in problems if problem is not None]
    return saved >= host.least(sum(ms or 0.0 for ms in taken))


def backward(
    out_grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: Mask, place: Any
) -> Grads:
    """The gradients of a convolution of plain tensors of one dtype that `mask` asks for; `place`
    is what the caller is told by (`confpred.pytorch.choosing.latest`)."""
    place = place, x.shape
    facts = (geometry, mask, policy.is_deterministic())
    known = latest.get(place)
    if known is not None:
        serve, agrees, noted = known
        if noted == facts and agrees(out_grad, x, weight):
            return serve(out_grad, x, weight, mask)  # type: ignore[no-any-return]
    key = (
        x.shape,
        x.stride(),
        weight.shape,
        weight.stride(),
        x.dtype,
        weight.dtype,
        out_grad.dtype,
        x.get_device(),
        weight.get_device(),
        *facts,
    )
    try:
        serve = served[key]
    except KeyError:
        serve = _find_backward(key, x, weight, geometry, mask)
    if serve is None:
        serve = partial(_pytorchs, geometry)
    note(place, serve, (out_grad, x, weight), facts)
    grads: Grads = serve(out_grad, x, weight, mask)
    return grads


def _pytorchs(geometry: Geometry, out_grad: Tensor, x: Tensor, weight: Tensor, mask: Mask) -> Grads:
    stride, padding, dilation, groups = geometry
    sizes = [weight.shape[0]] if mask[2] else None
    return pytorch_backward(
        out_grad, x, weight, sizes, stride, padding, dilation, False, (0, 0), groups, list(mask)
    )


def _find_backward(key: Any, x: Tensor, weight: Tensor, geometry: Geometry, mask: Mask) -> Any:
    if weight.dtype is not x.dtype or key[6] is not x.dtype:
        return remember(key, None)
    bias = x.new_empty(weight.shape[0]) if mask[2] else None  # only its length counts
    found = find_layer(x, weight, bias, x.dtype, geometry, mask)
    if isinstance(found, policy.Pending):

        def again(_: Tensor, x: Tensor, weight: Tensor, mask: Mask) -> Any:
            return _find_backward(key, x, weight, geometry, mask)

        return remember(key, found.until_then(partial(_pytorchs, geometry), again))
    if found is None or is_dense(weight):
        return remember(key, found and found.backward)
    layer = found
    return remember(key, lambda grad, x, weight, mask: layer.backward(grad, x, dense(weight), mask))

"""`linear_chain`: linear layers one after the other, by what is predicted to be fastest within the
error that the caller allows.

    linear_chain --+-- gradients, torch.compile, autocast, CPU ----------> PyTorch's own operators
                   `-- the predictor for chains --+-- no model, or slower --> the same
                                                  `-- a program: kernels and products
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from confpred.cuda import driver
from confpred.errors import ConfpredError, InvalidInput, InvalidProblem
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.families.registry import all_families
from confpred.predict.choice import Choice
from confpred.problem.conv2d import ACTIVATIONS
from confpred.problem.limits import Limits
from confpred.problem.linear_chain import MOST_LAYERS, LinearChain
from confpred.problem.linear_chain_operation import LINEAR_CHAIN
from confpred.problem.operation import PREPARED, Launch
from confpred.problem.precision import allows_tf32
from confpred.pytorch import choosing
from confpred.pytorch.pointwise import activate
from confpred.pytorch.prepared import prepared, tracks_changes
from confpred.pytorch.programs import LoadedProgram
from confpred.pytorch.ready import ALIGNMENT, DTYPES

log = logging.getLogger(__name__)
_PLAIN = (Tensor, Parameter)
_MOST_KEPT = 4096
#: From a matrix, weights and biases, all of them as they must be, to the output.
Run = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
_served: dict[Any, Run | None] = {}  # None: PyTorch's own


def linear_chain(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    activation: str | None = "relu",
    last: bool = True,
    max_error: float | None = None,
    limits: Limits | None = None,
) -> Tensor:
    """``x = activation(torch.nn.functional.linear(x, weight, bias))`` for each weight and bias, in
    one call.

    Without gradients, on plain contiguous CUDA tensors of one dtype, what is predicted to be the
    fastest computes all layers together: PyTorch's own operators, products with bias and ReLU in
    their epilogue, or Strassen's algorithm where `max_error` allows it. The layers between have one
    width. Everything else goes to PyTorch's own operators, and so do chains that no model is there
    for (`confpred.use_predictor`). Float32 products use TF32 where PyTorch's are told to.

    Args:
        x: shape (..., features of the first weight).
        weights: each of shape (features after, features before).
        biases: one a weight, or None.
        activation: after each layer: None, ``"relu"``, ``"silu"``, ``"gelu"``, ``"relu6"`` or
            ``"hardswish"``.
        last: whether it follows the last layer too.
        max_error: largest relative error of the result in the 2-norm, against float64; None for
            that of PyTorch's own operators, which excludes Strassen's algorithm.
        limits: further limits; `max_error` takes the place of theirs.

    Returns:
        Shape (..., features of the last weight), of `x`'s dtype.

    Raises:
        InvalidInput: `activation`, `max_error` or `limits` is not allowed, there is no weight, or
            the biases are not as many as the weights.
        RuntimeError: PyTorch refuses the arguments.
    """
    name = "none" if activation is None else activation
    if name not in ACTIVATIONS:
        raise InvalidInput("activation", activation, f"None or one of {', '.join(ACTIVATIONS)}")
    if not weights:
        raise InvalidInput("weights", weights, "at least one weight")
    if biases is not None and len(biases) != len(weights):
        allowed = f"one for each of {len(weights)} weights, or None"
        raise InvalidInput("biases", f"{len(biases)} biases", allowed)
    bound = Limits() if limits is None else limits
    if not isinstance(bound, Limits):
        raise InvalidInput("limits", limits, "None or a confpred.Limits")
    bound = bound if max_error is None else replace(bound, max_error=max_error)
    for start in range(0, len(weights), MOST_LAYERS):
        part = slice(start, start + MOST_LAYERS)
        ends = part.stop >= len(weights)
        some = None if biases is None else biases[part]
        x = _part(x, weights[part], some, name, last or not ends, bound)
    return x


def _part(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    activation: str,
    last: bool,
    limits: Limits,
) -> Tensor:
    """A chain of at most ``MOST_LAYERS`` layers."""
    given = (x, *weights, *(biases or ()))
    if torch.compiler.is_compiling() or not _are_plain(given):
        return _pytorch(x, weights, biases, activation, last)
    key = (
        *((t.shape, t.dtype, t.get_device()) for t in given),
        biases is None,
        activation,
        last,
        limits,
        allows_tf32(),
    )
    try:
        run = _served[key]
    except KeyError:
        run = _find(x, weights, biases, activation, last, limits)
        if len(_served) < _MOST_KEPT:
            _served[key] = run
    if run is None or not _are_dense(given):
        return _pytorch(x, weights, biases, activation, last)
    if x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return _part(x, weights, biases, activation, last, limits)
    out = run(x.reshape(-1, x.shape[-1]), weights, biases or ())
    return out.view(*x.shape[:-1], out.shape[1])


def _are_plain(given: Sequence[Tensor]) -> bool:
    """Whether these are tensors of one CUDA device and one of our dtypes, and nobody wants their
    gradients or another dtype."""
    first = given[0]
    if not first.is_cuda or first.dtype not in DTYPES or torch.is_autocast_enabled("cuda"):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    ordinal, dtype = first.get_device(), first.dtype
    return all(type(t) in _PLAIN and t.dtype is dtype and t.get_device() == ordinal for t in given)


def _are_dense(given: Sequence[Tensor]) -> bool:
    return all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in given)


def problem_of(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    activation: str,
    last: bool,
) -> LinearChain | None:
    """What is asked, as a problem; None where the shapes are none of a chain's, or there is nothing
    to compute."""
    if x.dim() < 1 or x.numel() == 0 or any(w.dim() != 2 for w in weights):
        return None
    widths = [x.shape[-1], *(w.shape[0] for w in weights)]
    fits = all(w.shape[1] == before for w, before in zip(weights, widths, strict=False))
    if biases is not None:
        fits &= all(b.shape == (after,) for b, after in zip(biases, widths[1:], strict=True))
    between = set(widths[1:-1]) or {widths[-1]}
    if not fits or len(between) > 1:
        return None
    try:
        return LinearChain(
            batch=x.numel() // widths[0],
            inputs=widths[0],
            hidden=between.pop(),
            outputs=widths[-1],
            layers=len(weights),
            dtype=DTYPES[x.dtype],
            tf32=x.dtype is torch.float32 and allows_tf32(),
            activation=activation,
            bias=biases is not None,
            last=last,
        )
    except InvalidProblem:  # larger than any that is measured
        return None


def _find(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    activation: str,
    last: bool,
    limits: Limits,
) -> Run | None:
    """What serves such tensors; None for PyTorch's own operators."""
    problem = problem_of(x, weights, biases, activation, last)
    predictor = choosing.predictor_for(LINEAR_CHAIN.name)
    if problem is None or predictor is None:
        return None
    ordinal = x.get_device()
    try:
        choice = predictor.within(limits).choose(problem, driver.device_of(ordinal))
        choosing.announce(choice)
        return run_of(choice, ordinal) if choosing.is_ours(choice) else None
    except ConfpredError as error:
        log.warning("PyTorch's own operators: %s", error)
        return None


def run_of(choice: Choice, ordinal: int) -> Run | None:
    """What computes `choice`, compiled and loaded on CUDA device `ordinal`, its current one; None
    for PyTorch's own operators.

    Raises:
        CompileError, LaunchError, MissingExtra: a kernel cannot be had.
    """
    problem, candidate = choice.problem, choice.candidate
    if not isinstance(problem, LinearChain):
        raise InvalidProblem("problem", problem, "a chain of linear layers")
    if candidate == PYTORCH_OPERATOR:
        return None
    launch = all_families()[candidate.provider].launch(problem, candidate.config_id)
    return run_launch(problem, launch, ordinal)


def run_launch(problem: LinearChain, launch: Launch, ordinal: int) -> Run:
    """What computes `problem` by `launch` on CUDA device `ordinal`."""
    program = LoadedProgram(launch, ordinal)
    form = (problem.widths, problem.dtype, ordinal)
    needs = bool(launch.prepare)

    def run(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        operands = {"in": x}
        operands |= {f"weight{i}": weight for i, weight in enumerate(weights)}
        operands |= {f"bias{i}": bias for i, bias in enumerate(biases)}
        if needs:
            if not tracks_changes(weights):
                own = biases if biases else None
                return _pytorch(x, weights, own, problem.activation, problem.last)
            made = prepared(form, weights, lambda: program.prepared(operands))
            operands[PREPARED] = made
        out = x.new_empty(problem.batch, problem.outputs)
        operands["out"] = out
        program(operands)
        return out

    return run


def _pytorch(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    activation: str,
    last: bool,
) -> Tensor:
    """By PyTorch's own operators, which record gradients and are traced."""
    for index, weight in enumerate(weights):
        x = F.linear(x, weight, None if biases is None else biases[index])
        if last or index < len(weights) - 1:
            x = activate(activation, x)
    return x


def forget() -> None:
    """Choose again for every chain."""
    _served.clear()


choosing.when_forgotten(forget)
os.register_at_fork(after_in_child=forget)

"""`record_plan` and `prepare`: a network's choices as a plan, with compiled kernels or without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from confpred.cuda import driver
from confpred.cuda.compiler import compiled_files
from confpred.cuda.epilogue import epilogue_kernel
from confpred.errors import InvalidInput
from confpred.predict.choice import Choice
from confpred.predict.plan import Plan, plan_of, write_plan
from confpred.problem.device import Device, get_device
from confpred.problem.operation import KernelSpec
from confpred.pytorch.explain import capture
from confpred.pytorch.rewrite.sites import is_convolution
from confpred.pytorch.run import choosing, fold
from confpred.pytorch.run.pointwise import scale_shift_kernel


@contextmanager
def record_plan(path: str | Path, *, kernels: bool = False) -> Iterator[None]:
    """Record every choice that is made inside the block, by any thread, and write them to `path`
    as a plan when it ends.

    Earlier choices are made again, so that a network that has run before is recorded whole;
    compiled kernels stay. The plan is written whole or not at all, and not if the block raises.
    Ranks that record the same network write the same file, and the last one's stays.

    ::

        with confpred.enabled(), confpred.record_plan("plan.json"):
            loss(model(x)).backward()

    Args:
        path: the file to write, or the folder to make where kernels go along.
        kernels: let the compiled kernels go along, so that a start needs no compiler.

    Raises:
        InvalidInput: another recording to the same file is under way; or, when the block ends, no
            layer was seen on a CUDA device.
        CompileError, MissingExtra: see `confpred.cuda.compiler.compiled_files`.
        StorageError: see `confpred.predict.plan.write_plan`.
    """
    target = Path(path).resolve()
    seen: list[Choice] = []  # a list takes what several threads append
    with choosing.watch_choices(seen.append, target):
        yield
        if not seen:
            allowed = "a block in which a layer runs on a CUDA device; none was seen"
            raise InvalidInput("path", str(path), allowed)
        plan = plan_of(seen)
        write_plan(target, plan, kernels=_compile_kernels(plan) if kernels else None)


def prepare(
    model: nn.Module,
    example_inputs: Any,
    out: str | Path,
    *,
    device: str | Device | None = None,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Choose for every convolution and norm of `model`, and write a plan with the compiled kernels.

    The model is neither run nor changed, and no GPU is needed where `device` is given. Choices are
    for the shapes of `example_inputs`, as `confpred.optimize` makes them.

    ::

        confpred.prepare(model, torch.randn(32, 3, 224, 224).half(), "plan", device="h100")

    Args:
        model: the network.
        example_inputs: a tensor, a tuple or list of arguments, or a dictionary of them by name.
        out: the folder to make.
        device: the GPU that the plan is for, such as ``h100``; None: the current one.
        training: with the gradients.
        dtype: as of `confpred.explain`.

    Returns:
        The plan, which `confpred.use_plan` follows on machines with that GPU.

    Raises:
        InvalidInput: `model` has no layer that confpred has kernels for, or there is no current
            CUDA device.
        UnknownDevice: no description of the device is known.
        ConfpredError: the forward cannot be captured.
        CompileError, MissingExtra: see `confpred.cuda.compiler.compiled_files`.
        StorageError: see `confpred.predict.plan.write_plan`.
    """
    if device is None and not torch.cuda.is_available():
        raise InvalidInput("device", None, "a GPU, such as h100: there is no CUDA device")
    target = (
        get_device(device) if device is not None else driver.device_of(torch.cuda.current_device())
    )
    seen: list[Choice] = []
    with choosing.watch_choices(seen.append):
        capture(model, example_inputs, target, training=training, dtype=dtype)
    if not seen:
        raise InvalidInput("model", type(model).__name__, "a network with convolutions")
    plan = plan_of(seen)
    write_plan(Path(out), plan, kernels=_compile_kernels(plan))
    return plan


def further_kernels(choices: Iterable[Choice]) -> list[KernelSpec]:
    """Return the kernels of a captured network that compute no convolution: folds, epilogues."""
    kernels = [fold.KERNEL]
    for choice in choices:
        p = choice.problem
        if choice.family is None and is_convolution(p) and p.direction == "fprop":
            fields: dict[str, Any] = {"residual": p.residual, "activation": p.activation}
            has_epilogue = p.residual or p.activation != "none"
            kernels += [scale_shift_kernel(p.k, p.dtype, **fields)] * p.bias
            kernels += [epilogue_kernel(p.k, p.dtype, bias=p.bias, **fields)] * has_epilogue
    return list(dict.fromkeys(kernels))


def _compile_kernels(plan: Plan) -> dict[str, str | bytes]:
    return compiled_files([*plan.specs(), *further_kernels(plan.choices)], plan.arch)

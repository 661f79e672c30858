"""`prepare` and `load_bundle`: a network's choices and compiled kernels in one folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from confpred.cuda import driver
from confpred.cuda.epilogue import epilogue_kernel
from confpred.errors import InvalidInput
from confpred.predict.bundles import open_bundle, write_bundle
from confpred.predict.choice import Choice
from confpred.predict.plans import Plan, plan_of
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.problem.operation import KernelSpec
from confpred.pytorch import choosing, fold
from confpred.pytorch.explain import capture
from confpred.pytorch.pointwise import scale_shift_kernel


def prepare(
    model: nn.Module,
    example_inputs: Any,
    out: str | Path,
    *,
    device: str | Device | None = None,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Choose for every convolution of `model`, compile the chosen kernels, and write a bundle.

    The model is neither run nor changed, and no GPU is needed where `device` is given. Choices are
    for the shapes of `example_inputs`, as `confpred.optimize` makes them.

    ::

        confpred.prepare(model, torch.randn(32, 3, 224, 224).half(), "bundle", device="h100")

    Args:
        model: the network.
        example_inputs: a tensor, a tuple or list of arguments, or a dictionary of them by name.
        out: the folder to make.
        device: the GPU that the bundle is for, such as ``h100``; None: the current one.
        training: with the gradients.
        dtype: as of `confpred.explain`.

    Returns:
        The plan in the bundle.

    Raises:
        InvalidInput: `model` has no convolution that confpred has kernels for, or there is no
            current CUDA device.
        UnknownDevice: no description of the device is known.
        ConfpredError: the forward cannot be captured.
        CompileError, MissingExtra, StorageError: see `confpred.predict.bundles.write_bundle`.
    """
    known = _current_device() if device is None else get_device(device)
    recorder = capture(model, example_inputs, known, training=training, dtype=dtype)
    problems = [site.problem for site in recorder.sites if site.problem is not None]
    if not problems:
        raise InvalidInput("model", type(model).__name__, "a network with convolutions")
    plan = plan_of(choosing.current_predictor().choose_many(problems, known))
    write_bundle(plan, Path(out), further_kernels(plan.choices))
    return plan


def load_bundle(folder: str | Path) -> None:
    """Start from the bundle at `folder`, on the current CUDA device.

    Its choices are followed from now on, as after `confpred.use_predictor`, and its kernels are
    loaded without a compiler and without a write to the user's cache. Shapes that are not in it are
    chosen and compiled as without it.

    Raises:
        InvalidInput: there is no current CUDA device, or the bundle is for another device.
        DataError: it is no bundle, is damaged, or was made for other kernels.
    """
    choosing.use_predictor(open_bundle(Path(folder), _current_device()))


def further_kernels(choices: Iterable[Choice]) -> list[KernelSpec]:
    """Return the kernels of a captured network that are no convolutions."""
    found = [fold.KERNEL]
    for choice in choices:
        p = choice.problem
        if choice.family is None and isinstance(p, Problem) and p.direction == "fprop":
            told: dict[str, Any] = {"residual": p.residual, "activation": p.activation}
            found += [scale_shift_kernel(p.k, p.dtype, **told)] * p.bias
            found += [epilogue_kernel(p.k, p.dtype, bias=p.bias, **told)] * p.has_epilogue
    return list(dict.fromkeys(found))


def _current_device() -> Device:
    if not torch.cuda.is_available():
        raise InvalidInput("device", None, "a GPU, such as h100: there is no CUDA device")
    return driver.device_of(torch.cuda.current_device())

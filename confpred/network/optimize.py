"""`optimize` a network in place, and `revert` it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from confpred.cuda import driver
from confpred.errors import ConfpredError, InvalidInput, UnknownDevice
from confpred.network.bundle import epilogue_kernels
from confpred.network.forward import OptimizedForward, Settings
from confpred.network.instance_forward import InstanceForward, remove
from confpred.network.modules import is_convolution
from confpred.network.problems import CHANNELS_FIRST, LayerCall, as_arguments, network_problems
from confpred.network.tracing import convolutions_of, trace_parts
from confpred.network.training import is_trainable, train_together
from confpred.predict.predictor import Predictor
from confpred.pytorch.choosing import current_predictor, use_predictor
from confpred.pytorch.loading import compile_ahead

log = logging.getLogger("confpred")
Model = TypeVar("Model", bound=nn.Module)
#: Largest difference of the optimized output, as a part of the output's norm. A fold rounds the
#: filter once more, and another algorithm adds in another order.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-2,  # TF32 is PyTorch's default for convolutions
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}
_LAYOUTS = "_confpred_layouts"  # names of the parameters whose layout `optimize` has changed


def optimize(
    model: Model,
    example_inputs: Any = None,
    *,
    training: bool = False,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    channels_last: bool = True,
    plan: str | Path | None = None,
) -> Model:
    """Let `model` run its convolutions by the fastest kernels, in place.

    For inference, batch norm is folded into the convolution before it, and bias, residual and
    activation are computed by the same kernel, wherever the forward shows that they follow one
    another. The folded filters are copies beside the model: its parameters, its buffers and its
    ``state_dict`` stay as they are, and what is loaded into them or written to them is folded again
    at the next call. Only writing through ``.data`` in place (``weight.data.mul_(2)``) goes unseen,
    as PyTorch does not count it; so do a changed stride or epsilon of a layer, and what a replayed
    CUDA graph writes: call `optimize` again after these.

    The model computes as before, at its former speed, where the optimized forward would be wrong:
    in ``train()`` mode, where gradients are recorded (logged once as a warning), under
    ``torch.func`` transforms, ``torch.jit.trace`` and dispatch modes, with tensor subclasses, and
    when arguments that have defaults are given. Other methods than the forward are not touched.
    Modules with hooks or parametrisations are called as they are. A submodule that is replaced, and
    a hook that is added, are seen at the next call. ``copy.deepcopy`` and a pickle of the model
    are optimized too. Revert the model before ``torch.jit.script`` and ``nn.DataParallel``.

    For training, the convolutions for which one of our kernels is expected to win compute their
    output and their gradients by it; nothing is folded. Under autocast the weights of convolutions
    and linear layers are cast together, some dozen layers at a time, and so are their gradients;
    the batch norms' counts of steps are raised together.

    Args:
        model: the network; on the device and of the dtype that it is to run with.
        example_inputs: a tensor, a tuple or list of positional arguments, or a dictionary of
            arguments by name. With it, all choices are made and their kernels compiled now, and,
            for inference, the outputs of the optimized and of the original model are compared, and
            ``torch.compile`` knows what the layers take when it decides which are ours.
        training: whether the model is to train; its mode is not changed.
        filter_fn: called once with each convolution and its name, for training with each linear
            layer and batch norm too; False leaves it alone.
        channels_last: bring filters and inputs into that layout, which our kernels need.
        plan: a file of pinned configs, which are used in place of predictions.

    Returns:
        `model` itself.

    Raises:
        InvalidInput: `model` is no module, or one that was compiled; `filter_fn` is not callable.
        DataError: `plan` is not a valid file.
        ConfpredError: the optimized model does not compute what the original does; it has been
            reverted.
    """
    _check(model, filter_fn)
    revert(model)
    if plan is not None:
        use_predictor(Predictor.load(pins=plan))
    touched = is_trainable if training else is_convolution
    refused = frozenset(
        name
        for name, module in model.named_modules()
        if filter_fn is not None and touched(module) and not filter_fn(module, name)
    )
    if channels_last:
        _to_channels_last(model)
    calls = _layer_calls(model, example_inputs, training)
    if training:
        train_together(model, refused)
    else:
        layers = tuple(call.problem for call in calls if call.problem is not None)
        settings = Settings(refused, channels_last, layers)
        convolutions = convolutions_of(model, lambda _, name: name not in refused)
        for part in list(trace_parts(model, convolutions)):
            OptimizedForward.install(part.module, settings.within(part.name))
    if example_inputs is not None:
        _compile(model, calls)
        if not training:
            _verify(model, example_inputs)
    return model


def revert(model: Model) -> Model:
    """`model` as it was before `optimize`; one that is not optimized is returned as it is.

    Raises:
        InvalidInput: `model` is no module.
    """
    _check(model, None)
    remove(model)
    changed = frozenset(model.__dict__.pop(_LAYOUTS, ()))
    for name, parameter in model.named_parameters():
        if name in changed:
            with torch.inference_mode(False):
                parameter.data = parameter.data.contiguous()
    return model


def _check(model: object, filter_fn: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", model, "a torch.nn.Module")
    if "_orig_mod" in model._modules:
        raise InvalidInput("model", type(model).__name__, "a module that was not compiled yet")
    if filter_fn is not None and not callable(filter_fn):
        raise InvalidInput("filter_fn", filter_fn, "a function of a module and its name, or None")


def _to_channels_last(model: nn.Module) -> None:
    filters = {
        id(module.weight): module.weight
        for module in model.modules()
        if is_convolution(module) and isinstance(module.weight, nn.Parameter)
    }
    names = []
    for name, parameter in model.named_parameters():
        if id(parameter) in filters and parameter.is_contiguous():
            if parameter.is_contiguous(memory_format=torch.channels_last):
                continue
            with torch.inference_mode(False):  # a tensor made in that mode does not count changes
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            names.append(name)
    model.__dict__[_LAYOUTS] = tuple(names)


def _ordinal(model: nn.Module) -> int | None:
    """The CUDA device of `model`; None for another."""
    first = next(model.parameters(), None)
    return first.device.index if first is not None and first.is_cuda else None


def _layer_calls(model: nn.Module, example_inputs: Any, training: bool) -> list[LayerCall]:
    """The convolutions of `model`; none where they are left to the first call, as without example
    inputs or a GPU."""
    if example_inputs is None or _ordinal(model) is None:
        return []
    try:
        return list(network_problems(model, example_inputs, training=training))
    except ConfpredError as error:
        log.warning("choices are made at the first call: %s", error)
        return []


def _compile(model: nn.Module, calls: Sequence[LayerCall]) -> None:
    """Compile what is chosen for `calls`, all in one batch, but for those that cannot be ours."""
    ordinal, possible = _ordinal(model), (None, CHANNELS_FIRST)  # which may be converted
    layers = [c.problem for c in calls if c.problem is not None and c.hindrance in possible]
    if ordinal is None or not layers:
        return
    try:
        choices = current_predictor().choose_many(layers, driver.device_of(ordinal))
    except UnknownDevice:
        return
    except ConfpredError as error:
        log.warning("choices are made at the first call: %s", error)
        return
    compile_ahead(choices, epilogue_kernels(choices), ordinal)


def _verify(model: nn.Module, example_inputs: Any) -> None:
    """
    Raises:
        ConfpredError: the optimized `model` computes something else than the original one, in
            evaluation; it has been reverted.
    """
    forwards = {
        module: module.__dict__["forward"]
        for module in model.modules()
        if isinstance(module.__dict__.get("forward"), InstanceForward)
    }
    args, kwargs = as_arguments(example_inputs)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.inference_mode():
            ours = _outputs(model, args, kwargs)
            for module in forwards:
                del module.__dict__["forward"]
            theirs = _outputs(model, args, kwargs)
            difference = _largest_difference(ours, theirs, TOLERANCE)
            if difference is not None:
                # A network may make much of any rounding, as one with random filters can.
                nearby = _outputs(model, args, kwargs, noise=True)
                if _largest_difference(nearby, theirs, TOLERANCE) is not None:
                    log.warning(
                        "the outputs of the optimized %s cannot be judged, as the model makes much"
                        " of any rounding of these inputs: %s",
                        type(model).__name__,
                        difference,
                    )
                    difference = None
    finally:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        for module, mode in modes:
            module.training = mode
    if difference is not None:
        revert(model)
        raise ConfpredError(f"the optimized {type(model).__name__} was reverted: {difference}")


def _outputs(model: nn.Module, args: Any, kwargs: Any, noise: bool = False) -> list[Tensor]:
    """The tensors that `model` returns; with `noise`, of inputs that differ by some roundings."""

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if noise and x.is_floating_point():
            return x * (1 + 4 * torch.finfo(x.dtype).eps * torch.randn_like(x))
        return x.clone()

    args, kwargs = _pytree.tree_map(copied, (args, kwargs))
    leaves, _ = _pytree.tree_flatten(model(*args, **kwargs))
    return [x for x in leaves if isinstance(x, Tensor)]


def _largest_difference(
    ours: list[Tensor], theirs: list[Tensor], tolerance: Mapping[torch.dtype, float]
) -> str | None:
    """What is wrong with `ours`, in words; None if nothing is."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return "its outputs have other shapes"
    for mine, other in zip(ours, theirs, strict=True):
        if mine.dtype is not other.dtype:
            return f"its output is of {mine.dtype} and not of {other.dtype}"
        if not other.is_floating_point():
            if not torch.equal(mine, other):
                return "an output of whole numbers differs"
            continue
        a, b = mine.double(), other.double()
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return "a number is infinite in one output alone"
        off = torch.where(finite, a - b, 0.0)
        size = torch.where(finite, b, 0.0).norm()
        if off.norm() > tolerance.get(other.dtype, 1e-1) * size:
            return (
                f"the largest difference is {off.abs().max().item():.3g}, in an output of"
                f" magnitude {torch.where(finite, b, 0.0).abs().max().item():.3g}"
            )
    return None

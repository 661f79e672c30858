"""`optimize` and `revert`: a network captured by PyTorch, with confpred's choices, in place."""

from __future__ import annotations

import itertools
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.exc import TorchDynamoException
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.jit import _recursive
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from confpred.errors import ConfpredError, InvalidInput, first_line
from confpred.pytorch.backend import confpred
from confpred.pytorch.run.choosing import warn_of, warn_once
from confpred.pytorch.run.options import Options
from confpred.pytorch.status import Calls, show_in_repr

log = logging.getLogger("confpred")
Model = TypeVar("Model", bound=nn.Module)
#: An attribute of modules whose value PyTorch calls in place of `_call_impl`, and the code of the
#: method that calls it.
_CALL, _CALLER = "_compiled_call_impl", nn.Module._wrapped_call_impl.__code__
_frames = itertools.count()
#: Largest difference of the optimized output, as a part of the output's norm. A fold rounds once
#: more or once less, and another algorithm adds in another order.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-2,  # TF32 is PyTorch's default for convolutions
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
    torch.complex128: 1e-6,
    torch.complex64: 1e-2,
}


def optimize(
    model: Model, example_inputs: Any = None, *, dynamic: bool | None = None, **options: Any
) -> Model:
    """Let `model` run as a captured graph with the fastest kernels, in place.

    PyTorch captures the forward, and the backward where gradients are recorded; confpred chooses
    for every convolution, fuses what follows it in inference, and the whole becomes a CUDA graph.
    One call serves inference and training. Names, parameters, buffers and ``state_dict`` stay as
    they are, and every write to a weight is seen. `revert` undoes it; a copy or a pickle of the
    model is not optimized.

    ::

        confpred.optimize(model.eval(), images)
        with torch.no_grad():
            model(images)

    Args:
        model: the network; on the device and of the dtype that it is to run with, best with
            ``model.to(memory_format=torch.channels_last)``.
        example_inputs: a tensor, a tuple or list of positional arguments, or a dictionary of
            arguments by name. With it, the network is captured and compiled now, under the gradient
            and autocast modes in force, and its outputs (in training its gradients, too) are
            compared with the original's. Without it the first call captures.
        dynamic: as of ``torch.compile``: None lets a size that changes become an open one.
        options: ``inductor``, ``graphs``, ``freeze``, ``verify``, ``max_regret``, ``limits`` and
            ``tune``, as in `confpred.pytorch.run.options.Options`.

    Returns:
        `model` itself.

    Raises:
        InvalidInput: `model` is not a ``torch.nn.Module``, or an option is not allowed.
        ConfpredError: the network cannot be captured, or its outputs differ; it is left unchanged.
    """
    _check(model)
    Options.of(options)
    former, calls = model._compiled_call_impl, Calls()
    backend = partial(confpred, calls=calls)
    # PyTorch clears its weak references to tensors, which forbid `swap_tensors`, by this name.
    backend.__name__ = "confpred"  # type: ignore[attr-defined]

    def capture() -> Callable[..., Any]:
        frame = own_frame(model)
        return torch.compile(frame, backend=backend, dynamic=dynamic, options=dict(options))

    made = _Optimized(model, capture, calls)
    model._compiled_call_impl = made
    if example_inputs is not None:
        try:
            args, kwargs = as_arguments(example_inputs)
            if not _subclass_in(args, kwargs):
                _compare(model, made, args, kwargs)
        except BaseException as error:
            model._compiled_call_impl = former
            if isinstance(error, ConfpredError) or not isinstance(error, Exception):
                raise
            raise ConfpredError(f"{type(model).__name__} is unchanged: {error}") from error
    _watch_parts(model, calls)
    show_in_repr()
    if _CALL not in _recursive.ignored_attributes:  # TorchScript knows no type of it
        _recursive.ignored_attributes.append(_CALL)
    return model


def revert(model: Model) -> Model:
    """Undo `optimize`, if it was called; raise `InvalidInput` if `model` is no module."""
    _check(model)
    model._compiled_call_impl = None
    _unwatch_parts(model)
    return model


def as_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments from a tensor, a tuple or list, or a dictionary."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    allowed = "a tensor, a tuple or list of arguments, or a dictionary of them by name"
    raise InvalidInput("example_inputs", example_inputs, allowed)


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", model, "a torch.nn.Module")
    if "_orig_mod" in model._modules:
        raise InvalidInput("model", type(model).__name__, "a module that was not compiled yet")


class _Call:
    """A call of a module that PyTorch makes in place of its own.

    It belongs to one module: PyTorch finds it in a copy with the same attributes, too, such as a
    replica of ``DataParallel``, which runs in eager mode. A deep copy or a pickle of it is None.
    """

    run: Callable[..., Any]

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if not _is_traced():
            # PyTorch does not pass the module that is called.
            if (caller := sys._getframe(1)).f_code is _CALLER:
                module = caller.f_locals["self"]
            if module is self._module:
                return self.run(*args, **kwargs)
        return module._call_impl(*args, **kwargs)

    def __reduce__(self) -> Any:
        return type(None), ()


class _Optimized(_Call):
    """The function that runs an optimized model: its captured forward, or the model itself.

    Dynamo's guards miss new classes of modules (before PyTorch 2.13), new methods of a class, and
    hooks for all modules: these make it call `capture` again. A captured function refuses to run
    while another thread traces, so calls wait for that.

    The model itself runs under forward-mode differentiation, while something else traces it, and
    for tensors of other classes, and for good if it cannot be captured.
    """

    def __init__(self, model: nn.Module, capture: Callable[[], Any], calls: Calls) -> None:
        super().__init__(model)
        self._capture, self.calls, self.is_watched = capture, calls, True
        self._by_mode: list[Callable[..., Any]] = [capture(), capture()]
        self._note_modules({})

    def call_captured(self, *args: Any, **kwargs: Any) -> Any:
        """Call the captured forward of the model's mode: a validation opens no size of training."""
        self.calls.is_training = mode = self._module.training
        return self.calls.of(self._by_mode[mode], *args, **kwargs)

    def _note_modules(self, kinds: dict[type, list[str]]) -> None:
        """Keep the modules that captures have read; `kinds` are classes of earlier ones, with the
        names of their methods."""
        self._modules = tuple(self._module.modules())
        self._kinds = kinds | {type(module): _methods_of(type(module)) for module in self._modules}
        self._code = _code_of(self._modules, self._kinds)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        calls, model = self.calls, self._module
        if self.is_watched:
            self.is_watched = False
            _unwatch_parts(model)
        if _code_of(self._modules, self._kinds) != self._code:
            calls.failed, self._by_mode = "", [self._capture(), self._capture()]
            self._note_modules({})
        if kind := _subclass_in(args, kwargs):
            warn_once(f"{type(model).__name__} runs in eager mode for inputs of class {kind}")
        if calls.failed or kind:
            return model._call_impl(*args, **kwargs)
        with convert_frame.compile_lock:
            pass
        graphs = calls.graphs
        try:
            return self.call_captured(*args, **kwargs)
        except Exception as error:
            if not _is_of_capture(error):
                raise
            reason = error
        finally:
            if calls.graphs > graphs:  # of modules that are new, too
                self._note_modules(self._kinds)
        results = model._call_impl(*args, **kwargs)  # or the error of eager mode
        calls.failed = first_line(getattr(reason, "inner_exception", reason))
        warn_of(reason, "its capture", f"{type(model).__name__} runs in eager mode")
        return results


class _Part(_Call):
    """The call of a module inside an optimized model, until the model is called: it warns where the
    module runs alone."""

    def __init__(self, model: nn.Module, name: str, module: nn.Module, calls: Calls) -> None:
        super().__init__(module)
        # `calls` would mark the part as optimized, for `confpred.status`.
        self._model, self._name, self.of = model, name, calls

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.of.outside:
            self.of.outside, kind = self._name, type(self._model).__name__
            log.warning(
                "%s was optimized, but its part %s runs outside of its call, as in eager mode:"
                " call the model itself, or optimize the part", kind, self._name,
            )  # fmt: skip
            _unwatch_parts(self._model)
        return self._module._call_impl(*args, **kwargs)


def _watch_parts(model: nn.Module, calls: Calls) -> None:
    """Notice where a module of `model` runs before the model is called."""
    for name, module in model.named_modules():
        if module._compiled_call_impl is None or _is_part(module):
            module._compiled_call_impl = _Part(model, name, module, calls)


def _unwatch_parts(model: nn.Module) -> None:
    for module in model.modules():
        if _is_part(module):
            module._compiled_call_impl = None


def _is_part(module: nn.Module) -> bool:
    return type(module._compiled_call_impl) is _Part


def _methods_of(kind: type) -> list[str]:
    """Return names of methods of a class of modules that a forward may call: all but PyTorch's."""
    others = [
        name for base in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, value in vars(base).items()
        if isinstance(value, (types.FunctionType, classmethod))
        and ("forward" in name or not base.__module__.startswith("torch."))
    ]  # fmt: skip
    return list({"forward", *others})


def _code_of(modules: Sequence[nn.Module], kinds: dict[type, list[str]]) -> tuple[Any, ...]:
    """Return what no guard of Dynamo checks: classes of `modules`, methods of `kinds`, and hooks
    for all modules."""
    hooks = (
        module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks,
        module_hooks._global_backward_pre_hooks, module_hooks._global_backward_hooks,
    )  # fmt: skip
    methods = [getattr(kind, name, None) for kind, names in kinds.items() for name in names]
    return tuple(map(type, modules)), methods, list(map(list, hooks))


def _is_of_capture(error: Exception) -> bool:
    """Return whether a capture has failed with `error`: Dynamo passes some on as they are."""
    codes = (frame.f_code for frame, _ in walk_tb(error.__traceback__))
    files = (code.co_filename for code in codes)
    return isinstance(error, TorchDynamoException) or convert_frame.__file__ in files


def _is_traced() -> bool:
    """Return whether forward-mode differentiation is on, or something other than `optimize` traces
    a call."""
    return (
        torch.compiler.is_compiling()  # or exports; first, as Dynamo reads no further
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None  # of torch.jit
        or proxy_tensor.get_proxy_mode() is not None
    )


def _subclass_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the class of an argument that a capture does not keep, or an empty text: Dynamo
    returns plain tensors for it, and PyTorch 2.13 raises an error at the first call."""
    if all(type(x) is Tensor for x in (*args, *kwargs.values())):  # a tenth of the time
        return ""
    leaves = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    others = [x for x in leaves if type(x) not in (Tensor, nn.Parameter)]
    return next((type(x).__name__ for x in others if not is_traceable_wrapper_subclass(x)), "")


def own_frame(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls `model`, with code and a name of its own.

    Dynamo keeps a limited number of graphs for each code object, and looks into no function of
    ``torch.nn``: many models of one class, or of PyTorch's containers alone, need their own frame.
    It also leaves sizes open that differ between calls of one name and line.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{next(_frames)}")
    return types.FunctionType(code, call.__globals__, "call", None, call.__closure__)


def _compare(
    model: nn.Module, made: _Optimized, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise a `ConfpredError` where the results of `made` differ from those of the original `model`
    on copies of these inputs. Lazy layers get their sizes first, and a last call lets CUDA graphs
    be recorded."""
    call, name = model._compiled_call_impl, type(model).__name__
    try:
        model._compiled_call_impl = None
        _initialize(model, args, kwargs)
        model._compiled_call_impl = made.call_captured
        try:
            outputs = _results(model, args, kwargs)
        except TorchDynamoException:
            model._compiled_call_impl = None
            _results(model, args, kwargs)  # where eager mode fails, too, its error is plainer
            raise
        for reason in made.calls.breaks[:1]:
            log.warning("%s is captured in parts, cut where: %s", name, reason)
        model._compiled_call_impl = None
        expected = _results(model, args, kwargs)
        difference = _describe_difference(outputs, expected)
        if difference is not None:
            # A network may amplify rounding, or draw random numbers.
            nearby = _results(model, args, kwargs, noise=True)
            if _describe_difference(nearby, expected) is not None:
                log.warning(
                    "the outputs of %s cannot be compared, as they change with any rounding of"
                    " the inputs: %s", name, difference,
                )  # fmt: skip
                difference = None
        model._compiled_call_impl = made.call_captured
        _results(model, args, kwargs)  # a CUDA graph is recorded at the second captured call
    finally:
        model._compiled_call_impl = call
    if difference is not None:
        raise ConfpredError(f"{name} is unchanged: {difference}")


def _initialize(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Let lazy layers of `model` take the sizes of these inputs."""
    if not any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        return
    training = [module for module in model.modules() if module.training]
    with torch.no_grad():
        model.eval()
        model(*args, **kwargs)
    for module in training:
        module.training = True


def _flat(holder: Any) -> list[Any]:
    return [*holder, *holder.values()] if isinstance(holder, dict) else list(holder)


def _contents_of(model: nn.Module) -> list[tuple[Any, list[Any]]]:
    """Return the attributes of a model's modules, and the dictionaries, lists, tuples and sets in
    them, each with a list of what it has."""
    holders: list[Any] = [vars(m) for m in model.modules()]
    seen, contents = set(map(id, holders)), []
    for holder in holders:  # more are added
        values = _flat(holder)
        contents.append((holder, values))
        inner = [v for v in values if isinstance(v, (dict, list, tuple, set, deque))]
        holders += [v for v in {id(v): v for v in inner}.values() if id(v) not in seen]
        seen.update(map(id, inner))
    return contents


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Return parameters, buffers and plain tensors of a model and its modules."""
    leaves = (x for _, values in _contents_of(model) for x in values)
    return list({id(x): x for x in leaves if isinstance(x, Tensor)}.values())


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the tensors and attributes of `model` at the end of the block, the content of its
    lists, dictionaries and sets, and the random numbers of Python, NumPy and PyTorch."""
    writable = [
        x for x in _tensors_of(model)
        if not x.is_inference() and torch._debug_has_internal_overlap(x) != 1  # 1: yes
    ]  # fmt: skip
    tensors = [(x, x.detach().clone()) for x in writable]
    contents = _contents_of(model)
    former = [
        (holder, dict(holder) if isinstance(holder, dict) else values)
        for holder, values in contents if not isinstance(holder, tuple)
    ]  # fmt: skip
    leaves = [x for _, values in contents for x in values]
    generators = [(x, x.get_state()) for x in leaves if isinstance(x, torch.Generator)]
    of_python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy:
                numpy.random.set_state(of_numpy)
            for generator, state in generators:
                generator.set_state(state)
            for holder, content in former:
                now, before = _flat(holder), _flat(content)
                if len(now) == len(before) and all(map(is_, now, before)):
                    continue  # others may read it
                holder.clear()
                (holder.extend if isinstance(holder, (list, deque)) else holder.update)(content)
            with torch.no_grad():
                for x, then in tensors:
                    x.copy_(then)


def _results(model: nn.Module, args: Any, kwargs: Any, noise: bool = False) -> list[Tensor]:
    """Return the tensors that `model` returns and, if recorded, the gradients of its parameters as
    one vector; with `noise`, of inputs that differ by some roundings. The model is left unchanged.
    """

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if noise and x.is_floating_point():
            return x * (1 + 4 * torch.finfo(x.dtype).eps * torch.randn_like(x))
        return x.detach().clone()

    with _unchanged(model):
        args, kwargs = _pytree.tree_map(copied, (args, kwargs))
        learned = [x for x in _tensors_of(model) if x.requires_grad and x.is_leaf]
        leaves = _pytree.tree_leaves(model(*args, **kwargs))
        outputs = [x for x in leaves if isinstance(x, Tensor)]
        recorded = [x for x in outputs if x.requires_grad]
        results = [x.detach().clone() for x in outputs]
        if recorded and learned:
            heads = [torch.full_like(x, 1.0 / max(1, x.numel())) for x in recorded]
            grads = torch.autograd.grad(recorded, learned, heads, allow_unused=True)
            # Together: a gradient that is zero by arithmetic is nothing but rounding.
            on = recorded[0].device
            flat = [g.detach().to(on).float().flatten() for g in grads if g is not None]
            results += [torch.cat(flat)] if flat else []
    return results


def _describe_difference(outputs: list[Tensor], expected: list[Tensor]) -> str | None:
    """Return how `outputs` differ from `expected`, in words; None if they do not."""
    if [x.shape for x in outputs] != [x.shape for x in expected]:
        return "its outputs have other shapes"
    for actual, other in zip(outputs, expected, strict=True):
        if actual.dtype is not other.dtype:
            return f"an output is of {actual.dtype} and not of {other.dtype}"
        if not (other.is_floating_point() or other.is_complex()):
            if not torch.equal(actual, other):
                return "an output of whole numbers differs"
            continue
        wide = torch.complex128 if other.is_complex() else torch.float64
        a, b = actual.to(wide), other.to(wide)
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return "a number is infinite in one output alone"
        off, size = torch.where(finite, a - b, 0.0).norm(), torch.where(finite, b, 0.0).norm()
        # The coarsest dtype counts, as gradients of all dtypes are joined in float32.
        if off > max(TOLERANCE.get(t.dtype, 1e-1) for t in outputs) * size:
            return f"an output of norm {size.item():.3g} is {off.item():.3g} off"
    return None

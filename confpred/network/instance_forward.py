"""A forward that is kept on one module, in place of its class's, and goes where the module goes."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from torch import nn

from confpred.pytorch.quiet import MARK

Self = TypeVar("Self", bound="InstanceForward")
_installed: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


class InstanceForward:
    """A callable that is stored as ``forward`` on a module.

    It does not keep the module alive. A deep copy or a pickle of the module gets one of its own,
    made from the same `settings`; loading such a pickle needs confpred.
    """

    def __init__(self, module: nn.Module, settings: Any) -> None:
        self._module = weakref.ref(module)
        self._settings = settings

    @classmethod
    def install(cls: type[Self], module: nn.Module, settings: Any = None) -> Self:
        made = cls(module, settings)
        module.__dict__["forward"] = made
        return made

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class does."""
        module = self._module()
        return type(module).forward(module, *args, **kwargs)  # type: ignore[union-attr]

    @property
    def __code__(self) -> Any:
        """The class's, which ``torch.export`` looks at."""
        return type(self._module()).forward.__code__  # type: ignore[union-attr]

    @property
    def __signature__(self) -> inspect.Signature:
        module = self._module()
        bound = types.MethodType(type(module).forward, module)  # type: ignore[union-attr]
        return inspect.signature(bound)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        module = self._module()
        copied = memo.get(id(module))
        if copied is None:  # this callable is copied alone: its module has to come along
            copied = deepcopy(module, memo)
            found: Self = copied.__dict__["forward"]
            return found
        return type(self)(copied, self._settings)

    def __reduce__(self: Self) -> tuple[type[Self], tuple[Any, Any]]:
        return type(self), (self._module(), self._settings)


def install_method(module: nn.Module, function: Callable[..., Any]) -> None:
    """Keep `function`, called ``forward``, on `module` as its method. A deep copy of the module
    gets the same; a pickle gets the forward of its class."""
    _installed.add(function)
    module.__dict__["forward"] = types.MethodType(function, module)


def forget_method(module: nn.Module) -> None:
    """Take what `install_method` put on `module`, or on what it was unpickled from, off it."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    if function is not None and (function in _installed or function is type(module).forward):
        del module.__dict__["forward"]


def remove(model: nn.Module) -> None:
    """Take every `InstanceForward` and every method off `model`, and what its layers count."""
    for module in model.modules():
        module.__dict__.pop(MARK, None)
        forget_method(module)
        if isinstance(module.__dict__.get("forward"), InstanceForward):
            del module.__dict__["forward"]

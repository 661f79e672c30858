"""What Inductor writes into its programs for an operator of ours: a plain call of Python.

By itself it writes a call of the operator. Through PyTorch's dispatcher that takes the host a
microsecond for each argument and more, and the launch behind it takes three; a program of Inductor
has nothing that the dispatcher would be needed for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)
#: By operator, the name of the function that is called in its place.
_functions: dict[Any, str] = {}
_taught: set[Any] = set()


def call_in_programs(operator: Any, function: Callable[..., Any]) -> None:
    """Have programs call `function`, which takes plain tensors and what else `operator` takes, and
    returns what `operator` returns, with the strides that were promised."""
    name = f"{operator.name().partition('::')[2]}_in_programs"
    # Programs are text, in which `torch.ops` is known.
    setattr(torch.ops.confpred, name, function)
    _functions[operator] = f"torch.ops.confpred.{name}"


def teach() -> None:
    """Tell Inductor, if it is at work in this process. Where this PyTorch has another way of making
    programs, they call the operators."""
    if "torch._inductor.lowering" not in sys.modules:  # importing it takes seconds
        return
    for operator in _functions.keys() - _taught:
        _taught.add(operator)
        try:
            _teach(operator, _functions[operator])
        except (AttributeError, ImportError, TypeError) as error:
            log.debug("compiled programs call %s: %s", operator, error)


def _teach(operator: Any, function: str) -> None:
    from torch._inductor import ir, lowering

    # The strides that the operator was traced with: kernels of ours read one layout.
    lowering.make_fallback(operator, lowering.constrain_to_fx_strides, warn=False)
    lower = lowering.lowerings[operator]

    def lower_to_function(*args: Any, **kwargs: Any) -> Any:
        outputs = lower(*args, **kwargs)
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            while hasattr(output, "data"):  # boxes
                output = output.data
            kernel = next(iter(getattr(output, "inputs", ())), None)
            if isinstance(kernel, ir.FallbackKernel):
                kernel.python_kernel_name = function
        return outputs

    lowering.lowerings[operator] = lower_to_function

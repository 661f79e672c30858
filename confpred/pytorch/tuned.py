"""``@confpred.tuned`` in place of ``@triton.autotune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confpred.errors import MissingExtra
from confpred.triton.triton_family import Choices, Functions

if TYPE_CHECKING:
    import torch

    from confpred.pytorch.autotuner import Tuned


def tuned(
    configs: Sequence[Any],
    key: Sequence[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    *,
    model: str | Path | None = None,
    top_k: int = 1,
    transfer: bool = False,
    keep: str | Path | None = None,
    example: Callable[..., object] | None = None,
    reference: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    features: Functions | None = None,
    choices: Choices | None = None,
    name: str | None = None,
    **autotune: Any,
) -> Callable[[Any], Tuned]:
    """Decorate a kernel of ``triton.jit``, or of ``triton.heuristics``: a model chooses its config.

    Where no model does, the kernel is tuned as by ``triton.autotune``, and a log line says why. The
    model is read at the first call.

    Args:
        configs, key, prune_configs_by, reset_to_zero, restore_value: as of ``triton.autotune``. The
            values of `key` must be integers, truth values or of `choices`, or no model is asked.
            Strides in `key` have ``stride`` in their names. The members ``perf_model`` and
            ``top_k`` of `prune_configs_by` count only where no model does.
        model: folder of a model for this kernel, or of several, one a GPU model; a relative one
            lies beside the file of the kernel.
        top_k: how many of the first predicted configs to time at a new shape; 1 times none.
        transfer: whether to take a model of another GPU model, or of another version of Triton. A
            model of another kernel source is never taken.
        keep: folder of measurements for ``confpred train``, which gets what is timed at new shapes.
        example: calls the kernel once, given the values of `key` and ``dtype`` by name; for
            ``confpred sample``.
        reference: computes what the kernel should, given the arguments of the example's call by
            name, and returns the right contents of its outputs by name; for ``confpred sample``.
        features: functions of the values of `key` and of the config by name, further features.
        choices: the values of each name of `key` that has texts or dtypes.
        name: of the kernel, if two have one.
        autotune: further arguments of ``triton.autotune``.

    Raises:
        MissingExtra: Triton is not installed.
        InvalidInput: `top_k` is below 1.
    """
    try:
        from confpred.pytorch.autotuner import Tuned
    except ImportError as error:
        if error.name and error.name.partition(".")[0] == "triton":
            raise MissingExtra("triton", "gpu") from error
        raise

    def decorate(kernel: Any) -> Tuned:
        return Tuned(
            kernel,
            configs,
            key,
            model=model,
            top_k=top_k,
            transfer=transfer,
            keep=keep,
            example=example,
            reference=reference,
            features=features,
            choices=choices,
            name=name,
            prune_configs_by=prune_configs_by,
            reset_to_zero=reset_to_zero,
            restore_value=restore_value,
            **autotune,
        )

    return decorate

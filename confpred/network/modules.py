"""What a module is to us: a convolution, a norm, an activation, nothing in evaluation, or opaque.

Modules of other packages are recognised by what they have, so that none has to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from confpred.pytorch.layers import Geometry

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.ReLU6: "relu6",
    nn.Hardswish: "hardswish",
}
_IDENTITIES = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")
#: Training counts its steps here. It moves mean and variance in a way that does not raise their
#: versions, so that this count is what tells of it.
STEPS = "num_batches_tracked"


def is_plain(module: nn.Module) -> bool:
    """Whether calling `module` does what its class says: it has no hooks, no parametrisation, and
    no forward of its own."""
    state = module.__dict__
    return not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or "forward" in state
        or "parametrizations" in state["_modules"]
        or isinstance(module, torch.jit.ScriptModule)
    )


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a plain ``nn.Linear``."""
    return (
        type(module) is nn.Linear
        and is_plain(module)
        and set(module._parameters) == {"weight", "bias"}
        and _is_plain_tensor(module.weight)
        and (module.bias is None or _is_plain_tensor(module.bias))
    )


def is_counting_norm(module: nn.Module) -> bool:
    """Whether `module` is a batch norm that, in training, normalises by the batch, moves its
    statistics by a fixed momentum, and counts its steps; `has_own_activation`'s too."""
    if not is_plain(module) or not isinstance(module, nn.BatchNorm2d):
        return False
    return (
        (type(module) is nn.BatchNorm2d or has_own_activation(module))
        and module.momentum is not None
        and module.track_running_stats
        and module._buffers.get(STEPS) is not None
        and module._buffers.get("running_mean") is not None
    )


def is_convolution(module: nn.Module) -> bool:
    """Whether `module` is a two-dimensional convolution that `directions.forward` can compute."""
    return (
        type(module) is nn.Conv2d
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and is_plain(module)
        and set(module._parameters) == {"weight", "bias"}
        and _is_plain_tensor(module.weight)
        and module.weight.is_floating_point()
        and (module.bias is None or _is_plain_tensor(module.bias))
    )


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast casts to on devices of a type; None where it is off. Tensors without memory
    have none."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def geometry_of(convolution: nn.Conv2d) -> Geometry:
    """Stride, padding, dilation and groups; the padding must be in numbers."""
    stride, padding, dilation = (
        (int(pair[0]), int(pair[1]))
        for pair in (convolution.stride, convolution.padding, convolution.dilation)
    )
    return stride, padding, dilation, convolution.groups


def is_norm(module: nn.Module) -> bool:
    """Whether `module` begins with a batch norm that, in evaluation, is one multiplication and one
    addition for each channel: BatchNorm2d with its statistics, and what `has_own_activation`."""
    if not is_plain(module) or module.training:
        return False
    frozen = _is_frozen(module)
    if not frozen and type(module) is not nn.BatchNorm2d and not has_own_activation(module):
        return False
    tensors = norm_tensors(module)
    means_and_variances = tensors[2:]
    return all(t is not None for t in means_and_variances) and all(
        t is None or _is_plain_tensor(t) for t in tensors
    )


def has_own_activation(module: nn.Module) -> bool:
    """Whether `module` is a batch norm followed by its own `drop` and `act`, as timm's are."""
    is_batch_norm = isinstance(module, nn.BatchNorm2d) and type(module).__name__ in (
        "BatchNormAct2d",
    )
    return (is_batch_norm or _is_frozen(module)) and set(module._modules) == {"drop", "act"}


def _is_frozen(module: nn.Module) -> bool:
    """torchvision's and timm's batch norms whose parameters are buffers."""
    return type(module).__name__ in ("FrozenBatchNorm2d", "FrozenBatchNormAct2d") and set(
        module._buffers
    ) >= set(_NORM_TENSORS)


def norm_slots(module: nn.Module) -> list[tuple[Mapping[str, Tensor | None], str]]:
    """Where a norm keeps what it is made of, its steps included: dictionary and key of each."""
    found: list[tuple[Mapping[str, Tensor | None], str]] = []
    for name in (*_NORM_TENSORS, STEPS):
        in_parameters = name in module._parameters
        found.append((module._parameters if in_parameters else module._buffers, name))
    return found


def norm_tensors(module: nn.Module) -> list[Tensor | None]:
    """Weight, bias, mean and variance of a norm; None for one that it does without."""
    return [home.get(name) for home, name in norm_slots(module)[:4]]


def eps_of(module: nn.Module) -> float:
    """What a norm adds to the variance."""
    return float(module.eps)  # type: ignore[arg-type]


def activation_of(module: nn.Module) -> str | None:
    """confpred's name of the activation that `module` is, or None."""
    if not is_plain(module):
        return None
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else None
    return _ACTIVATIONS.get(type(module))


def is_identity(module: nn.Module) -> bool:
    """Whether `module` returns its input while it is not training."""
    known = type(module) in _IDENTITIES or type(module).__name__ in ("DropPath", "StochasticDepth")
    return known and is_plain(module) and (type(module) is nn.Identity or not module.training)


def is_opaque(module: nn.Module, convolutions: frozenset[nn.Module]) -> bool:
    """Whether a trace calls `module` and does not look into it: PyTorch's own modules, those that
    do more than their class says, and all without a convolution inside, unless they are small
    enough to be an activation."""
    if not is_plain(module) or is_norm(module) or is_identity(module):
        return True
    of_pytorch = type(module).__module__.startswith(("torch.nn", "torch.ao.nn"))
    if of_pytorch and not isinstance(module, nn.Sequential):
        return True
    bare = not module._modules and not module._parameters and not module._buffers
    return not bare and convolutions.isdisjoint(module.modules())


def _is_plain_tensor(tensor: object) -> bool:
    """Whether `tensor` is PyTorch's own, and counts its versions: what changes unseen cannot be
    folded."""
    own = type(tensor) in (Tensor, nn.Parameter, FakeTensor)
    return own and isinstance(tensor, Tensor) and not tensor.is_inference()

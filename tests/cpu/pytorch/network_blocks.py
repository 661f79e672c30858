"""Blocks as networks of today have them, small, and written here: no other package is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAST = torch.channels_last
#: Operators of captured graphs.
CONV, BACKWARD = "confpred.conv2d.default", "confpred.conv2d_backward.default"
SHIFT, FOLD = "confpred.scale_shift.default", "confpred.fold.default"
PLAIN, CLONE = "aten.convolution.default", "aten.clone.default"


class Around(nn.Module):
    """Layers by name, and a forward that is a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.function(self, *given, **named)


class BatchNormAct2d(nn.BatchNorm2d):
    """A batch norm with its own dropout and activation, as timm's."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "four dimensions")
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1,
            self.eps,
        )  # fmt: skip
        return self.act(self.drop(x))


class FrozenBatchNorm2d(nn.Module):
    """A batch norm whose parameters are buffers, as torchvision's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.register_buffer("weight", torch.rand(channels) + 0.5)
        self.register_buffer("bias", torch.randn(channels))
        self.register_buffer("running_mean", torch.randn(channels))
        self.register_buffer("running_var", torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = (
            self.weight.reshape(1, -1, 1, 1)
            * (self.running_var.reshape(1, -1, 1, 1) + self.eps).rsqrt()
        )
        shift = self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale
        return x * scale + shift


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5) if self.training else x


class ConvNormActivation(nn.Sequential):
    """As torchvision's Conv2dNormActivation."""

    def __init__(self, c: int, k: int, r: int, act: nn.Module | None, **geometry: int) -> None:
        layers = [nn.Conv2d(c, k, r, padding=r // 2, bias=False, **geometry), nn.BatchNorm2d(k)]
        super().__init__(*layers, *([] if act is None else [act]))


class SqueezeExcite(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


class InvertedResidual(nn.Module):
    def __init__(self, c: int, act: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.conv_pw = nn.Conv2d(c, 2 * c, 1, bias=False)
        self.bn1 = BatchNormAct2d(2 * c, act(inplace=True))
        self.conv_dw = nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c, bias=False)
        self.bn2 = BatchNormAct2d(2 * c, act(inplace=True))
        self.se = SqueezeExcite(2 * c)
        self.conv_pwl = nn.Conv2d(2 * c, c, 1, bias=False)
        self.bn3 = BatchNormAct2d(c, nn.Identity())
        self.drop_path = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))
        x = self.bn3(self.conv_pwl(self.se(x)))
        return self.drop_path(x) + shortcut


class Bottleneck(nn.Module):
    def __init__(self, c: int, k: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = ConvNormActivation(c, k, 1, nn.ReLU(inplace=True))
        self.conv2 = ConvNormActivation(k, k, 3, nn.ReLU(inplace=True), groups=4, stride=stride)
        self.conv3, self.bn3 = nn.Conv2d(k, k, 1, bias=False), nn.BatchNorm2d(k)
        self.downsample = None
        if stride > 1 or c != k:
            self.downsample = ConvNormActivation(c, k, 1, None, stride=stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.bn3(self.conv3(self.conv2(self.conv1(x))))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ConvNeXtBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.norm = nn.LayerNorm(c)
        self.mlp = nn.Sequential(nn.Linear(c, 2 * c), nn.GELU(), nn.Linear(2 * c, c))
        self.gamma = nn.Parameter(torch.rand(c))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + y * self.gamma.reshape(1, -1, 1, 1)


class Functional(nn.Module):
    """Everything as functions, a sum with the residual first, and a frozen norm."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1, groups=2)
        self.norm = FrozenBatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.a(x)))
        y = torch.add(x, self.b(y)).relu_()
        return F.gelu(self.a(y), approximate="tanh")


class Branches(nn.Module):
    """Sums of branches into one of them, as in blocks that are made to be merged later."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(ConvNormActivation(c, c, r, None) for r in (1, 3, 5))
        self.identity, self.act = nn.BatchNorm2d(c), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.identity(x)
        for branch in self.branches:
            out += branch(x)
        return self.act(out)


class Network(nn.Module):
    """A stem, the given blocks and a head."""

    def __init__(self, *blocks: nn.Module, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


BLOCKS = {
    "inverted residual": lambda: Network(InvertedResidual(8)),
    "bottleneck": lambda: Network(Bottleneck(8, 8, stride=2)),
    "convnext": lambda: Network(ConvNeXtBlock(8)),
    "branches": lambda: Network(Branches(8)),
    "functional": lambda: Network(Functional(8)),
}


def made(model: nn.Module) -> nn.Module:
    """`model` in evaluation, with statistics that matter."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.running_var):
                if tensor is not None:
                    nn.init.uniform_(tensor, 0.5, 1.5)
            for tensor in (module.bias, module.running_mean):
                if tensor is not None:
                    nn.init.normal_(tensor)
    return model.eval()


def images(dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, 19, 17, dtype=dtype)


def image(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `images`, channels last."""
    return images(dtype, batch).contiguous(memory_format=LAST)


WIDTH = 8  # channels of a `NormBlock`


def as_chosen(choices: Sequence[Any], *_: Any) -> dict[Any, Any]:
    """Stand in for `loading.compile_ahead`, and load nothing."""
    return dict(zip(choices, choices, strict=True))


class NormBlock(nn.Module):
    """A convolution, a batch norm, and what follows it."""

    def __init__(self, after: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH, **options)
        self.last = nn.Conv2d(WIDTH, WIDTH, 1)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self.norm(self.conv(x)), x))


AFTER = {
    "none": lambda y, x: y,
    "relu": lambda y, x: F.relu(y),
    "relu in place": lambda y, x: F.relu(y, inplace=True),
    "silu": lambda y, x: F.silu(y),
    "silu in place": lambda y, x: F.silu(y, inplace=True),
    "hardswish in place": lambda y, x: F.hardswish(y, inplace=True),
    "relu6 in place": lambda y, x: F.relu6(y, inplace=True),
    "leaky ReLU in place": lambda y, x: F.leaky_relu(y, inplace=True),
    "leaky ReLU": lambda y, x: F.leaky_relu(y, 0.2),
    "add, leaky ReLU in place": lambda y, x: F.leaky_relu(y.add_(x), 0.1, inplace=True),
    "gelu": lambda y, x: F.gelu(y),
    "hardswish": lambda y, x: F.hardswish(y),
    "relu6": lambda y, x: F.relu6(y),
    "add": lambda y, x: y + x,
    "add, relu": lambda y, x: F.relu(y + x),
    "add from the left, silu": lambda y, x: F.silu(x + y),
    "add, silu in place": lambda y, x: F.silu(y.add_(x), inplace=True),
    "clone, add": lambda y, x: F.relu(y.clone() + x),
    "add its clone": lambda y, x: F.relu(y + y.clone()),
    "channels first, silu": lambda y, x: F.silu(y.contiguous()).view(len(y), -1).view(y.shape),
    "read twice": lambda y, x: F.relu(y) + y,
    "of no kernel": lambda y, x: torch.tanh(y),
    "of no kernel's slope": lambda y, x: F.leaky_relu(y, 0.3),
}


def step(
    model: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], x: Tensor
) -> list[Tensor]:
    """Return outputs and gradients of one step."""
    out = model(x)
    torch.manual_seed(2)
    grads = torch.autograd.grad(out, [x, *parameters], torch.randn(out.shape).to(out))
    return [out.detach(), *grads]

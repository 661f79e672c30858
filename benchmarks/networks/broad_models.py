"""Networks of many kinds that nobody here tuned confpred for, written from their publications.

A public function without an underscore makes the network of its name in
`benchmarks.networks.networks.BROAD`; weights are random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _norm_act(kind: str, channels: int, act: bool = True) -> list[nn.Module]:
    batch = {"1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}[kind]
    return [batch(channels), *([nn.SiLU()] if act else [])]


def _conv2(c: int, k: int, r: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(c, k, r, stride, r // 2, groups=groups, bias=False)
    return nn.Sequential(layer, *_norm_act("2d", k))


class _Sum(nn.Module):
    """Add what several modules make of one input; none of them stands for the input itself."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x
        for part in self.parts:
            out = out + part(x)
        return out


# Detection


class _Csp(nn.Module):
    """A cross-stage block with `depth` bottlenecks."""

    def __init__(self, c: int, k: int, depth: int, shortcut: bool = True) -> None:
        super().__init__()
        half = k // 2
        self.first, self.second = _conv2(c, half), _conv2(c, half)
        blocks = [nn.Sequential(_conv2(half, half), _conv2(half, half, 3)) for _ in range(depth)]
        self.blocks = nn.Sequential(*(_Sum(b) if shortcut else b for b in blocks))
        self.last = _conv2(2 * half, k)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([self.blocks(self.first(x)), self.second(x)], 1))
        return out


class _Detector(nn.Module):
    """One-stage detector: a cross-stage backbone, paths up and down, three heads (YOLOv5 s)."""

    def __init__(self, w: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv2(3, w, 3, 2), _conv2(w, 2 * w, 3, 2), _Csp(2 * w, 2 * w, 1))
        self.c3 = nn.Sequential(_conv2(2 * w, 4 * w, 3, 2), _Csp(4 * w, 4 * w, 2))
        self.c4 = nn.Sequential(_conv2(4 * w, 8 * w, 3, 2), _Csp(8 * w, 8 * w, 3))
        self.c5 = nn.Sequential(_conv2(8 * w, 16 * w, 3, 2), _Csp(16 * w, 16 * w, 1))
        self.squeeze5, self.squeeze4 = _conv2(16 * w, 8 * w), _conv2(8 * w, 4 * w)
        self.up4, self.up3 = _Csp(16 * w, 8 * w, 1, False), _Csp(8 * w, 4 * w, 1, False)
        self.down4, self.down5 = _conv2(4 * w, 4 * w, 3, 2), _conv2(8 * w, 8 * w, 3, 2)
        self.out4, self.out5 = _Csp(8 * w, 8 * w, 1, False), _Csp(16 * w, 16 * w, 1, False)
        self.heads = nn.ModuleList(nn.Conv2d(c * w, 255, 1) for c in (4, 8, 16))

    def forward(self, x: Tensor) -> list[Tensor]:
        c3 = self.c3(self.stem(x))
        c4 = self.c4(c3)
        p5 = self.squeeze5(self.c5(c4))
        p4 = self.squeeze4(self.up4(torch.cat([F.interpolate(p5, scale_factor=2.0), c4], 1)))
        p3 = self.up3(torch.cat([F.interpolate(p4, scale_factor=2.0), c3], 1))
        n4 = self.out4(torch.cat([self.down4(p3), p4], 1))
        n5 = self.out5(torch.cat([self.down5(n4), p5], 1))
        return [head(p) for head, p in zip(self.heads, (p3, n4, n5), strict=True)]


class _Pyramid(nn.Module):
    """Shared heads with group norm on a feature pyramid of ResNet-50 (FCOS)."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        self.body = timm.create_model("resnet50", features_only=True, out_indices=(2, 3, 4))
        self.sides = nn.ModuleList(nn.Conv2d(c, 256, 1) for c in (512, 1024, 2048))
        self.smooth = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in range(3))
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(256, 256, 3, padding=1), nn.GroupNorm(32, 256), nn.ReLU()]
        self.tower, self.out = nn.Sequential(*layers), nn.Conv2d(256, 85, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        levels = [side(f) for side, f in zip(self.sides, self.body(x), strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], scale_factor=2.0)
        smooth = [s(f) for s, f in zip(self.smooth, levels, strict=True)]
        return [self.out(self.tower(f)) for f in smooth]


# Segmentation


class _Unet(nn.Module):
    """U-Net of two or three dimensions; volumes with instance norm and leaky ReLU (nnU-Net)."""

    def __init__(self, rank: int, c: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        conv: Any = nn.Conv2d if rank == 2 else nn.Conv3d
        up: Any = nn.ConvTranspose2d if rank == 2 else nn.ConvTranspose3d

        def block(c: int, k: int, stride: int = 1) -> nn.Sequential:
            layers: list[nn.Module] = []
            for i in range(2):
                layers.append(conv(c if i == 0 else k, k, 3, stride if i == 0 else 1, 1))
                layers += (
                    [nn.BatchNorm2d(k), nn.ReLU()] if rank == 2
                    else [nn.InstanceNorm3d(k, affine=True), nn.LeakyReLU(0.01)]
                )  # fmt: skip
            return nn.Sequential(*layers)

        ins = (c, *widths)
        self.down = nn.ModuleList(
            block(a, b, 1 if i == 0 else 2)
            for i, (a, b) in enumerate(zip(ins, widths, strict=False))
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(up(a, b, 2, 2) for a, b in pairs)
        self.merge = nn.ModuleList(block(2 * b, b) for _, b in pairs)
        self.head = conv(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for stage in self.down:
            x = stage(x)
            found.append(x)
        for up, merge, side in zip(self.up, self.merge, found[-2::-1], strict=True):
            x = merge(torch.cat([up(x), side], 1))
        out: Tensor = self.head(x)
        return out


class _Dilated(nn.Module):
    """Dilated separable pyramid on MobileNetV3 (DeepLabV3+)."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        self.body = timm.create_model(
            "mobilenetv3_large_100", features_only=True, out_indices=(1, 4), output_stride=16
        )
        low, high = self.body.feature_info.channels()

        def separable(c: int, k: int, rate: int) -> nn.Sequential:
            spread = nn.Conv2d(c, c, 3, padding=rate, dilation=rate, groups=c, bias=False)
            layers = spread, nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, k, 1, bias=False)
            return nn.Sequential(*layers, nn.BatchNorm2d(k), nn.ReLU())

        self.point = nn.Sequential(nn.Conv2d(high, 256, 1, bias=False), nn.BatchNorm2d(256))
        self.rates = nn.ModuleList(separable(high, 256, rate) for rate in (6, 12, 18))
        self.merge = separable(4 * 256, 256, 1)
        self.low = nn.Sequential(nn.Conv2d(low, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        self.last = nn.Sequential(separable(304, 256, 1), nn.Conv2d(256, 21, 1))

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.body(x)
        wide = self.merge(torch.cat([self.point(high), *(rate(high) for rate in self.rates)], 1))
        wide = F.interpolate(wide, size=low.shape[2:], mode="bilinear")
        out: Tensor = self.last(torch.cat([wide, self.low(low)], 1))
        return F.interpolate(out, scale_factor=4.0, mode="bilinear")


# Diffusion


class _Residual(nn.Module):
    """Two convolutions behind group norm and SiLU."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, k, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, k), nn.SiLU(), nn.Conv2d(k, k, 3, padding=1))
        self.side = nn.Identity() if c == k else nn.Conv2d(c, k, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.side(x) + self.second(self.first(x))
        return out


class _Attention(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, c),
            nn.Conv2d(c, 3 * c, 1),
            nn.Conv2d(c, c, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        heads = self.qkv(self.norm(x)).reshape(n, 3, c // 64, 64, h * w).transpose(3, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(1))
        out: Tensor = x + self.out(mixed.transpose(2, 3).reshape(n, c, h, w))
        return out


class _DiffusionUnet(nn.Module):
    """Denoiser of latents of 64 x 64: residual blocks, attention at the lower levels (LDM)."""

    def __init__(self, widths: tuple[int, ...] = (320, 640, 1280)) -> None:
        super().__init__()
        self.stem, self.head = (
            nn.Conv2d(4, widths[0], 3, padding=1),
            nn.Conv2d(widths[0], 4, 3, 1, 1),
        )
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        c, sides = widths[0], [widths[0]]
        for level, k in enumerate(widths):
            if level:
                self.down.append(nn.Conv2d(c, c, 3, 2, 1))
                sides.append(c)
            for _ in range(2):
                more = [_Attention(k)] if level else []
                self.down.append(nn.Sequential(_Residual(c, k), *more))
                c = k
                sides.append(c)
        self.middle = nn.Sequential(_Residual(c, c), _Attention(c), _Residual(c, c))
        for level, k in reversed(list(enumerate(widths))):
            for i in range(3):
                more = [_Attention(k)] if level else []
                more += [nn.Upsample(scale_factor=2.0)] if level and i == 2 else []
                self.up.append(nn.Sequential(_Residual(c + sides.pop(), k), *more))
                c = k

    def forward(self, x: Tensor) -> Tensor:
        sides = [self.stem(x)]
        for part in self.down:
            sides.append(part(sides[-1]))
        out = self.middle(sides[-1])
        for part in self.up:
            out = part(torch.cat([out, sides.pop()], 1))
        found: Tensor = self.head(F.silu(out))
        return found


def latent_decoder(widths: tuple[int, ...] = (512, 512, 256, 128)) -> nn.Module:
    """Return the decoder of an autoencoder of images, from latents of an eighth of the size."""
    layers: list[nn.Module] = [nn.Conv2d(4, widths[0], 3, padding=1)]
    layers += [_Residual(widths[0], widths[0]), _Residual(widths[0], widths[0])]
    c = widths[0]
    for level, k in enumerate(widths):
        layers += [_Residual(c if i == 0 else k, k) for i in range(3)]
        c = k
        if level < len(widths) - 1:
            layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(c, c, 3, padding=1)]
    return nn.Sequential(*layers, nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))


def large_latent_decoder() -> nn.Module:
    """Return the same decoder, for images of 1,024 x 1,024."""
    return latent_decoder()


# Super-resolution


def _super_resolution(separable: bool, c: int = 64, blocks: int = 16) -> nn.Module:
    """Return a network that doubles an image's sides (EDSR; with separable layers, BSRN's)."""

    def conv() -> nn.Module:
        if not separable:
            return nn.Conv2d(c, c, 3, padding=1)
        return nn.Sequential(nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1, groups=c))

    act = nn.GELU if separable else nn.ReLU
    body = nn.Sequential(*(_Sum(nn.Sequential(conv(), act(), conv())) for _ in range(blocks)))
    last = nn.Conv2d(c, 12, 3, padding=1), nn.PixelShuffle(2)
    return nn.Sequential(nn.Conv2d(3, c, 3, padding=1), _Sum(body), *last)


# Large filters


def replknet(size: int = 31, widths: tuple[int, ...] = (128, 256, 512)) -> nn.Module:
    """Return a network of depthwise filters of 31 x 31 beside 5 x 5 ones (RepLKNet)."""

    def block(c: int) -> list[nn.Module]:
        both = [nn.Conv2d(c, c, r, padding=r // 2, groups=c, bias=False) for r in (size, 5)]
        mixed = [nn.Sequential(layer, nn.BatchNorm2d(c)) for layer in both]
        first = nn.Sequential(nn.BatchNorm2d(c), _conv2(c, c), _Sum(*mixed), nn.ReLU())
        wide = nn.Conv2d(c, 4 * c, 1), nn.GELU(), nn.Conv2d(4 * c, c, 1)
        return [_Sum(first), _Sum(nn.Sequential(nn.BatchNorm2d(c), *wide))]

    layers: list[nn.Module] = [_conv2(3, widths[0], 3, 2), _conv2(widths[0], widths[0], 3, 2)]
    for i, c in enumerate(widths):
        layers += [layer for _ in range(2) for layer in block(c)]
        layers += [_conv2(c, widths[i + 1], 3, 2)] if i + 1 < len(widths) else []
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000)
    )


# Video


def x3d(widths: tuple[int, ...] = (24, 48, 96, 192)) -> nn.Module:
    """Return a network of depthwise 3 x 3 x 3 layers (X3D S)."""

    def block(c: int, k: int, stride: int) -> nn.Module:
        wide = int(2.25 * k)
        layers: list[nn.Module] = [nn.Conv3d(c, wide, 1, bias=False), *_norm_act("3d", wide)]
        spread = nn.Conv3d(wide, wide, 3, (1, stride, stride), 1, groups=wide, bias=False)
        layers += [spread, *_norm_act("3d", wide), nn.Conv3d(wide, k, 1, bias=False)]
        whole = nn.Sequential(*layers, *_norm_act("3d", k, act=False))
        return _Sum(whole) if c == k and stride == 1 else whole

    layers: list[nn.Module] = [nn.Conv3d(3, 24, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)]
    c = 24
    for k, depth in zip(widths, (3, 5, 11, 7), strict=True):
        for i in range(depth):
            layers.append(block(c, k, 2 if i == 0 else 1))
            c = k
    pooled = nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(c, 400)
    return nn.Sequential(*layers, *_norm_act("3d", c), *pooled)


def r2plus1d(widths: tuple[int, ...] = (64, 128, 256, 512)) -> nn.Module:
    """Return a residual network of spatial and temporal layers in turns (R(2+1)D-18)."""

    def pair(c: int, k: int, stride: int) -> list[nn.Module]:
        middle = c * k * 27 // (9 * c + 3 * k)
        across = nn.Conv3d(c, middle, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False)
        along = nn.Conv3d(middle, k, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False)
        return [across, *_norm_act("3d", middle), along, *_norm_act("3d", k)]

    layers, c = pair(3, widths[0], 2), widths[0]
    for k in widths:
        if k != c:
            layers += pair(c, k, 2)
        layers += [_Sum(nn.Sequential(*pair(k, k, 1), *pair(k, k, 1))) for _ in range(2)]
        c = k
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(c, 400))


class _Causal(nn.Conv3d):
    """A 3 x 3 x 3 layer whose frames see none that come later."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__(c, k, 3, padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 0, 0, 0, 2, 0)))


def video_decoder(widths: tuple[int, ...] = (384, 384, 192, 96)) -> nn.Module:
    """Return the decoder of an autoencoder of videos, from latents of an eighth of the size and a
    quarter of the frames (CogVideoX)."""

    def block(c: int, k: int) -> list[nn.Module]:
        return [nn.GroupNorm(32, c), nn.SiLU(), _Causal(c, k)]

    layers: list[nn.Module] = [_Causal(16, widths[0])]
    c = widths[0]
    for level, k in enumerate(widths):
        if level:
            scale = (2.0 if level < 3 else 1.0, 2.0, 2.0)
            layers += [nn.Upsample(scale_factor=scale), nn.Conv3d(c, k, (1, 3, 3), 1, (0, 1, 1))]
        layers += [_Sum(nn.Sequential(*block(k, k), *block(k, k))) for _ in range(3)]
        c = k
    return nn.Sequential(*layers, nn.GroupNorm(32, c), nn.SiLU(), _Causal(c, 3))


# Speech


class _Conformer(nn.Module):
    """A block of a speech encoder: attention, a gated depthwise layer of 31 taps, two products."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(5))
        self.qkv, self.mixed = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.wide, self.spread = nn.Conv1d(c, 2 * c, 1), nn.Conv1d(c, c, 31, padding=15, groups=c)
        self.after = nn.Sequential(*_norm_act("1d", c), nn.Conv1d(c, c, 1))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, c)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, c = x.shape
        x = x + 0.5 * self.feeds[0](self.norms[0](x))
        heads = self.qkv(self.norms[1](x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0))
        x = x + self.mixed(mixed.transpose(1, 2).reshape(n, length, c))
        gated = F.glu(self.wide(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.after(self.spread(gated)).transpose(1, 2)
        x = x + 0.5 * self.feeds[1](self.norms[3](x))
        out: Tensor = self.norms[4](x)
        return out


def conformer(c: int = 256, depth: int = 12) -> nn.Module:
    """Return a speech encoder (Conformer M)."""
    return nn.Sequential(*(_Conformer(c, 4) for _ in range(depth)))


def conv_tasnet(c: int = 128, wide: int = 512) -> nn.Module:
    """Return a separator of sources: dilated depthwise layers of 3 taps (Conv-TasNet)."""

    def block(rate: int) -> nn.Module:
        spread = nn.Conv1d(wide, wide, 3, padding=rate, dilation=rate, groups=wide)
        first = nn.Conv1d(c, wide, 1), nn.PReLU(), nn.GroupNorm(1, wide), spread
        return _Sum(nn.Sequential(*first, nn.PReLU(), nn.GroupNorm(1, wide), nn.Conv1d(wide, c, 1)))

    rates = [2**i for _ in range(3) for i in range(8)]
    ends = nn.Conv1d(1, c, 16, 8), nn.ConvTranspose1d(c, 1, 16, 8)
    return nn.Sequential(ends[0], *map(block, rates), ends[1])


class _Gated(nn.Module):
    """A block of state-space models, without their scan: a short causal line, gated (Mamba)."""

    def __init__(self, c: int, wide: int, taps: int = 4) -> None:
        super().__init__()
        self.norm, self.last = nn.RMSNorm(c), nn.Linear(wide, c, bias=False)
        self.first = nn.Linear(c, 2 * wide, bias=False)
        self.line = nn.Conv1d(wide, wide, taps, padding=taps - 1, groups=wide)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.first(self.norm(x)).transpose(1, 2).chunk(2, 1)
        inner = F.silu(self.line(inner)[..., : x.shape[1]]) * F.silu(gate)
        return x + self.last(inner.transpose(1, 2))


def short_lines(c: int = 1024, depth: int = 12) -> nn.Module:
    """Return a network of short causal convolutions."""
    return nn.Sequential(*(_Gated(c, 2 * c) for _ in range(depth)))


def hifigan(c: int = 512) -> nn.Module:
    """Return a generator of waveforms: transposed layers, dilated residual blocks (HiFi-GAN V1)."""

    class Mean(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList(self.block(c, r) for r in (3, 7, 11))

        @staticmethod
        def block(c: int, r: int) -> nn.Module:
            def one(rate: int) -> list[nn.Module]:
                return [
                    nn.LeakyReLU(0.1),
                    nn.Conv1d(c, c, r, padding=rate * (r // 2), dilation=rate),
                ]

            return nn.Sequential(*(_Sum(nn.Sequential(*one(d), *one(1))) for d in (1, 3, 5)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([part(x) for part in self.parts]).mean(0)

    layers: list[nn.Module] = [nn.Conv1d(80, c, 7, padding=3)]
    for rate in (8, 8, 2, 2):
        up = nn.ConvTranspose1d(c, c // 2, 2 * rate, rate, rate // 2)
        layers += [nn.LeakyReLU(0.1), up, Mean(c // 2)]
        c //= 2
    return nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(c, 1, 7, padding=3), nn.Tanh())


# The others, by name


def detector() -> nn.Module:
    return _Detector()


def pyramid_detector() -> nn.Module:
    return _Pyramid()


def unet() -> nn.Module:
    return _Unet(2, 3, (64, 128, 256, 512), 2)


def unet_volumes() -> nn.Module:
    return _Unet(3, 1, (32, 64, 128, 256), 3)


def dilated_pyramid() -> nn.Module:
    return _Dilated()


def diffusion_unet() -> nn.Module:
    return _DiffusionUnet()


def edsr() -> nn.Module:
    return _super_resolution(separable=False)


def separable_sr() -> nn.Module:
    return _super_resolution(separable=True)

"""Networks of volumes and of video, written down from their publications layer by layer.

They follow the published architectures in channels, filters and sizes, but not in every detail.
Products of matrices, attention and two-dimensional layers are left out. Sizes are depth or frames,
height, width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rank_layers import Axes, Net, Network

Size = tuple[int, int, int]

# Medical volumes


def unet_3d(size: Size) -> Net:
    net, skips = Net(3, size), []
    for k in (64, 128, 256, 512):
        net.conv(k // 2, act="relu", norm=True).conv(k, act="relu", norm=True)
        if k < 512:
            skips.append(k)
            net.pool(2)
    for k in reversed(skips):
        net.up(net.c, 2, 2).to(net.c + k).conv(k, act="relu", norm=True)
        net.conv(k, act="relu", norm=True)
    return net.conv(3, 1)


def v_net(size: Size) -> Net:
    net, skips = Net(1, size).conv(16, 5), []
    for k, convs in ((32, 2), (64, 3), (128, 3), (256, 3)):
        skips.append((net.c, net.size))
        net.conv(k, 2, 2, padding=0)
        for _ in range(convs):
            net.conv(k, 5)
    for (c, at), k, convs in zip(reversed(skips), (256, 128, 64, 32), (3, 3, 2, 1), strict=True):
        net.up(k - c, 2, 2).to(k, at)
        for _ in range(convs):
            net.conv(k, 5)
    return net.conv(2, 5).conv(2, 1)


def nn_unet(widths: Sequence[int], size: Size, *, colors: int = 1, classes: int = 3) -> Net:
    """Pairs of layers, strided and transposed ones between them; instance norm and leaky ReLU
    follow each."""
    net, skips = Net(colors, size), []
    for level, k in enumerate(widths):
        net.conv(k, 3, 2 if level else 1).conv(k)
        skips.append((k, net.size))
    for k, at in skips[-2::-1]:
        net.up(k, 2, 2, bias=False).to(2 * k, at).conv(k).conv(k)
    return net.conv(classes, 1)


def dyn_unet(widths: Sequence[int], size: Size) -> Net:
    """Residual blocks of two layers without a bias."""
    net, skips = Net(4, size), []

    def block(k: int, stride: int) -> None:
        if net.c != k or stride > 1:
            net.fork().conv(k, 1, stride, bias=False)
        net.conv(k, 3, stride, bias=False).conv(k, bias=False, residual=True)

    for level, k in enumerate(widths):
        block(k, 2 if level else 1)
        skips.append((k, net.size))
    for k, at in skips[-2::-1]:
        net.up(k, 2, 2, bias=False).to(2 * k, at)
        block(k, 1)
    return net.conv(3, 1)


def seg_resnet(c: int, size: Size) -> Net:
    """Norm and activation come before each layer."""
    net = Net(4, size).conv(c, bias=False)

    def blocks(count: int) -> None:
        for _ in range(count):
            net.conv(net.c, bias=False).conv(net.c, bias=False, residual=True)

    for level, count in enumerate((1, 2, 2, 4)):
        if level:
            net.conv(2 * net.c, 3, 2, bias=False)
        blocks(count)
    for _ in range(3):
        net.conv(net.c // 2, 1, bias=False).grow(2)
        blocks(1)
    return net.conv(3, 1)


def med_next(depths: Sequence[int], ratios: Sequence[int], window: int, size: Size) -> Net:
    """Depthwise layers, also to halve and double the size, and products of expanded channels."""
    net = Net(1, size).conv(32, 1)

    def block(ratio: int, k: int, *, stride: int = 1, up: bool = False) -> None:
        here = net.fork()
        if up:
            at = tuple(2 * s for s in net.size)
            net.up(net.c, window, 2, padding=window // 2, groups=net.c)
            net.conv(net.c * ratio, 1, act="gelu").conv(k, 1).to(size=at)
            here.up(k, 1, 2)
        else:
            net.dw(window, stride).conv(net.c * ratio, 1, act="gelu")
            net.conv(k, 1, residual=k == here.c)
            if stride > 1:
                here.conv(k, 1, 2)

    for level in range(9):
        for _ in range(depths[level]):
            block(ratios[level], net.c)
        if level < 4:
            block(ratios[level + 1], 2 * net.c, stride=2)
        elif level < 8:
            block(ratios[level + 1], net.c // 2, up=True)
    return net.conv(3, 1)


def ux_net(size: Size) -> Net:
    """Write the encoder: depthwise 7x7x7 layers, whose products are per channel and grouped."""
    net = Net(1, size).conv(48, 7, 2)
    for level, k in enumerate((48, 96, 192, 384)):
        if level:
            net.conv(k, 2, 2, padding=0)
        for _ in range(2):
            net.dw(7).conv(4 * k, 1, groups=k, act="gelu").conv(k, 1, groups=k)
    return net


def seg_former_3d(size: Size) -> Net:
    """Overlapping patches, and the depthwise layer between the products of a block."""
    net = Net(4, size)
    for level, (k, depth) in enumerate(zip((32, 64, 160, 256), (2, 2, 2, 2), strict=True)):
        net.conv(k, *((3, 2) if level else (7, 4)))
        for _ in range(depth):
            net.to(4 * k).dw(3).to(k)
    return net


# Video classifiers


def c3d(size: Size) -> Net:
    net = Net(3, size)
    for number, (k, count) in enumerate(((64, 1), (128, 1), (256, 2), (512, 2), (512, 2))):
        for _ in range(count):
            net.conv(k, act="relu")
        net.pool(2 if number else (1, 2, 2))
    return net


def inception_3d(separable: bool, size: Size) -> Net:
    net = Net(3, size)

    def layer(at: Net, k: int, window: int, stride: Axes = 1) -> Net:
        if window == 1 or not separable:
            return at.conv(k, window, stride, "relu", norm=True)
        steps = stride if isinstance(stride, tuple) else (stride,) * 3
        at.conv(k, (1, window, window), (1, *steps[1:]), "relu", norm=True)
        return at.conv(k, (window, 1, 1), (steps[0], 1, 1), "relu", norm=True)

    layer(net, 64, 7, 2).pool((1, 2, 2))
    layer(layer(net, 64, 1), 192, 3).pool((1, 2, 2))
    blocks = (
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128), (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    )  # fmt: skip
    for number, (one, narrow, wide, narrow2, wide2, pooled) in enumerate(blocks):
        if number in (2, 7):
            net.pool(2)
        for widths in ((one,), (narrow, wide), (narrow2, wide2), (pooled,)):
            branch = layer(net.fork(), widths[0], 1)
            for k in widths[1:]:
                layer(branch, k, 3)
        net.to(one + wide + wide2 + pooled)
    return net.conv(400, 1)


def resnet_18(form: str, size: Size) -> Net:
    """ResNet-18 in three dimensions: ``r3d``, ``mc3``, or ``r2plus1d``."""
    net = Net(3, size)

    def layer(
        at: Net, k: int, stride: int = 1, *, middle: int, last: bool = False, flat: bool = False
    ) -> None:
        end = {"act": "none" if last else "relu", "norm": True, "residual": last}
        if form == "r2plus1d":
            at.conv(middle, (1, 3, 3), (1, stride, stride), "relu", norm=True)
            at.conv(k, (3, 1, 1), (stride, 1, 1), **end)
        else:
            at.conv(k, (1, 3, 3) if flat else 3, (1, stride, stride) if flat else stride, **end)

    if form == "r2plus1d":
        net.conv(45, (1, 7, 7), (1, 2, 2), "relu", norm=True)
        net.conv(64, (3, 1, 1), act="relu", norm=True)
    else:
        net.conv(64, (3, 7, 7), (1, 2, 2), "relu", norm=True)
    for level, k in enumerate((64, 128, 256, 512)):
        flat = form == "mc3" and level > 0
        for stride in (2 if level else 1, 1):
            if net.c != k:
                net.fork().conv(k, 1, (1, 2, 2) if flat else stride, norm=True)
            middle = (net.c * k * 27) // (net.c * 9 + 3 * k)  # of both layers of a block
            layer(net, k, stride, middle=middle, flat=flat)
            layer(net, k, middle=middle, last=True, flat=flat)
    return net


def bottlenecks(
    net: Net, first: Axes, middle: Axes, inner: int, k: int, depth: int, stride: int,
    *, also: Axes | None = None, depthwise: bool = False,
) -> Net:  # fmt: skip
    """Append a stage of bottlenecks by their filters; `also` is that of a further middle layer."""
    for number in range(depth):
        step = (1, stride, stride) if number == 0 else (1, 1, 1)
        if number == 0:
            net.fork().conv(k, 1, step, norm=True)
        net.conv(inner, first, act="relu", norm=True)
        groups = inner if depthwise else 1
        net.conv(inner, middle, step, "relu", norm=True, groups=groups)
        if also is not None:
            net.conv(inner, also, act="relu", norm=True)
        net.conv(k, 1, norm=True, residual=True)
    return net


def slow_fast(size: Size) -> Net:
    """Both ways of SlowFast 8x8; `size` is that of the slow one."""
    slow, fast = Net(3, size), Net(3, (4 * size[0], *size[1:]))
    fast.layers = slow.layers
    slow.conv(64, (1, 7, 7), (1, 2, 2), "relu", norm=True).pool((1, 2, 2))
    fast.conv(8, (5, 7, 7), (1, 2, 2), "relu", norm=True).pool((1, 2, 2))
    flat, deep = (1, 1, 1), (3, 1, 1)
    for level, depth in enumerate((3, 4, 6, 3)):
        side = fast.fork().conv(2 * fast.c, (5, 1, 1), (4, 1, 1), "relu", norm=True)
        slow.to(slow.c + side.c)
        inner, stride = 64 << level, 2 if level else 1
        first = deep if level > 1 else flat
        bottlenecks(slow, first, (1, 3, 3), inner, 4 * inner, depth, stride)
        bottlenecks(fast, deep, (1, 3, 3), inner // 8, inner // 2, depth, stride)
    return slow


def csn(depths: Sequence[int], preserved: bool, size: Size) -> Net:
    """Channel-separated bottlenecks; `preserved` ones keep a product beside the depthwise layer."""
    net = Net(3, size).conv(64, (3, 7, 7), (1, 2, 2), "relu", norm=True).pool((1, 2, 2))
    for level, depth in enumerate(depths):
        inner = 64 << level
        for number in range(depth):
            stride = 2 if level and not number else 1
            if number == 0:
                net.fork().conv(4 * inner, 1, stride, norm=True)
            net.conv(inner, 1, act="relu", norm=True)
            if preserved:
                net.conv(inner, 1, act="relu", norm=True)
            net.dw(3, stride, "relu", norm=True).conv(4 * inner, 1, norm=True, residual=True)
    return net


def p3d(size: Size) -> Net:
    """Pseudo-3D ResNet-50: a spatial and a temporal layer in each bottleneck."""
    net = Net(3, size).conv(64, (1, 7, 7), (1, 2, 2), "relu", norm=True).pool(2)
    for level, depth in enumerate((3, 4, 6)):
        inner = 64 << level
        bottlenecks(
            net, 1, (1, 3, 3), inner, 4 * inner, depth, 2 if level else 1, also=(3, 1, 1)
        ).pool((2, 1, 1))
    return net


def cost(size: Size) -> Net:
    """ResNet-50 whose middle layers look from three views, with shared weights."""
    net = Net(3, size).conv(64, (1, 7, 7), (1, 2, 2), "relu", norm=True).pool((1, 2, 2))
    for level, depth in enumerate((3, 4, 6, 3)):
        inner = 64 << level
        for number in range(depth):
            stride = (1, 2, 2) if level and not number else (1, 1, 1)
            if number == 0:
                net.fork().conv(4 * inner, 1, stride, norm=True)
            net.conv(inner, 1, act="relu", norm=True)
            for window in ((3, 1, 3), (3, 3, 1)):
                net.fork().conv(inner, window, stride, norm=True)
            net.conv(inner, (1, 3, 3), stride, norm=True)
            net.conv(4 * inner, 1, norm=True, residual=True)
    return net


def x3d(depths: Sequence[int], size: Size) -> Net:
    """Every other depthwise layer is followed by squeeze and excitation."""
    net = Net(3, size).conv(24, (1, 3, 3), (1, 2, 2), bias=False)
    net.dw((5, 1, 1), act="relu", norm=True)
    for k, depth in zip((24, 48, 96, 192), depths, strict=True):
        inner = k * 9 // 4
        for number in range(depth):
            stride = (1, 2, 2) if number == 0 else 1
            if number == 0:
                net.fork().conv(k, 1, stride, norm=True)
            net.conv(inner, 1, act="relu", norm=True)
            net.dw(3, stride, "silu" if number % 2 else "none", norm=True)
            net.conv(k, 1, norm=True, residual=True)
    return net.conv(432, 1, act="relu", norm=True)


def movi_net(
    stem: int, stages: Sequence[tuple[int, Sequence[int], Sequence[int]]], size: Size
) -> Net:
    """`stages` have channels, expanded channels and, one a layer, the frames of a filter; one of a
    single frame is 5x5, others 3x3."""
    net = Net(3, size).conv(stem, (1, 3, 3), (1, 2, 2), "hardswish", norm=True)
    for level, (k, expanded, frames) in enumerate(stages):
        for number, (inner, deep) in enumerate(zip(expanded, frames, strict=True)):
            stride = (1, 2, 2) if number == 0 and level != 3 else 1
            wide = 5 if deep == 1 else 3
            before = net.c
            net.conv(inner, 1, act="hardswish", norm=True)
            net.dw((deep, wide, wide), stride, "hardswish", norm=True)
            net.conv(k, 1, norm=True, residual=before == k)
    return net


def mobile_net_3d(size: Size) -> Net:
    """MobileNetV2 in three dimensions."""
    net = Net(3, size).conv(32, 3, (1, 2, 2), "relu6", norm=True)
    for ratio, k, depth, stride in (
        (1, 16, 1, (1, 1, 1)), (6, 24, 2, (2, 2, 2)), (6, 32, 3, (2, 2, 2)), (6, 64, 4, (2, 2, 2)),
        (6, 96, 3, (1, 1, 1)), (6, 160, 3, (2, 2, 2)), (6, 320, 1, (1, 1, 1)),
    ):  # fmt: skip
        for number in range(depth):
            before = net.c
            if ratio > 1:
                net.conv(ratio * before, 1, act="relu6", norm=True)
            net.dw(3, stride if number == 0 else 1, "relu6", norm=True)
            net.conv(k, 1, norm=True, residual=number > 0)
    return net.conv(1280, 1, act="relu6", norm=True)


def uni_former(depths: Sequence[int], size: Size) -> Net:
    """Positions by 3x3x3 layers, and in two stages affinities by 5x5x5 ones, all depthwise."""
    net = Net(3, size).conv(64, (3, 4, 4), (2, 4, 4), padding=(1, 0, 0))
    for level, (k, depth) in enumerate(zip((64, 128, 320, 512), depths, strict=True)):
        if level:
            net.conv(k, (1, 2, 2), (1, 2, 2), padding=0)
        for _ in range(depth):
            net.dw(3)
            if level < 2:
                net.conv(k, 1).dw(5).conv(k, 1).conv(4 * k, 1, act="gelu").conv(k, 1)
    return net


def pooled_attention(stage: int, size: Size) -> Net:
    """Write the layers that pool queries, keys and values of the 96 channels of a head; heads are
    samples. `size` is that of the stage's input."""
    net = Net(96, size)
    if stage:
        net.fork().dw(3, (1, 2, 2), bias=False)
    return net.dw(3, (1, 8 >> stage, 8 >> stage), bias=False)


# Video decoders


def causal_decoder(
    latent: int, widths: Sequence[int], units: int, doubled: Sequence[int], size: Size,
    *, first: int = 0, last: int = 3, padding: Axes = (0, 1, 1),
) -> Net:  # fmt: skip
    """Residual units of causal layers, whose inputs are padded in front, between interpolations;
    those of `doubled` levels double the frames, too."""
    net = Net(latent, size)

    def layer(k: int, **more: bool) -> None:
        if padding == 0:  # the code pads all axes itself
            at = net.size
            net.to(size=(at[0], at[1] + 2, at[2] + 2)).conv(k, 3, causal="pad", padding=0, **more)
        else:
            net.conv(k, 3, causal="pad", padding=padding, **more)

    def unit(k: int) -> None:
        if net.c != k:
            net.fork().conv(k, 1)
        layer(k)
        layer(k, residual=True)

    layer(first or widths[0])
    for _ in range(2):
        unit(net.c)
    for level, k in enumerate(widths):
        for _ in range(units):
            unit(k)
        if level < len(widths) - 1:
            net.grow((2 if level in doubled else 1, 2, 2))
            layer(k)
    layer(last)
    return net


def temporal_decoder(size: Size) -> Net:
    """Write the temporal layers of residual units over frames; the spatial ones are 2-D."""
    net = Net(512, size)
    for k in (512, 512, 256, 128):
        net.to(k)
        for _ in range(3):
            net.conv(k, (3, 1, 1)).conv(k, (3, 1, 1), residual=True)
        if k > 128:
            net.grow((1, 2, 2))
    return net.to(3).conv(3, (3, 1, 1))


_STAGES_A1 = (
    (16, (40, 40), (1, 3)), (40, (96, 120, 96, 96), (3, 3, 3, 3)),
    (64, (216, 128, 216, 168, 216), (5, 3, 3, 3, 3)),
    (64, (216, 216, 216, 128, 128, 216), (5, 3, 3, 3, 1, 3)),
    (136, (456, 360, 360, 360, 456, 456, 544), (5, 1, 1, 1, 1, 3, 3)),
)  # fmt: skip
_STAGES = {
    "a0": (8, (
        (8, (24,), (1,)), (32, (80, 80, 80), (3, 3, 3)), (56, (184, 112, 184), (5, 3, 3)),
        (56, (184, 184, 184, 184), (5, 3, 3, 3)), (104, (384, 280, 280, 344), (5, 1, 1, 1)),
    )),
    "a1": (16, _STAGES_A1),
    "a2": (16, (
        (16, (40, 40, 64), (1, 3, 3)), (40, (96, 120, 96, 96, 120), (3, 3, 3, 3, 3)),
        (72, (240, 160, 240, 192, 240), (5, 3, 3, 3, 3)),
        (72, (240, 240, 240, 240, 144, 240), (5, 3, 3, 3, 1, 3)),
        (144, (480, 384, 384, 480, 480, 480, 576), (5, 1, 1, 1, 1, 3, 1)),
    )),
    "a3": (16, (
        (16, (40, 40, 64, 40), (1, 3, 3, 3)),
        (48, (112, 144, 112, 112, 144, 144), (3, 3, 3, 3, 3, 3)),
        (80, (240, 152, 240, 192, 240), (5, 3, 3, 3, 3)),
        (88, (264, 264, 264, 264, 160, 264, 264, 264), (5, 3, 3, 3, 1, 3, 3, 3)),
        (168, (560, 448, 448, 560, 560, 560, 448, 448, 560, 672), (5, 1, 1, 1, 1, 3, 1, 1, 3, 3)),
    )),
}  # fmt: skip
_RATIOS_L = (3, 4, 8, 8, 8, 8, 8, 4, 3)
_PATCH, _CLIP = (2, 128, 128, 128), (1, 16, 224, 224)

VOLUMES: Mapping[str, Network] = {
    "unet_3d": Network(
        "volumes", "arXiv:1606.06650", unet_3d, ((1, 64, 128, 128), (2, 64, 64, 64))
    ),
    "v_net": Network("volumes", "arXiv:1606.04797", v_net, ((1, 64, 128, 128),)),
    "nn_unet": Network(
        "volumes", "10.1038/s41592-020-01008-z",
        partial(nn_unet, (32, 64, 128, 256, 320, 320)), (_PATCH, (2, 96, 160, 160)),
    ),
    "dyn_unet": Network(
        "volumes", "github.com/Project-MONAI/MONAI, dynunet.py",
        partial(dyn_unet, (64, 96, 128, 192, 256, 384, 512)), ((2, 128, 128, 128),),
    ),
    "seg_resnet": Network(
        "volumes", "arXiv:1810.11654", partial(seg_resnet, 32), ((1, 128, 160, 160),)
    ),
    **{
        f"med_next_{name}_{window}": Network(
            "volumes", "arXiv:2303.09975", partial(med_next, depths, ratios, window), runs
        )
        for name, depths, ratios, window, runs in (
            ("s", (2,) * 9, (2,) * 9, 3, (_PATCH, (1, 96, 96, 96))),
            ("b", (2,) * 9, (2, 3, 4, 4, 4, 4, 4, 3, 2), 5, (_PATCH, (1, 128, 128, 128))),
            ("m", (3, 4, 4, 4, 4, 4, 4, 4, 3), (2, 3, 4, 4, 4, 4, 4, 3, 2), 3, (_PATCH,)),
            ("l", (3, 4, 8, 8, 8, 8, 8, 4, 3), _RATIOS_L, 5, (_PATCH, (2, 96, 128, 128))),
        )
    },
    "ux_net": Network(
        "volumes", "arXiv:2209.15076", ux_net, ((2, 96, 96, 96), (1, 128, 128, 128))
    ),
    "seg_former_3d": Network(
        "volumes", "arXiv:2404.10156", seg_former_3d, ((2, 128, 128, 128),)
    ),
    "c3d": Network("video", "arXiv:1412.0767", c3d, ((30, 16, 112, 112), (1, 16, 112, 112))),
    "i3d": Network(
        "video", "arXiv:1705.07750", partial(inception_3d, False), ((6, 64, 224, 224),)
    ),
    "s3d": Network(
        "video", "arXiv:1712.04851", partial(inception_3d, True), ((6, 64, 224, 224),)
    ),
    **{
        f"{form}_18": Network(
            "video", "arXiv:1711.11248", partial(resnet_18, form), ((16, 16, 112, 112),)
        )
        for form in ("r3d", "mc3", "r2plus1d")
    },
    "slow_fast_r50": Network(
        "video", "arXiv:1812.03982", slow_fast, ((8, 8, 224, 224), (1, 8, 256, 256))
    ),
    "p3d_r50": Network("video", "arXiv:1711.10305", p3d, ((8, 16, 160, 160),)),
    "cost_r50": Network("video", "arXiv:1903.01197", cost, ((8, 8, 224, 224),)),
    **{
        f"{form}_csn_{name}": Network(
            "video", "arXiv:1904.02811", partial(csn, depths, form == "ip"), runs
        )
        for form, name, depths, runs in (
            ("ir", "50", (3, 4, 6, 3), ((8, 8, 224, 224), (1, 32, 256, 256))),
            ("ip", "152", (3, 8, 36, 3), ((4, 32, 224, 224), (16, 8, 224, 224))),
        )
    },
    **{
        f"x3d_{size}": Network("video", "arXiv:2004.04730", partial(x3d, depths), runs)
        for size, depths, runs in (
            ("s", (3, 5, 11, 7), ((16, 13, 160, 160), (1, 13, 182, 182))),
            ("m", (3, 5, 11, 7), ((16, 16, 224, 224), (1, 16, 256, 256))),
            ("l", (5, 10, 25, 15), ((4, 16, 312, 312), (1, 16, 356, 356))),
        )
    },
    **{
        f"movi_net_{name}": Network(
            "video", "arXiv:2103.11511", partial(movi_net, *stages), runs
        )
        for (name, stages), runs in zip(
            _STAGES.items(),
            (
                ((16, 50, 172, 172), (1, 50, 172, 172)), ((8, 50, 172, 172),),
                ((8, 50, 224, 224), (1, 50, 224, 224)), ((2, 120, 256, 256),),
            ),
            strict=True,
        )
    },
    "mobile_net_v2_3d": Network(
        "video", "arXiv:1904.02422", mobile_net_3d, ((64, 16, 112, 112), (1, 16, 112, 112))
    ),
    **{
        f"uni_former_{size}": Network(
            "video", "arXiv:2201.04676", partial(uni_former, depths), runs
        )
        for size, depths, runs in (
            ("s", (3, 4, 8, 3), ((8, 16, 224, 224), _CLIP)),
            ("b", (5, 8, 20, 7), ((4, 32, 224, 224),)),
        )
    },
    **{
        f"mvit_v2_s_{stage}": Network(
            "video", "arXiv:2112.01526", partial(pooled_attention, stage),
            ((8 << stage, 8, side, side), (2 << stage, 8, side, side)),
        )
        for stage, side in enumerate((56, 56, 28, 14))
    },
    "wan_decoder": Network(
        "video-decoder", "arXiv:2503.20314",
        partial(causal_decoder, 16, (384, 192, 192, 96), 3, (0, 1), first=384),
        ((1, 1, 60, 104), (1, 1, 90, 160)),
    ),
    "hunyuan_decoder": Network(
        "video-decoder", "arXiv:2412.03603",
        partial(causal_decoder, 16, (512, 512, 256, 128), 3, (1, 2), padding=0),
        ((1, 5, 32, 32), (1, 16, 32, 32)),
    ),
    "cog_video_x_decoder": Network(
        "video-decoder", "arXiv:2408.06072",
        partial(causal_decoder, 16, (512, 256, 256, 128), 4, (0, 1)), ((1, 2, 60, 90),),
    ),
    "ltx_decoder": Network(
        "video-decoder", "arXiv:2501.00103",
        partial(causal_decoder, 128, (512, 512, 256, 128), 4, (0, 1, 2), last=48),
        ((1, 4, 16, 24),),
    ),
    "svd_decoder": Network(
        "video-decoder", "arXiv:2311.15127", temporal_decoder, ((1, 14, 72, 128),)
    ),
}  # fmt: skip

"""Networks with dense convolutions that no package at hand has, written down layer by layer.

Each function gives the convolutions of one network that have a single group, with repeats. They
follow published architectures in their channels, filters and image sizes, but not in every detail:
what counts here is which layers such a network has, and not how often. Transposed convolutions are
left out, because no `Problem` describes them. An activation that no `Problem` knew, such as leaky
ReLU, was a kernel of its own after the convolution, so the layer is written down without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from confpred.problem.conv2d import Problem

Size = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layer:
    """One dense convolution of a network.

    `problem` is the forward of one image in float16, with bias, residual and activation as they
    follow in inference. A batch norm counts as a bias, because it is folded. `bias_gradient` says
    whether training computes the gradient of a bias: with a batch norm there is mostly none.
    """

    problem: Problem
    bias_gradient: bool = False


Layers = Iterator[Layer]


def conv(
    c: int,
    k: int,
    size: Size,
    window: Size = 3,
    stride: Size = 1,
    act: str = "none",
    *,
    norm: bool = False,
    residual: bool = False,
    padding: Size | None = None,
    dilation: int = 1,
) -> Layer:
    """Return a layer on an image of `size` pixels, by default padded by half its filter.

    `norm` says that a batch norm follows; otherwise the layer has a bias of its own.
    """
    h, w = _pair(size)
    r, s = _pair(window)
    pads = (dilation * (r // 2), dilation * (s // 2)) if padding is None else _pair(padding)
    problem = Problem(
        1, c, h, w, k, r, s, _pair(stride), pads, (dilation, dilation),
        bias=True, activation=act, residual=residual,
    )  # fmt: skip
    return Layer(problem, not norm)


def _pair(value: Size) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _over(size: Size, factor: int) -> tuple[int, int]:
    """Return the size of an image that was made smaller by `factor`."""
    h, w = _pair(size)
    return h // factor, w // factor


def unit(c: int, k: int, size: Size, act: str = "none", norm: bool = False) -> Layers:
    """Yield a residual unit of two convolutions, with a projection where its channels differ."""
    yield conv(c, k, size, act=act, norm=norm)
    yield conv(k, k, size, act=act if norm else "none", norm=norm, residual=True)
    if c != k:
        yield conv(c, k, size, 1)


# Detection


def yolo(widths: Sequence[int], depths: Sequence[int], size: int, classes: int = 80) -> Layers:
    """Yield a one-stage detector with split bottlenecks, a path aggregation neck and decoupled
    heads."""
    block = partial(conv, act="silu", norm=True)

    def split(c: int, k: int, image: int, depth: int) -> Layers:
        yield block(c, k, image, 1)
        yield from [block(k // 2, k // 2, image)] * (2 * depth)
        yield block((2 + depth) * k // 2, k, image, 1)

    yield block(3, widths[0], size, 3, 2)
    for level in range(1, 5):
        c, k, image = widths[level - 1], widths[level], size >> level
        yield block(c, k, image, 3, 2)
        yield from split(k, k, image // 2, depths[level - 1])
    small, middle, large = widths[2:]
    last = size // 32
    yield block(large, large // 2, last, 1)  # pooling of several sizes
    yield block(2 * large, large, last, 1)
    yield from split(large + middle, middle, 2 * last, depths[0])
    yield from split(middle + small, small, 4 * last, depths[0])
    yield block(small, small, 4 * last, 3, 2)
    yield from split(small + middle, middle, 2 * last, depths[0])
    yield block(middle, middle, 2 * last, 3, 2)
    yield from split(middle + large, large, last, depths[0])
    boxes, scores = max(16, small // 4, 64), max(small, min(classes, 100))
    for c, image in ((small, 4 * last), (middle, 2 * last), (large, last)):
        for k, out in ((boxes, 64), (scores, classes)):
            yield block(c, k, image)
            yield block(k, k, image)
            yield conv(k, out, image, 1)


def yolo_v3_head(size: int) -> Layers:
    """Yield the three heads of a detector on Darknet-53; leaky ReLU follows."""
    for wide, c, factor in ((1024, 1024, 32), (512, 768, 16), (256, 384, 8)):
        image = size // factor
        for inputs in (c, wide, wide):
            yield conv(inputs, wide // 2, image, 1, norm=True)
            yield conv(wide // 2, wide, image, norm=True)
        yield conv(wide, 255, image, 1)
        if factor > 8:
            yield conv(wide // 2, wide // 4, image, 1, norm=True)


def point_pillars() -> Layers:
    """Yield the image network of a detector in point clouds, seen from above."""
    block = partial(conv, act="relu", norm=True)
    sizes = ((64, 64, (496, 432), 3), (64, 128, (248, 216), 5), (128, 256, (124, 108), 5))
    for c, k, size, count in sizes:
        yield block(c, k, size, 3, 2)
        yield from [block(k, k, _over(size, 2))] * count
    for k in (2, 14, 4):
        yield conv(384, k, (248, 216), 1)


def center_point(size: int = 180) -> Layers:
    """Yield the image network and the heads of another detector in point clouds."""
    block = partial(conv, act="relu", norm=True)
    yield block(256, 128, size)
    yield from [block(128, 128, size)] * 5
    yield block(128, 256, size, 3, 2)
    yield from [block(256, 256, size // 2)] * 5
    yield block(128, 256, size, 1)
    yield block(512, 64, size)
    for k in (2, 1, 3, 2, 2, 10):
        yield block(64, 64, size)
        yield conv(64, k, size)


# Segmentation, depth, denoising


def unet(widths: Sequence[int], size: int, inputs: int = 3, outputs: int = 2) -> Layers:
    """Two convolutions a level, down by pooling and up by interpolation."""
    block = partial(conv, act="relu", norm=True)
    for level, (c, k) in enumerate(pairwise((inputs, *widths))):
        yield block(c, k, size >> level)
        yield block(k, k, size >> level)
    for level, (k, c) in reversed([*enumerate(pairwise(widths))]):
        yield conv(c, k, size >> level, 1)
        yield block(2 * k, k, size >> level)
        yield block(k, k, size >> level)
    yield conv(widths[0], outputs, size, 1)


def unet_without_padding() -> Layers:
    """Yield the first U-Net, whose images lose two pixels at each convolution."""
    size, c = 572, 1
    for k in (64, 128, 256, 512, 1024):
        yield conv(c, k, size, act="relu", padding=0)
        yield conv(k, k, size - 2, act="relu", padding=0)
        size, c = (size - 4) // 2, k
    size = 28
    for k in (512, 256, 128, 64):
        size *= 2
        yield conv(2 * k, k, size, act="relu", padding=0)
        yield conv(k, k, size - 2, act="relu", padding=0)
        size -= 4
    yield conv(64, 2, size, 1)


def strided_unet(widths: Sequence[int], size: Size) -> Layers:
    """Yield a U-Net of medical images that goes down by strides; leaky ReLU follows instance
    norms."""
    for level, (c, k) in enumerate(pairwise((1, *widths))):
        yield conv(c, k, _over(size, 1 << max(level - 1, 0)), 3, 1 if level == 0 else 2)
        yield conv(k, k, _over(size, 1 << level))
    for level, k in reversed([*enumerate(widths[:-1])]):
        yield conv(2 * k, k, _over(size, 1 << level))
        yield conv(k, k, _over(size, 1 << level))
        yield conv(k, 4, _over(size, 1 << level), 1)


def depth_decoder(inputs: Sequence[int], size: int, c: int = 256) -> Layers:
    """Yield the decoder of a network that estimates depth, with residual units of
    pre-activation."""
    for level, k in enumerate(inputs):
        image = size >> (2 + level)
        yield conv(k, c, image)
        yield from [*unit(c, c, image, "relu")] * 2
        yield conv(c, c, 2 * image, 1)
    yield conv(c, c // 2, size // 2)
    yield conv(c // 2, 32, size, act="relu")
    yield conv(32, 1, size, 1, act="relu")


def denoiser(c: int, layers: int, size: Size, colors: int) -> Layers:
    """Yield a plain chain of convolutions of one width."""
    yield conv(colors, c, size, act="relu")
    yield from [conv(c, c, size, act="relu", norm=True)] * (layers - 2)
    yield conv(c, colors, size)


# Pose


def hourglass(size: int, joints: int) -> Layers:
    """One stack of an hourglass of bottlenecks with pre-activation."""

    def bottleneck(c: int, k: int, image: int) -> Layers:
        yield conv(c, k // 2, image, 1, act="relu", norm=True)
        yield conv(k // 2, k // 2, image, act="relu", norm=True)
        yield conv(k // 2, k, image, 1, residual=True)
        if c != k:
            yield conv(c, k, image, 1)

    yield conv(3, 64, size, 7, 2, act="relu", norm=True)
    yield from bottleneck(64, 128, size // 2)
    yield from bottleneck(128, 128, size // 4)
    yield from bottleneck(128, 256, size // 4)
    for level in range(2, 7):
        yield from [*bottleneck(256, 256, size >> level)] * 3
    yield conv(256, 256, size // 4, 1, act="relu", norm=True)
    yield conv(256, joints, size // 4, 1)
    yield conv(joints, 256, size // 4, 1, residual=True)


def part_affinity(size: Size) -> Layers:
    """Yield a pose network of many stages with filters of 7x7, after the first layers of a VGG."""
    c = 3
    for level, widths in enumerate(((64, 64), (128, 128), (256,) * 4, (512, 512, 256, 128))):
        for k in widths:
            yield conv(c, k, _over(size, 1 << level), act="relu")
            c = k
    image = _over(size, 8)
    for outputs in (38, 19):
        yield from [conv(128, 128, image, act="relu")] * 3
        yield conv(128, 512, image, 1, act="relu")
        yield conv(512, outputs, image, 1)
        yield conv(185, 128, image, 7, act="relu")
        yield from [conv(128, 128, image, 7, act="relu")] * 4
        yield conv(128, 128, image, 1, act="relu")
        yield conv(128, outputs, image, 1)


# Generative networks


def diffusion_unet(
    widths: Sequence[int],
    size: int,
    *,
    blocks: int = 2,
    attention: Sequence[int] = (),
    colors: int = 4,
    strided: bool = True,
) -> Layers:
    """Yield the U-Net of a diffusion model; `attention` has 1x1 projections at these levels.

    A time embedding is added to the first convolution's output, and group norms come before the
    convolutions, so only the bias and the residual can follow one in the same kernel.
    """

    def block(c: int, k: int, level: int) -> Layers:
        yield from unit(c, k, size >> level)
        if level in attention:
            yield conv(k, k, size >> level, 1)
            yield conv(k, k, size >> level, 1, residual=True)

    yield conv(colors, widths[0], size)
    c, skips, last = widths[0], [widths[0]], len(widths) - 1
    for level, k in enumerate(widths):
        for _ in range(blocks):
            yield from block(c, k, level)
            c = k
            skips.append(k)
        if level < last:
            if strided:
                yield conv(k, k, size >> level, 3, 2)
            skips.append(k)
    yield from [*block(c, c, last)] * 2
    for level in range(last, -1, -1):
        for _ in range(blocks + 1):
            yield from block(c + skips.pop(), widths[level], level)
            c = widths[level]
        if level:
            yield conv(c, c, size >> (level - 1))
    yield conv(c, colors, size)


def vae_decoder(widths: Sequence[int], size: int, latent: int, blocks: int = 3) -> Layers:
    """Yield the decoder of an autoencoder, from a latent image of `size` pixels up."""
    yield conv(latent, widths[0], size)
    yield from [*unit(widths[0], widths[0], size)] * 2
    for level, (c, k) in enumerate(pairwise((widths[0], *widths))):
        image = size << level
        yield from unit(c, k, image)
        yield from [*unit(k, k, image)] * (blocks - 1)
        if level < len(widths) - 1:
            yield conv(k, k, 2 * image)
    yield conv(widths[-1], 3, size << (len(widths) - 1))


def vae_encoder(widths: Sequence[int], size: int, latent: int) -> Layers:
    """Yield the encoder to such a decoder. It pads below and to the right before each stride."""
    yield conv(3, widths[0], size)
    for level, (c, k) in enumerate(pairwise((widths[0], *widths))):
        image = size >> level
        yield from unit(c, k, image)
        yield from unit(k, k, image)
        if level < len(widths) - 1:
            yield conv(k, k, image + 1, 3, 2, padding=0)
    yield conv(widths[-1], 2 * latent, size >> (len(widths) - 1))


def tiny_decoder(size: int) -> Layers:
    """Yield a small stand-in for the decoder of an autoencoder: 64 channels throughout."""
    yield conv(4, 64, size, act="relu")
    for level in range(4):
        for _ in range(3 if level < 3 else 1):
            yield from [conv(64, 64, size << level, act="relu")] * 2
            yield conv(64, 64, size << level, act="relu", residual=True)
        yield conv(64, 64 if level < 3 else 3, size << min(level + 1, 3))


def image_translator(size: int) -> Layers:
    """Yield a generator of residual blocks, and a discriminator of patches with filters of 4x4."""
    yield conv(3, 64, size + 6, 7, padding=0)
    yield conv(64, 128, size, 3, 2)
    yield conv(128, 256, size // 2, 3, 2)
    yield from [conv(256, 256, size // 4 + 2, padding=0)] * 18
    yield conv(64, 3, size + 6, 7, padding=0)
    yield conv(3, 64, size, 4, 2, padding=1)
    yield conv(64, 128, size // 2, 4, 2, padding=1)
    yield conv(128, 256, size // 4, 4, 2, padding=1)
    yield conv(256, 512, size // 8, 4, 1, padding=1)
    yield conv(512, 1, size // 8 - 1, 4, 1, padding=1)


def strided_discriminator(size: int, c: int = 64) -> Layers:
    """Yield a discriminator that halves the image down to 4x4 pixels."""
    yield conv(3, c, size, 4, 2, padding=1)
    while size > 8:
        size //= 2
        yield conv(c, min(2 * c, 512), size, 4, 2, padding=1, norm=True)
        c = min(2 * c, 512)
    yield conv(c, 1, 4, 4, padding=0)


def wide_generator(c: int, size: int) -> Layers:
    """Yield a generator that doubles the image from 4x4 pixels, with residual blocks of 3x3."""
    widths = [m * c for m in (16, 16, 8, 8, 4, 2, 1)]
    for level, (before, k) in enumerate(pairwise(widths), 1):
        if 4 << level > size:
            break
        yield conv(before, k, 4 << level)
        yield conv(k, k, 4 << level, residual=True)
        yield conv(before, k, 4 << level, 1)


# Super-resolution


def edsr(c: int, size: Size, factor: int = 4) -> Layers:
    """Residual blocks of one width without norms, then subpixel convolutions."""
    yield conv(3, c, size)
    yield from [*unit(c, c, size, "relu")] * 16
    h, w = _pair(size)
    while factor > 1:
        yield conv(c, 4 * c, (h, w))
        h, w, factor = 2 * h, 2 * w, factor // 2
    yield conv(c, 3, (h, w))


def rrdb(size: Size, growth: int = 32, c: int = 64) -> Layers:
    """Blocks of densely connected convolutions; leaky ReLU follows them."""
    yield conv(3, c, size)
    for _ in range(3):
        for index in range(4):
            yield conv(c + index * growth, growth, size)
        yield conv(c + 4 * growth, c, size)
    yield conv(c, c, size, residual=True)
    h, w = _pair(size)
    for factor in (2, 4):
        yield conv(c, c, (factor * h, factor * w))
    yield conv(c, c, (4 * h, 4 * w))
    yield conv(c, 3, (4 * h, 4 * w))


def small_upscaler(size: Size) -> Layers:
    """Early networks of few channels and large filters, for one color plane."""
    yield conv(1, 64, size, 9, act="relu")
    yield conv(64, 32, size, 5, act="relu")
    yield conv(32, 1, size, 5)
    yield conv(1, 56, size, 5)
    yield conv(56, 12, size, 1)
    yield from [conv(12, 12, size)] * 4
    yield conv(12, 56, size, 1)
    yield conv(1, 64, size, 5)
    yield conv(64, 32, size)
    yield conv(32, 16, size)


# Optical flow


def pyramid_flow(size: tuple[int, int]) -> Layers:
    """Yield a flow network with a pyramid of features, cost volumes of 81 and dense decoders."""
    for level, (c, k) in enumerate(pairwise((3, 16, 32, 64, 96, 128, 196))):
        yield conv(c, k, _over(size, 1 << level), 3, 2)
        yield conv(k, k, _over(size, 2 << level))
    for level, features in ((6, 0), (5, 128), (4, 96), (3, 64), (2, 32)):
        c = 81 + (features + 4 if features else 0)
        for k in (128, 128, 96, 64, 32):
            yield conv(c, k, _over(size, 1 << level))
            c += k
        yield conv(c, 2, _over(size, 1 << level))
    for k, dilation in ((128, 1), (128, 2), (128, 4), (96, 8), (64, 16), (32, 1)):
        yield conv(c, k, _over(size, 4), dilation=dilation)
        c = k


def stacked_flow(size: tuple[int, int]) -> Layers:
    """Yield an early flow network that takes both images as six channels."""
    widths = ((64, 7, 2), (128, 5, 2), (256, 5, 2), (256, 3, 1), (512, 3, 2), (512, 3, 1),
              (512, 3, 2), (512, 3, 1), (1024, 3, 2), (1024, 3, 1))  # fmt: skip
    c, factor = 6, 1
    for k, window, stride in widths:
        yield conv(c, k, _over(size, factor), window, stride)
        c, factor = k, factor * stride
    for c, factor in ((1024, 64), (1026, 32), (770, 16), (386, 8), (194, 4)):
        yield conv(c, 2, _over(size, factor))


# Games, sound, text, faces


def board_game(c: int, size: int, planes: int, blocks: int = 10) -> Layers:
    """Yield a tower of residual blocks for Go, with a policy and a value head."""
    yield conv(planes, c, size, act="relu", norm=True)
    yield from [*unit(c, c, size, "relu", norm=True)] * blocks
    yield conv(c, 2, size, 1, act="relu", norm=True)
    yield conv(c, 32, size, 1, act="relu", norm=True)
    yield conv(c, 73, size)


def screen_agent() -> Layers:
    """Two agents that see 84x84 and 72x96 pixels of a game's screen."""
    yield conv(4, 32, 84, 8, 4, act="relu", padding=0)
    yield conv(32, 64, 20, 4, 2, act="relu", padding=0)
    yield conv(64, 64, 9, 3, act="relu", padding=0)
    for level, (c, k) in enumerate(pairwise((3, 16, 32, 32))):
        yield conv(c, k, _over((72, 96), 1 << level))
        yield from [*unit(k, k, _over((72, 96), 2 << level), "relu")] * 2


def sound_tagger(size: tuple[int, int]) -> Layers:
    """Yield a network of fourteen layers on a spectrogram of (frames, bands)."""
    for level, (c, k) in enumerate(pairwise((1, 64, 128, 256, 512, 1024, 2048))):
        yield conv(c, k, _over(size, 1 << level), act="relu", norm=True)
        yield conv(k, k, _over(size, 1 << level), act="relu", norm=True)


def speech_front(frames: int) -> Layers:
    """Return the layers before the sequence layers of two speech recognizers."""
    yield conv(1, 32, (161, frames), (41, 11), (2, 2), padding=(20, 5), norm=True)
    yield conv(32, 32, (81, (frames + 1) // 2), (21, 11), (2, 1), padding=(10, 5), norm=True)
    yield conv(1, 256, (frames, 80), 3, 2, act="relu", padding=0)
    yield conv(256, 256, ((frames - 1) // 2, 39), 3, 2, act="relu", padding=0)


def speaker_resnet(size: tuple[int, int]) -> Layers:
    """Yield a narrow ResNet on a spectrogram of (bands, frames), which tells speakers apart."""
    block = partial(conv, act="relu", norm=True)
    yield block(1, 32, size)
    for level, (c, k) in enumerate(pairwise((32, 32, 64, 128, 256))):
        if level:
            yield block(c, k, _over(size, 1 << (level - 1)), 3, 2)
            yield conv(c, k, _over(size, 1 << (level - 1)), 1, 2, norm=True)
        yield from [*unit(k, k, _over(size, 1 << level), "relu", norm=True)] * 3


def text_reader(width: int) -> Layers:
    """Yield the convolutions of a reader of text lines that are 32 pixels high."""
    yield conv(1, 64, (32, width), act="relu")
    yield conv(64, 128, (16, width // 2), act="relu")
    yield conv(128, 256, (8, width // 4), act="relu", norm=True)
    yield conv(256, 256, (8, width // 4), act="relu")
    yield conv(256, 512, (4, width // 4 + 1), act="relu", norm=True)
    yield conv(512, 512, (4, width // 4 + 1), act="relu")
    yield conv(512, 512, (2, width // 4 + 2), 2, act="relu", norm=True, padding=0)


def text_finder(size: int) -> Layers:
    """Yield the neck and the head of a network that finds text, after a ResNet-18."""
    for level, k in enumerate((64, 128, 256, 512)):
        yield conv(k, 256, size >> (2 + level), 1)
        yield conv(256, 64, size >> (2 + level))
    yield conv(256, 64, size // 4, act="relu", norm=True)


def face_resnet() -> Layers:
    """Yield a ResNet of 50 layers for faces of 112x112 pixels; parametric ReLU follows."""
    yield conv(3, 64, 112, norm=True)
    c, size = 64, 112
    for k, blocks in ((64, 3), (128, 4), (256, 14), (512, 3)):
        for index in range(blocks):
            yield conv(c, k, size, norm=True)
            stride = 1 if index else 2
            yield conv(k, k, size, 3, stride, norm=True, residual=True)
            if not index:
                yield conv(c, k, size, 1, 2, norm=True)
            size, c = size // stride, k


#: Each kind of network, with the written networks of that kind.
WRITTEN: Mapping[str, Mapping[str, tuple[Callable[[], Layers], ...]]] = {
    "detection": {
        "yolo_s": (partial(yolo, (32, 64, 128, 256, 512), (1, 2, 2, 1), 640),),
        "yolo_m": (partial(yolo, (48, 96, 192, 384, 576), (2, 4, 4, 2), 640),),
        "yolo_l": (partial(yolo, (64, 128, 256, 512, 512), (3, 6, 6, 3), 1280),),
        "yolo_v3": (partial(yolo_v3_head, 416), partial(yolo_v3_head, 608)),
    },
    "lidar": {"point_pillars": (point_pillars,), "center_point": (center_point,)},
    "medical": {
        "unet": (
            partial(unet, (64, 128, 256, 512, 1024), 256),
            partial(unet, (64, 128, 256, 512, 1024), 512, 1),
        ),
        "unet_small": (partial(unet, (32, 64, 128, 256, 512), 256, 1, 4),),
        "unet_odd": (partial(unet, (24, 48, 96, 192), 160, 1, 9),),
        "unet_without_padding": (unet_without_padding,),
        "strided_unet": (
            partial(strided_unet, (32, 64, 128, 256, 512, 512), (512, 512)),
            partial(strided_unet, (32, 64, 128, 256, 480, 480), (256, 224)),
        ),
    },
    "depth": {
        "depth_large": (partial(depth_decoder, (256, 512, 1024, 1024), 384),),
        "depth_small": (partial(depth_decoder, (32, 48, 136, 384), 256, 64),),
    },
    "denoising": {
        "denoiser": (partial(denoiser, 64, 17, 50, 1), partial(denoiser, 64, 17, (320, 480), 1)),
        "denoiser_narrow": (partial(denoiser, 48, 10, (540, 960), 3),),
        "denoiser_wide": (partial(denoiser, 96, 12, 96, 3),),
    },
    "pose": {
        "hourglass": (partial(hourglass, 256, 16), partial(hourglass, 384, 17)),
        "part_affinity": (partial(part_affinity, 368), partial(part_affinity, (368, 656))),
    },
    "diffusion": {
        "diffusion_sd": (
            partial(diffusion_unet, (320, 640, 1280, 1280), 64, attention=(0, 1, 2)),
            partial(diffusion_unet, (320, 640, 1280, 1280), 96, attention=(0, 1, 2)),
        ),
        "diffusion_xl": (partial(diffusion_unet, (320, 640, 1280), 128),),
        "diffusion_small_images": (
            partial(diffusion_unet, (128, 256, 256, 256), 32, attention=(1,), colors=3),
        ),
        "diffusion_pixels_64": (
            partial(diffusion_unet, (192, 384, 576, 768), 64, blocks=3, colors=3, strided=False),
        ),
        "diffusion_pixels_256": (
            partial(
                diffusion_unet, (256, 256, 512, 512, 1024, 1024), 256, colors=3, strided=False
            ),
        ),
    },
    "autoencoder": {
        "vae_decoder": (
            partial(vae_decoder, (512, 512, 256, 128), 64, 4),
            partial(vae_decoder, (512, 512, 256, 128), 32, 4),
            partial(vae_decoder, (512, 512, 256, 128), 128, 16),
        ),
        "vae_encoder": (partial(vae_encoder, (128, 256, 512, 512), 512, 4),),
        "vector_quantizer": (partial(vae_decoder, (512, 256, 256, 128, 128), 16, 256),),
        "tiny_decoder": (partial(tiny_decoder, 64),),
    },
    "adversarial": {
        "image_translator": (partial(image_translator, 256),),
        "strided_discriminator": (
            partial(strided_discriminator, 64),
            partial(strided_discriminator, 256, 48),
        ),
        "wide_generator": (partial(wide_generator, 96, 128), partial(wide_generator, 64, 256)),
    },
    "super-resolution": {
        "edsr_64": (
            partial(edsr, 64, 48), partial(edsr, 64, (180, 320)), partial(edsr, 64, 128, 2),
        ),
        "edsr_256": (partial(edsr, 256, 48), partial(edsr, 256, (96, 160), 2)),
        "rrdb": (partial(rrdb, 32), partial(rrdb, 120), partial(rrdb, (180, 320))),
        "small_upscaler": (partial(small_upscaler, 160), partial(small_upscaler, (270, 480))),
    },
    "optical-flow": {
        "pyramid_flow": (partial(pyramid_flow, (448, 1024)), partial(pyramid_flow, (384, 448))),
        "stacked_flow": (partial(stacked_flow, (384, 512)),),
    },
    "games": {
        "go": (partial(board_game, 256, 19, 17), partial(board_game, 192, 13, 22)),
        "chess": (partial(board_game, 256, 8, 112), partial(board_game, 128, 8, 119)),
        "screen_agent": (screen_agent,),
    },
    "sound": {
        "sound_tagger": (partial(sound_tagger, (1000, 64)), partial(sound_tagger, (320, 64))),
        "speech_front": (partial(speech_front, 800), partial(speech_front, 1600)),
        "speaker_resnet": (partial(speaker_resnet, (80, 200)),),
    },
    "text": {
        "text_reader": (partial(text_reader, 100), partial(text_reader, 320)),
        "text_finder": (partial(text_finder, 640),),
    },
    "faces": {"face_resnet": (face_resnet,)},
}  # fmt: skip

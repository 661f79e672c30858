"""Networks that normalise groups of channels, instances or pixels, written down norm by norm.

They follow the published architectures in channels, groups and sizes, and in the activation and the
shortcut that follow each norm, but not in every detail. Convolutions and products of matrices are
left out. A leaky ReLU, which came later, and Mish are left out as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

from confpred.problem.norm_of_groups import Norm

Size = tuple[int, ...]


@dataclass(slots=True)
class Net:
    """A network that is being written down.

    Attributes:
        size: of the next norm's input, without its channels: (height, width), a volume, or frames
            or regions of interest of an image.
        apart: leading axes of `size` whose members have statistics of their own.
        layers: the norms, with repeats, of one input of the network.
    """

    size: Size
    apart: int = 0
    layers: list[Norm] = field(default_factory=list)

    def group(
        self, c: int, act: str = "none", groups: int = 32, apart: int | None = None, **fields: Any
    ) -> Net:
        """Append a group norm; `apart` counts for it alone."""
        apart = self.apart if apart is None else apart
        samples, pixels = prod(self.size[:apart]), prod(self.size[apart:])
        self.layers.append(Norm(samples, pixels, c, groups, activation=act, **fields))
        return self

    def instance(self, c: int, act: str = "none", *, affine: str = "none", **fields: Any) -> Net:
        return self.group(c, act, c, affine=affine, **fields)

    def layer(self, c: int, act: str = "none", *, heads: int = 1, **fields: Any) -> Net:
        """Append a layer norm of the channels of each pixel, or of each of its `heads`."""
        self.layers.append(Norm(prod(self.size) * heads, 1, c, activation=act, **fields))
        return self

    def rms(self, c: int, act: str = "none", *, affine: str = "weight", **fields: Any) -> Net:
        return self.layer(c, act, affine=affine, centred=False, **fields)

    def to(self, *size: int) -> Net:
        self.size = size
        return self

    def down(self, factor: int | Size = 2) -> Net:
        """Go on with every size divided, and rounded up."""
        self.size = tuple(-(-s // f) for s, f in zip(self.size, self._axes(factor), strict=True))
        return self

    def up(self, factor: int | Size = 2, *, causal: bool = False) -> Net:
        """Go on with every size multiplied; the first of `causal` frames is not repeated."""
        size = [s * f for s, f in zip(self.size, self._axes(factor), strict=True)]
        if causal:
            size[0] -= size[0] // self.size[0] - 1
        self.size = tuple(size)
        return self

    def _axes(self, factor: int | Size) -> Size:
        if isinstance(factor, tuple):
            return factor
        return (1,) * self.apart + (factor,) * (len(self.size) - self.apart)


class Network(NamedTuple):
    """A written network.

    Attributes:
        kind: what it is for.
        source: the paper, or the public code, that its channels and groups are from.
        write: returns it for an input of a size.
        runs: inputs that it is run on: the batch, and the side of a square image or the size.
    """

    kind: str
    source: str
    write: Callable[[Size], Net]
    runs: tuple[tuple[int, ...], ...]


# Diffusion


def unet(
    widths: Sequence[int], blocks: int, attention: Sequence[int], size: Size, *, stem: int = 0,
    adaptive: bool = False, resampled: bool = False, tokens: bool = False, apart: int = 0,
) -> Net:  # fmt: skip
    """Write the U-Net of denoising diffusion; the levels in `attention` have attention.

    Args:
        widths: of the levels. Frames that lie `apart` have a temporal block after each block.
        stem: width of the first convolution, the first level's if 0.
        adaptive: the time embedding scales and shifts the second norm of a block.
        resampled: residual blocks halve and double the size.
        tokens: attention is that of transformer blocks.
    """
    net, width = Net(size, apart), stem or widths[0]

    def block(c: int, k: int) -> None:
        net.group(c, "silu").group(k, "silu", adaptive=adaptive)
        if apart:
            net.group(k, "silu", apart=0)

    def attend(k: int) -> None:
        net.group(k)
        if tokens:
            net.layer(k)

    def resample(k: int, change: Callable[[], Net]) -> None:
        if resampled:
            net.group(k, "silu")
        change()
        if resampled:
            net.group(k, "silu", adaptive=adaptive)

    skips = [width]
    for level, k in enumerate(widths):
        for _ in range(blocks):
            block(width, k)
            width = k
            if level in attention:
                attend(k)
            skips.append(k)
        if level < len(widths) - 1:
            resample(k, net.down)
            skips.append(k)
    block(width, width)
    attend(width)
    block(width, width)
    for level, k in reversed([*enumerate(widths)]):
        for _ in range(blocks + 1):
            block(width + skips.pop(), k)
            width = k
            if level in attention:
                attend(k)
        if level:
            resample(k, net.up)
    return net.group(width, "silu")


def annotated_unet(size: Size) -> Net:
    """Write eight groups after the convolutions, and layer norms with a weight alone."""
    net, widths = Net(size), (64, 64, 128, 256)

    def blocks(k: int, count: int = 2) -> None:
        for _ in range(count):
            net.group(k, "silu", 8, adaptive=True).group(k, "silu", 8)

    for level, k in enumerate(widths):
        blocks(k)
        net.layer(k, affine="weight")
        if level < 3:
            net.down()
    blocks(512)
    for level, k in enumerate((512, 256, 128, 64)):
        blocks(k)
        net.layer(k, affine="weight")
        if level < 3:
            net.up()
    return net


def diffusion_policy(widths: Sequence[int], size: Size) -> Net:
    """Write eight groups; sizes are (steps, 1)."""
    net = Net(size)
    for k in widths:
        net.group(k, groups=8).down((2, 1))
    net.up((2, 1))
    for k in widths[-2::-1]:
        net.group(k, groups=8).up((2, 1))
    return net.group(widths[0], groups=8)


def cascade(widths: Sequence[int], size: Size) -> Net:
    net = Net(size)
    for level, k in enumerate(widths):
        if level:
            net.layer(widths[level - 1], affine="none").down()
        net.layer(k, affine="none")
    return net


# Autoencoders


def decoder(
    widths: Sequence[int], blocks: int, steps: Sequence[int | Size], size: Size, *,
    into: Sequence[int] = (), form: str = "group", act: str = "silu", last: str = "silu",
    middle: bool = True, causal: bool = False, apart: int = 0, **fields: Any,
) -> Net:  # fmt: skip
    """Write residual blocks of rising size; `steps` has the factor after each level but the last.

    Args:
        into: channels after each step, those of the level before if left out.
        form: the method of `Net` that writes a norm, with `fields`.
        act, last: activations of all norms but the last, and of the last.
        middle: two blocks with attention between them come first.
    """
    net, width = Net(size, apart), widths[0]
    norm = partial(getattr(net, form), **fields)
    if middle:
        norm(width, act)
        norm(width)
    for k, step, after in zip(widths, (*steps, 1), (*(into or widths[:-1]), 0), strict=True):
        for _ in range(blocks):
            norm(width, act)
            norm(k, act)
            width = k
        if after:
            net.up(step, causal=causal)
            width = after
    norm(width, last)
    return net


def encoder(
    widths: Sequence[int], blocks: int, steps: Sequence[int | Size], size: Size, *,
    middle: bool = True,
) -> Net:  # fmt: skip
    net, width = Net(size), widths[0]
    for level, k in enumerate(widths):
        for _ in range(blocks):
            net.group(width, "silu").group(k, "silu")
            width = k
        if level < len(steps):
            net.down(steps[level])
    return net.group(width) if middle else net


def dc_decoder(size: Size) -> Net:
    """Norms end the blocks, before the shortcut."""
    net = Net(size)
    for level, k in enumerate((1024, 1024, 512, 512, 256, 128)):
        if level:
            net.up()
        net.rms(k, affine="full", residual=True)
    return net.rms(128, "relu", affine="full")


def ltx_decoder(size: Size) -> Net:
    net, width = Net(size), 512
    for k, grows in ((512, False), (512, True), (256, True), (128, True)):
        if k != width:
            net.rms(width, "silu", affine="none").rms(k, "silu", affine="none").layer(width)
            width = k
        if grows:
            net.up(causal=True)
        net.rms(k, "silu", affine="none")
    return net


# Segmentation


def u_shaped(
    widths: Sequence[int], size: Size, *, form: str = "instance", act: str = "none",
    residual: bool = False, **fields: Any,
) -> Net:  # fmt: skip
    """Write pairs of convolutions, each before its norm; `residual` pairs end with a shortcut."""
    net = Net(size)
    norm = partial(getattr(net, form), **fields)
    for k in widths:
        norm(k, act)
        norm(k, act, residual=residual)
        net.down()
    net.to(*size)
    for k in widths[:-1]:
        norm(k, act)
        net.down()
    return net


def unet_3d(widths: Sequence[int], size: Size) -> Net:
    """Group norms come before the convolutions."""
    net, width = Net(size), 1
    for level, k in enumerate(widths):
        net.group(width, groups=min(8, width)).group(k // 2, groups=8)
        width = k
        if level < len(widths) - 1:
            net.down()
    for k in widths[-2::-1]:
        net.up().group(width + k, groups=8).group(k, groups=8)
        width = k
    return net


def seg_resnet(c: int, size: Size) -> Net:
    net = Net(size)
    for level in range(4):
        net.group(c << level, "relu", 8)
        if level < 3:
            net.down()
    return net


def une_tr(widths: Sequence[int], size: Size, *, windows: bool = False) -> Net:
    """Write residual blocks of instance norms beside a transformer, of `windows` or of patches."""
    net = Net(size)
    for level, k in enumerate(widths):
        net.instance(k).instance(k, residual=True)
        if windows and level:
            net.layer(k)
        net.down()
    return net if windows else net.layer(768)


def med_next(size: Size) -> Net:
    """Write an instance norm behind each depthwise convolution; transposed ones make odd sizes."""
    net, widths = Net(size), (32, 64, 128, 256, 512)
    for k in widths[:-1]:
        net.instance(k, affine="full").down().instance(k, affine="full")
    net.instance(512, affine="full")
    for level, k in enumerate(widths[1:]):
        net.to(*(2 * (s >> level + 1) - 1 for s in size)).instance(k, affine="full")
    return net


def panoptic_fpn(size: Size) -> Net:
    return heads_of(128, (4, 8, 16, 32), size)


# Style transfer and image translation


def fast_style(size: Size) -> Net:
    net = Net(size)
    net.instance(32, "relu", affine="full").down().instance(64, "relu", affine="full").down()
    net.instance(128, "relu", affine="full").instance(128, affine="full", residual=True)
    return net.up().instance(64, "relu", affine="full").up().instance(32, "relu", affine="full")


def msg_net(size: Size) -> Net:
    net = Net(size).instance(64, "relu").instance(32, "relu").down().instance(32, "relu")
    net.instance(128, "relu").instance(64, "relu").down().instance(64, "relu")
    net.instance(256, "relu").instance(64, "relu").instance(32, "relu").up().instance(32, "relu")
    net.instance(128, "relu").instance(16, "relu").up().instance(16, "relu")
    return net.instance(64, "relu")


def translator(c: int, levels: int, size: Size, *, affine: str = "none") -> Net:
    """Write a generator of residual blocks between strided and transposed convolutions."""
    net = Net(size).instance(c, "relu", affine=affine)
    for level in range(1, levels + 1):
        net.down().instance(c << level, "relu", affine=affine)
    return net.instance(c << levels, affine=affine, residual=True)


def patch_gan(size: Size) -> Net:
    net = Net(size).down(4).instance(128).down().instance(256)
    return net.to(*(s - 1 for s in net.size)).instance(512)


def munit(size: Size) -> Net:
    net = translator(64, 2, size)
    net.instance(256, "relu", affine="full", adaptive=True)
    return net.instance(256, affine="full", adaptive=True, residual=True)


def star_gan_v2(size: Size) -> Net:
    net = Net(size)
    for k, following in ((64, 128), (128, 256), (256, 512), (512, 512)):
        net.instance(k, affine="full").instance(k, affine="full", adaptive=True)
        net.down().instance(k, affine="full").instance(following, affine="full", adaptive=True)
    return net.instance(512, affine="full")


def style_gan(size: Size) -> Net:
    net = Net(size)
    for k in (16, 32, 64, 128, 256, 512, 512, 512, 512):
        net.instance(k, affine="full", adaptive=True).down()
    return net


def progressive_gan(size: Size) -> Net:
    net = Net(size)
    for k in (16, 32, 64, 128, 256, 512, 512):
        net.rms(k, affine="none").down()
    return net


def anime_gan(size: Size) -> Net:
    """Write norms of whole samples."""
    net = Net(size).group(32, groups=1).down().group(64, groups=1).down()
    net.group(128, groups=1).group(256, groups=1).group(512, groups=1)
    net.group(256, groups=1, residual=True).up().group(128, groups=1)
    return net.up().group(64, groups=1)


# Classifiers and transformers


def pyramid(
    widths: Sequence[int], size: Size, *, form: str = "layer", merged: bool = False, **fields: Any
) -> Net:
    """Write the norms of a hierarchy that begins at a quarter of the size; where patches are
    `merged`, four times the channels are normalised before their product."""
    net = Net(size).down(4)
    for level, k in enumerate(widths):
        getattr(net, form)(k, **fields)
        if level < len(widths) - 1:
            net.down()
            if merged:
                net.layer(4 * k)
    return net


def intern_image(c: int, size: Size) -> Net:
    """Depthwise convolutions that find offsets have a layer norm and GELU."""
    net = Net(size).down().layer(c // 2, "gelu").down()
    for level in range(4):
        net.layer(c << level).layer(c << level, "gelu")
        if level < 3:
            net.down()
    return net


def bit_resnet(wide: int, depths: Sequence[int], size: Size) -> Net:
    """Norms and activations come before the convolutions."""
    net, width = Net(size).down(4), 64 * wide
    for level, depth in enumerate(depths):
        k = 64 * wide << level
        for number in range(depth):
            net.group(width, "relu").group(k, "relu")
            if number == 0 and level:
                net.down()
            net.group(k, "relu")
            width = 4 * k
    return net.group(width, "relu")


def gn_resnet(size: Size) -> Net:
    net = Net(size).down().group(64, "relu").down()
    for level in range(4):
        k = 64 << level
        net.group(k, "relu")
        if level:
            net.down()
        net.group(k, "relu").group(4 * k).group(4 * k, "relu", residual=True)
    return net


def gn_efficientnet(size: Size) -> Net:
    """Group norms with 8 channels a group."""
    net, width = Net(size).down().group(32, "silu", 4), 32
    for k, expand, stride in (
        (16, 1, 1), (24, 6, 2), (40, 6, 2), (80, 6, 2), (112, 6, 1), (192, 6, 2), (320, 6, 1),
    ):  # fmt: skip
        inner = width * expand
        if expand > 1:
            net.group(inner, "silu", inner // 8)
        if stride > 1:
            net.down()
        net.group(inner, "silu", inner // 8).group(k, groups=k // 8)
        if k not in (16, 320):
            net.group(k, groups=k // 8, residual=True).group(6 * k, "silu", 6 * k // 8)
        width = k
    return net.group(1280, "silu", 160)


def dreamer(size: Size) -> Net:
    net = Net(size)
    for k in (128, 192, 256, 256):
        net.down().rms(k, "silu")
    return net


def tokens(
    c: int, size: Size, *, form: str = "layer", heads: int = 0, qk: str = "rms", patch: int = 1,
    **fields: Any,
) -> Net:  # fmt: skip
    """Write a transformer of patches: its norms, and those of queries and keys of its `heads`."""
    net = Net(size).down(patch)
    getattr(net, form)(c, **fields)
    if heads:
        getattr(net, qk)(c // heads, heads=heads)
    return net


def wan_transformer(c: int, size: Size) -> Net:
    """Write one RMS norm for the queries of all heads."""
    return Net(size).layer(c, affine="none").layer(c).rms(c)


def next_dit(size: Size) -> Net:
    return Net(size).down().rms(2304).layer(2304)


def segment_anything(size: Size) -> Net:
    net = Net(size).down(16).layer(1280).layer(256).layer(16, "gelu")
    return net.up().layer(64, "gelu").layer(4, "gelu")


# Low-level vision


def hi_net(size: Size) -> Net:
    """Half of the channels are normalised."""
    net = Net(size)
    for k in (32, 64, 128, 256, 512):
        net.instance(k, affine="full").down()
    return net


def image_pyramid(widths: Sequence[int], size: Size, **fields: Any) -> Net:
    """Write layer norms of a U-Net that begins at the full size."""
    net = Net(size)
    for k in widths:
        net.layer(k, **fields).down()
    return net


def raft(size: Size) -> Net:
    net = Net(size)
    for k in (64, 96, 128):
        net.down().instance(k, "relu")
        if k > 64:
            net.instance(k)
    return net


# Detectors


def heads_of(c: int, strides: Sequence[int], size: Size, *, act: str = "relu") -> Net:
    """Write a head that all levels of a pyramid share."""
    net = Net(size)
    for stride in strides:
        net.to(*size).down(stride).group(c, act)
    return net


def solo(size: Size) -> Net:
    """Grids of the categories and kernels, and the features of masks."""
    net = heads_of(128, (4, 8, 16, 32), size).to(*size).down(4).group(256, "relu")
    for side in (40, 36, 24, 16, 12):
        net.to(side, side).group(512, "relu")
    return net


def deformable_detr(size: Size) -> Net:
    net = heads_of(256, (8, 16, 32, 64), size, act="none")
    return net.to(sum(layer.p for layer in net.layers)).layer(256)


def mask_transformer(size: Size) -> Net:
    net = heads_of(256, (8, 16, 32), size, act="none")
    return net.to(*size).down(4).group(256).group(256, "relu")


def mask_rcnn(size: Size) -> Net:
    """ResNet-50, pyramid and heads; 512 regions have boxes, and 128 have masks."""
    net = gn_resnet(size)
    for stride in (4, 8, 16, 32):
        net.to(*size).down(stride).group(256)
    net.apart = 1
    return net.to(512, 7, 7).group(256, "relu").to(128, 14, 14).group(256, "relu")


def grid_rcnn(size: Size) -> Net:
    """Sizes are (regions, height, width)."""
    net = Net(size, 1).down().group(576, "relu", 36)
    return net.up().group(576, "relu", 9)


_BATCHES = ((1, 64), (2, 64), (4, 64), (8, 64))
_IMAGENET = ((8, 224), (32, 224), (64, 224), (128, 224))
_DETECTION = ((1, 800, 1344), (2, 800, 1344), (8, 800, 1344), (4, 640, 640))

#: The networks by name.
NETWORKS: Mapping[str, Network] = {
    # Diffusion
    "sd_v1_unet": Network("diffusion",
        "Rombach 2022, v1-inference.yaml of CompVis/stable-diffusion",
        partial(unet, (320, 640, 1280, 1280), 2, (0, 1, 2), tokens=True), _BATCHES),
    "sd_v2_unet": Network("diffusion", "v2-inference-v.yaml of Stability-AI/stablediffusion",
        partial(unet, (320, 640, 1280, 1280), 2, (0, 1, 2), tokens=True),
        ((1, 96), (2, 96), (4, 96), (8, 96))),
    "sdxl_unet": Network("diffusion",
        "Podell 2023, sd_xl_base.yaml of Stability-AI/generative-models",
        partial(unet, (320, 640, 1280), 2, (1, 2), tokens=True), ((1, 128), (2, 128), (4, 128))),
    "ldm_imagenet": Network("diffusion", "Rombach 2022, cin256-v2.yaml of CompVis/latent-diffusion",
        partial(unet, (192, 384, 576, 960), 2, (1, 2, 3), tokens=True), ((4, 64), (16, 64))),
    "ldm_bedrooms": Network("diffusion",
        "Rombach 2022, lsun_bedrooms-ldm-vq-4.yaml of CompVis/latent-diffusion",
        partial(unet, (224, 448, 672, 896), 2, (1, 2, 3)), ((4, 64), (8, 64), (32, 64))),
    "ldm_churches": Network("diffusion",
        "Rombach 2022, lsun_churches-ldm-kl-8.yaml of CompVis/latent-diffusion",
        partial(unet, (192, 384, 384, 768, 768), 2, (0, 1, 2, 3), adaptive=True, resampled=True),
        ((8, 32), (64, 32))),
    "ldm_text": Network("diffusion",
        "Rombach 2022, txt2img-1p4B-eval.yaml of CompVis/latent-diffusion",
        partial(unet, (320, 640, 1280, 1280), 2, (0, 1, 2), tokens=True), ((4, 32), (16, 32))),
    "adm_64": Network("diffusion", "Dhariwal 2021, openai/guided-diffusion",
        partial(unet, (192, 384, 576, 768), 3, (1, 2, 3), adaptive=True, resampled=True),
        ((4, 64), (16, 64), (32, 64))),
    "adm_128": Network("diffusion", "Dhariwal 2021, openai/guided-diffusion",
        partial(unet, (256, 256, 512, 768, 1024), 2, (2, 3, 4), adaptive=True, resampled=True),
        ((4, 128), (16, 128))),
    "adm_512": Network("diffusion", "Dhariwal 2021, openai/guided-diffusion",
        partial(unet, (128, 256, 256, 512, 512, 1024, 1024), 2, (4, 5, 6),
                adaptive=True, resampled=True), ((1, 512), (2, 512))),
    "glide_upsampler": Network("diffusion", "Nichol 2021, openai/glide-text2im",
        partial(unet, (192, 192, 384, 384, 768, 768), 2, (3, 4, 5), adaptive=True, resampled=True),
        ((1, 256), (4, 256))),
    "consistency_lsun": Network("diffusion", "Song 2023, openai/consistency_models",
        partial(unet, (256, 256, 512, 512, 1024, 1024), 2, (3, 4, 5), resampled=True),
        ((1, 256), (4, 256), (8, 256))),
    "ddpm_cifar": Network("diffusion", "Ho 2020, hojonathanho/diffusion",
        partial(unet, (128, 256, 256, 256), 2, (1,)), ((64, 32), (128, 32))),
    "ddpm_256": Network("diffusion", "Ho 2020, hojonathanho/diffusion",
        partial(unet, (128, 128, 256, 256, 512, 512), 2, (4,)), ((1, 256), (4, 256), (8, 256))),
    "improved_ddpm": Network("diffusion", "Nichol 2021, openai/improved-diffusion",
        partial(unet, (128, 256, 256, 256), 3, (1, 2), adaptive=True), ((32, 32), (128, 32))),
    "edm_cifar": Network("diffusion", "Karras 2022, NVlabs/edm",
        partial(unet, (256, 256, 256), 4, (1,), stem=128, resampled=True), ((64, 32), (128, 32))),
    "palette": Network("diffusion",
        "Saharia 2022, Janspiry/Palette-Image-to-Image-Diffusion-Models",
        partial(unet, (64, 128, 256, 512), 2, (), adaptive=True, resampled=True),
        ((1, 256), (4, 256), (16, 256))),
    "annotated_unet": Network("diffusion", "lucidrains/denoising-diffusion-pytorch with group norm",
        annotated_unet, ((16, 64), (32, 128), (64, 128))),
    "audio_ldm": Network("diffusion", "Liu 2023, haoheliu/AudioLDM",
        partial(unet, (128, 256, 384, 640), 2, (1, 2, 3), tokens=True),
        ((1, 256, 16), (2, 256, 16), (8, 256, 16))),
    "video_diffusion": Network("diffusion", "Blattmann 2023, SVD of Stability-AI/generative-models",
        partial(unet, (320, 640, 1280, 1280), 2, (0, 1, 2), tokens=True, apart=1),
        ((1, 14, 72, 128), (2, 14, 72, 128))),
    "text_to_video": Network("diffusion",
        "Wang 2023, ModelScope in UNet3DConditionModel of huggingface/diffusers",
        partial(unet, (320, 640, 1280, 1280), 2, (0, 1, 2), tokens=True, apart=1),
        ((1, 16, 32, 32), (2, 16, 32, 32))),
    "brain_diffusion": Network("diffusion",
        "Pinaya 2022, Brain Imaging Generation with Latent Diffusion Models",
        partial(unet, (256, 512, 768), 2, (1, 2)), ((1, 20, 28, 20), (4, 20, 28, 20))),
    "diffusion_policy": Network("diffusion", "Chi 2023, real-stanford/diffusion_policy",
        partial(diffusion_policy, (512, 1024, 2048)), ((64, 16, 1), (256, 16, 1))),
    "cascade_b": Network("diffusion", "Pernias 2023, stage B of Stability-AI/StableCascade",
        partial(cascade, (320, 640, 1280, 1280)), ((1, 128), (2, 128), (4, 128))),
    "cascade_c": Network("diffusion", "Pernias 2023, stage C of Stability-AI/StableCascade",
        partial(tokens, 2048, affine="none"), ((2, 24), (8, 24), (32, 24))),
    # Autoencoders
    "kl_decoder": Network("autoencoder", "Rombach 2022, KL-f8 of CompVis/latent-diffusion",
        partial(decoder, (512, 512, 256, 128), 3, (2, 2, 2)),
        ((1, 64), (2, 64), (4, 64), (1, 96), (1, 128))),
    "kl_encoder": Network("autoencoder", "Rombach 2022, KL-f8 of CompVis/latent-diffusion",
        partial(encoder, (128, 256, 512, 512), 2, (2, 2, 2)), ((1, 512), (4, 512), (8, 256))),
    "vq_decoder_4": Network("autoencoder", "Rombach 2022, VQ-f4 of CompVis/latent-diffusion",
        partial(decoder, (512, 256, 128), 3, (2, 2)), ((1, 64), (4, 64), (8, 64), (1, 128))),
    "vqgan_decoder_16": Network("autoencoder", "Esser 2021, CompVis/taming-transformers",
        partial(decoder, (512, 256, 256, 128, 128), 3, (2, 2, 2, 2)),
        ((1, 16), (4, 16), (8, 24), (1, 32))),
    "mo_vq_decoder": Network("autoencoder", "Zheng 2022, MoVQ in ai-forever/Kandinsky-2",
        partial(decoder, (512, 256, 256, 128), 3, (2, 2, 2), act="none", last="none"),
        ((1, 96), (2, 64), (1, 128))),
    "var_decoder": Network("autoencoder", "Tian 2024, FoundationVision/VAR",
        partial(decoder, (640, 320, 320, 160, 160), 3, (2, 2, 2, 2)), ((1, 16), (8, 16), (1, 32))),
    "dc_decoder": Network("autoencoder", "Chen 2024, DC-AE f32c32 in huggingface/diffusers",
        dc_decoder, ((1, 16), (4, 16), (1, 32), (2, 32))),
    "wan_decoder": Network("autoencoder", "Wan 2025, Wan-Video/Wan2.1, a latent frame at a time",
        partial(decoder, (384, 384, 192, 96), 3, ((2, 2, 2), (2, 2, 2), (1, 2, 2)),
                into=(192, 192, 96), form="rms"), ((1, 1, 60, 104), (1, 1, 32, 32))),
    "ltx_decoder": Network("autoencoder", "HaCohen 2024, Lightricks/LTX-Video", ltx_decoder,
        ((1, 4, 16, 24), (1, 16, 16, 24), (2, 8, 8, 8))),
    "mochi_decoder": Network("autoencoder", "AutoencoderKLMochi of huggingface/diffusers",
        partial(decoder, (768, 512, 256, 128), 3, ((3, 2, 2), (2, 2, 2), (1, 2, 2)),
                into=(512, 256, 128), middle=False, apart=1), ((1, 2, 32, 32), (1, 1, 60, 106))),
    "cosmos_decoder": Network("autoencoder",
        "NVIDIA 2024, CV8x8x8 in AutoencoderKLCosmos of huggingface/diffusers",
        partial(decoder, (512, 512, 256), 3, (1, (2, 2, 2)), causal=True, apart=1, groups=1),
        ((1, 2, 64, 64), (1, 3, 90, 160))),
    "hunyuan_decoder": Network("autoencoder",
        "Kong 2024, AutoencoderKLHunyuanVideo of huggingface/diffusers, a tile",
        partial(decoder, (512, 512, 256, 128), 3, ((1, 2, 2), (2, 2, 2), (2, 2, 2)), causal=True),
        ((1, 5, 32, 32), (2, 5, 32, 32))),
    "cogvideox_decoder": Network("autoencoder",
        "Yang 2024, AutoencoderKLCogVideoX of huggingface/diffusers",
        partial(decoder, (512, 256, 256, 128), 4, ((2, 2, 2), (2, 2, 2), (1, 2, 2)),
                act="none", last="none"), ((1, 2, 30, 45), (1, 2, 60, 90))),
    "cogvideox_encoder": Network("autoencoder",
        "Yang 2024, AutoencoderKLCogVideoX of huggingface/diffusers",
        partial(encoder, (128, 256, 256, 512), 3, ((2, 2, 2), (2, 2, 2), (1, 2, 2)), middle=False),
        ((1, 8, 240, 360), (1, 1, 480, 720))),
    "brain_decoder": Network("autoencoder",
        "Pinaya 2022, Brain Imaging Generation with Latent Diffusion Models",
        partial(decoder, (128, 128, 128, 64), 2, (2, 2, 2), middle=False, last="none"),
        ((1, 20, 28, 20), (2, 12, 16, 12))),
    # Segmentation
    "nn_unet": Network("segmentation", "Isensee 2021, MIC-DKFZ/nnUNet, 3d_fullres",
        partial(u_shaped, (32, 64, 128, 256, 320, 320), affine="full"),
        ((2, 128, 128, 128), (1, 128, 128, 128), (2, 96, 160, 160))),
    "nn_unet_2d": Network("segmentation", "Isensee 2021, MIC-DKFZ/nnUNet, 2d",
        partial(u_shaped, (32, 64, 128, 256, 512, 512, 512, 512), affine="full"),
        ((12, 512), (1, 512), (4, 512))),
    "nn_unet_residual": Network("segmentation",
        "Isensee 2024, residual encoder presets of MIC-DKFZ/nnUNet",
        partial(u_shaped, (32, 64, 128, 256, 320, 320), affine="full", residual=True),
        ((2, 128, 128, 128), (1, 160, 224, 192))),
    "dyn_unet": Network("segmentation",
        "Futrega 2021, Optimized U-Net for Brain Tumor Segmentation",
        partial(u_shaped, (64, 96, 128, 192, 256, 384, 512), affine="full"),
        ((1, 128, 128, 128), (2, 128, 128, 128))),
    "unet_3d_groups": Network("segmentation", "Wolny 2020, wolny/pytorch-3dunet",
        partial(unet_3d, (64, 128, 256, 512)),
        ((1, 80, 170, 170), (2, 64, 96, 96), (1, 32, 128, 128))),
    "seg_resnet": Network("segmentation", "Myronenko 2018, SegResNet of Project-MONAI/MONAI",
        partial(seg_resnet, 16), ((1, 224, 224, 144), (2, 128, 128, 128), (4, 96, 96, 96))),
    "une_tr": Network("segmentation", "Hatamizadeh 2022, UNETR of Project-MONAI/MONAI",
        partial(une_tr, (16, 32, 64, 128)), ((1, 96, 96, 96), (4, 96, 96, 96))),
    "swin_une_tr": Network("segmentation", "Hatamizadeh 2022, SwinUNETR of Project-MONAI/MONAI",
        partial(une_tr, (48, 48, 96, 192, 384), windows=True),
        ((1, 96, 96, 96), (2, 128, 128, 128))),
    "med_next": Network("segmentation", "Roy 2023, MIC-DKFZ/MedNeXt", med_next,
        ((1, 128, 128, 128), (2, 128, 128, 128), (2, 96, 96, 96))),
    "panoptic_fpn": Network("segmentation", "Kirillov 2019, Panoptic Feature Pyramid Networks",
        panoptic_fpn, ((2, 512, 1024), (8, 512, 512), (16, 256, 256))),
    "seg_former": Network("segmentation", "Xie 2021, NVlabs/SegFormer, B5",
        partial(pyramid, (64, 128, 320, 512)), ((1, 640), (2, 512), (8, 512), (1, 1024, 2048))),
    "segment_anything": Network("segmentation",
        "Kirillov 2023, facebookresearch/segment-anything, ViT-H", segment_anything,
        ((1, 1024), (4, 1024))),
    # Style transfer and image translation
    "fast_style": Network("translation", "Johnson 2016, pytorch/examples fast_neural_style",
        fast_style, ((4, 256), (1, 512), (1, 1080, 1920))),
    "msg_net": Network("translation", "Zhang 2017, zhanghang1989/PyTorch-Multi-Style-Transfer",
        msg_net, ((4, 256), (1, 512), (1, 1024))),
    "cycle_gan": Network("translation",
        "Zhu 2017, junyanz/pytorch-CycleGAN-and-pix2pix, resnet_9blocks",
        partial(translator, 64, 2), ((1, 256), (8, 256), (1, 512), (4, 512))),
    "patch_gan": Network("translation", "Isola 2017, junyanz/pytorch-CycleGAN-and-pix2pix, 70x70",
        patch_gan, ((1, 256), (8, 256), (32, 256), (4, 512))),
    "pix2pix_hd": Network("translation", "Wang 2018, global generator of NVIDIA/pix2pixHD",
        partial(translator, 64, 4), ((1, 512, 1024), (1, 1024, 2048))),
    "star_gan": Network("translation", "Choi 2018, yunjey/stargan",
        partial(translator, 64, 2, affine="full"), ((16, 128), (64, 128), (4, 256))),
    "star_gan_v2": Network("translation", "Choi 2020, clovaai/stargan-v2", star_gan_v2,
        ((1, 256), (8, 256), (32, 256))),
    "munit": Network("translation", "Huang 2018, NVlabs/MUNIT", munit, ((1, 256), (8, 256))),
    "style_gan": Network("translation", "Karras 2019, NVlabs/stylegan", style_gan,
        ((1, 1024), (4, 1024), (16, 1024))),
    "progressive_gan": Network("translation", "Karras 2018, tkarras/progressive_growing_of_gans",
        progressive_gan, ((3, 1024), (16, 1024))),
    "anime_gan": Network("translation", "bryandlee/animegan2-pytorch", anime_gan,
        ((1, 512), (8, 256), (1, 1024))),
    # Low-level vision
    "nafnet": Network("low-level", "Chen 2022, megvii-research/NAFNet, width 64",
        partial(image_pyramid, (64, 128, 256, 512, 1024)), ((8, 256), (1, 720, 1280), (4, 256))),
    "restormer": Network("low-level", "Zamir 2022, swz30/Restormer",
        partial(image_pyramid, (48, 96, 192, 384)), ((8, 128), (1, 256), (1, 720, 1280))),
    "retinexformer": Network("low-level", "Cai 2023, caiyuanhao1998/Retinexformer",
        partial(image_pyramid, (40, 80, 160)), ((8, 128), (1, 400, 600), (4, 256))),
    "hi_net": Network("low-level", "Chen 2021, megvii-model/HINet", hi_net,
        ((8, 256), (1, 720, 1280))),
    "swin_ir": Network("low-level", "Liang 2021, JingyunLiang/SwinIR",
        partial(image_pyramid, (180,)), ((8, 48), (8, 64), (1, 256), (1, 640, 360))),
    "raft": Network("low-level", "Teed 2020, princeton-vl/RAFT, two frames", raft,
        ((2, 440, 1024), (20, 368, 496), (12, 400, 720))),
    # Detection
    "fcos": Network("detection",
        "Tian 2019, fcos_r50-caffe_fpn_gn-head_1x of open-mmlab/mmdetection",
        partial(heads_of, 256, (8, 16, 32, 64, 128)), _DETECTION),
    "solo_v2": Network("detection", "Wang 2020, WXinlong/SOLO", solo,
        ((1, 800, 1344), (4, 640, 640))),
    "deformable_detr": Network("detection", "Zhu 2021, fundamentalvision/Deformable-DETR",
        deformable_detr, _DETECTION),
    "mask_transformer": Network("detection", "Cheng 2022, facebookresearch/Mask2Former",
        mask_transformer, ((1, 1024), (2, 1024), (1, 512, 1024))),
    "mask_rcnn": Network("detection",
        "Wu 2018, Mask R-CNN with group norm of facebookresearch/detectron2", mask_rcnn,
        ((1, 800, 1344), (2, 800, 1344), (2, 768, 1024))),
    "grid_rcnn": Network("detection", "Lu 2019, open-mmlab/mmdetection", grid_rcnn,
        ((1, 100, 14, 14), (2, 96, 14, 14))),
    # Classifiers
    "convnext_femto": Network("classifier", "convnext_femto of timm",
        partial(pyramid, (48, 96, 192, 384)), _IMAGENET),
    "convnext_nano": Network("classifier", "convnext_nano of timm",
        partial(pyramid, (80, 160, 320, 640)), _IMAGENET),
    "convnext_tiny": Network("classifier", "Liu 2022, facebookresearch/ConvNeXt",
        partial(pyramid, (96, 192, 384, 768)), (*_IMAGENET, (2, 800, 1344))),
    "convnext_base": Network("classifier", "Liu 2022, facebookresearch/ConvNeXt",
        partial(pyramid, (128, 256, 512, 1024)), (*_IMAGENET, (16, 384), (8, 512))),
    "convnext_large": Network("classifier", "Liu 2022, facebookresearch/ConvNeXt",
        partial(pyramid, (192, 384, 768, 1536)), ((8, 224), (32, 224), (16, 384))),
    "convnext_v2_huge": Network("classifier", "Woo 2023, facebookresearch/ConvNeXt-V2",
        partial(pyramid, (352, 704, 1408, 2816)), ((8, 224), (32, 224), (8, 384), (4, 512))),
    "convnext_atto_rms": Network("classifier", "convnext_atto_rms of timm",
        partial(pyramid, (40, 80, 160, 320), form="rms"), _IMAGENET),
    "caformer": Network("classifier", "Yu 2022, sail-sg/metaformer, S18",
        partial(pyramid, (64, 128, 320, 512), affine="weight"), _IMAGENET),
    "poolformer_s12": Network("classifier", "Yu 2022, sail-sg/poolformer",
        partial(pyramid, (64, 128, 320, 512), form="group", groups=1), _IMAGENET),
    "poolformer_m36": Network("classifier", "Yu 2022, sail-sg/poolformer",
        partial(pyramid, (96, 192, 384, 768), form="group", groups=1), _IMAGENET),
    "swin_tiny": Network("classifier", "Liu 2021, microsoft/Swin-Transformer",
        partial(pyramid, (96, 192, 384, 768), merged=True), (*_IMAGENET, (2, 800, 1344))),
    "swin_v2_base": Network("classifier", "Liu 2022, microsoft/Swin-Transformer",
        partial(pyramid, (128, 256, 512, 1024), residual=True), ((8, 256), (64, 256), (128, 256))),
    "edgenext": Network("classifier", "Maaz 2022, mmaaz60/EdgeNeXt, small",
        partial(pyramid, (48, 96, 160, 304)), ((1, 256), (32, 256), (128, 256))),
    "intern_image": Network("classifier", "Wang 2023, OpenGVLab/InternImage, B",
        partial(intern_image, 112), ((8, 224), (32, 224), (2, 800, 1344))),
    "hiera_large": Network("classifier", "Ryali 2023, facebookresearch/hiera",
        partial(pyramid, (144, 288, 576, 1152)), ((8, 224), (32, 224), (64, 224))),
    "bit_r50x1": Network("classifier", "Kolesnikov 2020, google-research/big_transfer",
        partial(bit_resnet, 1, (3, 4, 6, 3)), (*_IMAGENET, (8, 448), (32, 480))),
    "bit_r101x3": Network("classifier", "Kolesnikov 2020, google-research/big_transfer",
        partial(bit_resnet, 3, (3, 4, 23, 3)), ((4, 384), (8, 480), (32, 224))),
    "gn_resnet": Network("classifier", "Wu 2018, resnet50_gn of timm", gn_resnet,
        (*_IMAGENET, (16, 512))),
    "gn_efficientnet": Network("classifier", "efficientnet_b0_g8_gn of timm", gn_efficientnet,
        _IMAGENET),
    "dreamer": Network("classifier", "Hafner 2023, danijar/dreamerv3, encoder", dreamer,
        ((64, 64), (1024, 64))),
    # Transformers
    "vit_base": Network("transformer", "Dosovitskiy 2021, google-research/vision_transformer",
        partial(tokens, 768, patch=16), (*_IMAGENET, (256, 224))),
    "dit_xl": Network("transformer", "Peebles 2023, facebookresearch/DiT",
        partial(tokens, 1152, affine="none", patch=2), ((8, 32), (32, 32), (256, 32), (4, 64))),
    "lightning_dit": Network("transformer", "Yao 2025, hustvl/LightningDiT",
        partial(tokens, 1152, form="rms"), ((32, 16), (128, 16))),
    "sd3": Network("transformer", "Esser 2024, SD3.5 large of Stability-AI/sd3.5",
        partial(tokens, 2432, affine="none", heads=38, patch=2), ((1, 128), (2, 128), (8, 64))),
    "flux": Network("transformer", "black-forest-labs/flux",
        partial(tokens, 3072, affine="none", heads=24, patch=2), ((1, 128), (4, 128), (1, 64))),
    "wan_1b": Network("transformer", "Wan 2025, Wan-Video/Wan2.1, 1.3B",
        partial(wan_transformer, 1536), ((1, 21, 30, 52), (2, 21, 30, 52))),
    "cogvideox": Network("transformer", "Yang 2024, THUDM/CogVideo, 2B",
        partial(tokens, 1920, heads=30, qk="layer"), ((1, 13, 30, 45), (2, 13, 30, 45))),
    "intern_vit": Network("transformer", "Chen 2023, InternViT-6B of OpenGVLab/InternVL",
        partial(tokens, 3200, form="rms", patch=14), ((1, 448), (7, 448), (16, 448))),
    "next_dit": Network("transformer", "Zhuo 2024, Alpha-VLLM/Lumina-T2X, 2B", next_dit,
        ((1, 128), (8, 128))),
    "aim_v2": Network("transformer", "Fini 2024, aimv2_large_patch14 of timm",
        partial(tokens, 1024, form="rms", patch=14), ((8, 224), (64, 224), (8, 448))),
}  # fmt: skip

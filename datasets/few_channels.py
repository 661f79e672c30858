"""Makes the suites of dense volumes of few channels, and of some dozens: from the networks of
`rank_suites.py`, and from further ones, medical and stereo, written down here.

    python datasets/few_channels.py    suites/few_channels/*.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np
import rank_suites
from rank_dense import HELD_OUT as HELD_OUT_DENSE
from rank_dense import block
from rank_layers import Net, Network
from rank_suites import NETWORKS, Use, entries_of, shape, uses_of
from rank_volumes import Size, nn_unet, seg_resnet, unet_3d

from confpred.data.suites import Suite, write_suite
from confpred.families.dense import dense_volume as kernels
from confpred.problem.conv import ConvNd

SUITES = Path(__file__).parent / "suites" / "few_channels"
HELD_OUT = ("voxel_morph", "psm_net", "cas_mvs_net", "res_enc_unet", "brain_age")
#: Layers that are drawn; cuDNN's plans win those that have more channels both in and out.
COUNTS = {"training": 160, "holdout": 48}
#: Share of the problems that keep bias and activation, or the bias' gradient.
FUSED_SHARE = 0.4


def registration(down: Sequence[int], up: Sequence[int], size: Size) -> Net:
    """Write strided layers, and layers behind an interpolation, which read a skip; VoxelMorph."""
    net, skips = Net(2, size), [(2, size)]
    for k in down:
        net.conv(k, 3, 2)
        skips.append((k, net.size))
    for k, (c, at) in zip(up, skips[-2::-1], strict=False):
        net.conv(k).to(k + c, at)
    for k in up[len(down) :]:
        net.conv(k)
    return net.conv(3)


def hourglass(net: Net, c: int) -> Net:
    """Append a stack over a cost volume: two levels down, and transposed layers back."""
    net.conv(2 * c, 3, 2, "relu", norm=True).conv(2 * c, norm=True)
    net.conv(2 * c, 3, 2, "relu", norm=True).conv(2 * c, act="relu", norm=True)
    net.up(2 * c, 3, 2, padding=1, more=1, bias=False)
    return net.up(c, 3, 2, padding=1, more=1, bias=False)


def stereo(c: int, width: int, stacks: int, size: Size) -> Net:
    """Write the layers over a cost volume of `c` channels: PSMNet and GwcNet."""
    net = Net(c, size).conv(width, act="relu", norm=True).conv(width, act="relu", norm=True)
    net.conv(width, act="relu", norm=True).conv(width, norm=True, residual=True)
    for _ in range(stacks):
        hourglass(net, width)
        net.fork().conv(width, act="relu", norm=True).conv(1, bias=False)
    return net


def gc_net(c: int, size: Size) -> Net:
    """Write four levels of three layers over a cost volume of ``2 * c`` channels."""
    net, sizes = Net(2 * c, size), [size]
    net.conv(c, act="relu", norm=True).conv(c, act="relu", norm=True)
    for level in range(4):
        k = 2 * c if level < 3 else 4 * c
        net.conv(k, 3, 2, "relu", norm=True)
        sizes.append(net.size)
        net.conv(k, act="relu", norm=True).conv(k, act="relu", norm=True)
    for level in (3, 2, 1, 0):
        net.up(2 * c if level else c, 3, 2, padding=1, more=1, bias=False).to(size=sizes[level])
    return net.up(1, 3, 2, padding=1, more=1)


def mvs_net(c: int, width: int, size: Size) -> Net:
    """Write the U-Net over a cost volume of several views."""
    net, skips = Net(c, size).conv(width, act="relu", norm=True), []
    for level in (1, 2, 3):
        skips.append(net.size)
        net.conv(width << level, 3, 2, "relu", norm=True)
        net.conv(width << level, act="relu", norm=True)
    for level in (2, 1, 0):
        net.up(width << level, 3, 2, padding=1, more=1, bias=False).to(size=skips[level])
    return net.conv(1, bias=False)


def voxel_net(size: Size) -> Net:
    """Write the middle layers over a grid of voxels."""
    net = Net(128, size).conv(64, 3, (2, 1, 1), "relu", norm=True, padding=1)
    net.conv(64, 3, 1, "relu", norm=True, padding=(0, 1, 1))
    return net.conv(64, 3, (2, 1, 1), "relu", norm=True, padding=1)


def res_enc_unet(widths: Sequence[int], blocks: Sequence[int], size: Size) -> Net:
    """Write a residual encoder with many blocks, and a decoder of one layer a level."""
    net, skips = Net(1, size).conv(widths[0], act="relu"), []
    for level, (k, count) in enumerate(zip(widths, blocks, strict=True)):
        if level:
            net.conv(k, 3, 2)
        for _ in range(count):
            block(net, k)
        skips.append((k, net.size))
    for k, at in skips[-2::-1]:
        net.up(k, 2, 2, bias=False).to(2 * k, at).conv(k)
    return net.conv(3, 1)


def brain_age(widths: Sequence[int], size: Size) -> Net:
    net = Net(1, size)
    for k in widths:
        net.conv(k, act="relu", norm=True).pool(2)
    return net


def autoencoder(widths: Sequence[int], size: Size) -> Net:
    """Write residual blocks with strided layers between, and back by interpolation."""
    net = Net(1, size).conv(widths[0])
    for k in widths:
        block(net, k).conv(k, 3, 2)
    net.conv(3).conv(widths[-1])
    for k in reversed(widths):
        block(net, k).grow(2).conv(k)
    return net.conv(1)


FURTHER: Mapping[str, Network] = {
    "attention_unet": Network(
        "volumes", "arXiv:1804.03999", partial(nn_unet, (16, 32, 64, 128, 256)),
        ((2, 96, 160, 160), (4, 96, 96, 96)),
    ),
    "seg_resnet_8": Network(
        "volumes", "github.com/Project-MONAI/MONAI, segresnet.py", partial(seg_resnet, 8),
        ((1, 224, 224, 144), (2, 96, 96, 96)),
    ),
    "seg_resnet_16": Network(
        "volumes", "github.com/Project-MONAI/model-zoo, brats_mri_segmentation",
        partial(seg_resnet, 16), ((1, 224, 224, 144),),
    ),
    "nn_unet_24": Network(
        "volumes", "10.1038/s41592-020-01008-z, narrower", partial(nn_unet, (24, 48, 96, 192)),
        ((2, 112, 112, 80), (2, 64, 128, 128)),
    ),
    "cremi_unet": Network(
        "volumes", "github.com/wolny/pytorch-3dunet", unet_3d, ((1, 80, 160, 160),)
    ),
    "brain_latents": Network(
        "volumes", "arXiv:2209.07162", partial(autoencoder, (64, 128, 128)),
        ((1, 80, 112, 80), (1, 160, 224, 160)),
    ),
    "narrow_latents": Network(
        "volumes", "github.com/Project-MONAI/tutorials, 3d_autoencoderkl",
        partial(autoencoder, (32, 64, 64)), ((2, 96, 96, 64), (1, 112, 128, 80)),
    ),
    "gc_net": Network("stereo", "arXiv:1703.04309", partial(gc_net, 32), ((1, 96, 128, 256),)),
    "gwc_net": Network(
        "stereo", "arXiv:1903.04025", partial(stereo, 40, 32, 3),
        ((4, 48, 64, 128), (1, 48, 96, 312)),
    ),
    "mvs_net": Network("stereo", "arXiv:1804.02505", partial(mvs_net, 32, 8),
        ((1, 192, 128, 160), (2, 96, 128, 160)),
    ),
    "voxel_net": Network("detection", "arXiv:1711.06396", voxel_net, ((2, 10, 400, 352),)),
    "voxel_morph": Network(
        "volumes", "arXiv:1809.05231",
        partial(registration, (16, 32, 32, 32), (32, 32, 32, 32, 32, 16, 16)),
        ((1, 160, 192, 224), (2, 96, 96, 96)),
    ),
    "psm_net": Network(
        "stereo", "arXiv:1803.08669", partial(stereo, 64, 32, 3),
        ((3, 48, 64, 128), (1, 48, 96, 312)),
    ),
    "cas_mvs_net": Network(
        "stereo", "arXiv:1912.06378", partial(mvs_net, 16, 8), ((2, 32, 256, 320),)
    ),
    "res_enc_unet": Network(
        "volumes", "arXiv:2404.09556",
        partial(res_enc_unet, (32, 64, 128, 256, 320), (1, 3, 4, 6, 6)),
        ((2, 112, 160, 128), (2, 96, 96, 96)),
    ),
    "brain_age": Network(
        "volumes", "10.1016/j.media.2020.101871", partial(brain_age, (32, 64, 128, 256)),
        ((4, 160, 192, 160),),
    ),
}  # fmt: skip


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", default=SUITES, type=click.Path(path_type=Path), help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write suites/few_channels/*.json."""
    for suite in suites(seed):
        write_suite(suite, out / f"{suite.name.removeprefix('few-channels-')}.json")
        names = {name for entry in suite.entries for name in entry.networks}
        click.echo(f"{suite.name}: {len(suite.entries)} problems of {len(names)} networks")


def suites(seed: int) -> Iterator[Suite]:
    """Yield a training suite and a hold-out, which have no layer in common, and one of each of what
    was drawn with them that cuDNN's plans compute."""
    held_out = {*rank_suites.HELD_OUT, *HELD_OUT_DENSE, *HELD_OUT}
    uses = {
        name: [use for use in uses_of(network) if is_wanted(use.layer.problem)]
        for name, network in {**NETWORKS, **FURTHER}.items()
    }
    held = {shape(use.layer.problem) for name in held_out & uses.keys() for use in uses[name]}
    for part, count in COUNTS.items():
        apart = part == "training"
        chosen = {
            name: [u for u in found if not (apart and shape(u.layer.problem) in held)]
            for name, found in uses.items()
            if (name in held_out) != apart
        }
        generator = np.random.default_rng([seed, 3, apart])
        entries = [*entries_of(chosen, {3: (count, 0)}, held, generator, problem_of)]
        for name, few in (("", True), ("plans_", False)):
            own = tuple(e for e in entries if kernels.has_few_channels(e.problem) == few)
            yield Suite(f"few-channels-{name}{part}", own)


def problem_of(use: Use, generator: np.random.Generator) -> ConvNd | None:
    """Return a problem of a layer, channels last and of 16 bits, if a kernel computes it."""
    problem = rank_suites.problem_of(use, generator)
    is_fused, is_half = generator.random(2) < (FUSED_SHARE, 0.5)
    if problem is None:
        return None
    plain = {"bias": False, "activation": "none", "residual": False}
    dtype = "float16" if is_half else "bfloat16"
    problem = replace(problem, layout="channels_last", dtype=dtype, **({} if is_fused else plain))
    return problem if kernels.handles(problem) else None


def is_wanted(p: ConvNd) -> bool:
    """Whether the layer is a dense volume's, and no two-dimensional one."""
    flat = replace(p, layout="channels_last").as_conv2d()
    return p.rank == 3 and p.groups == 1 and p.taps > 1 and flat is None


if __name__ == "__main__":
    main()

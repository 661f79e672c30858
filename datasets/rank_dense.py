"""Makes the suites of dense layers of any rank, transposed ones among them, which cuDNN's plans
compute: from the networks of `rank_suites.py` and from further ones, written down here.

    python datasets/rank_dense.py    suites/rank_dense/*.json

Layers of groups of several channels are among them; depthwise ones are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np
import rank_suites
from rank_layers import Net, Network
from rank_suites import NETWORKS, Use, entries_of, is_affordable, shape, uses_of
from rank_volumes import Size

from confpred.data.suites import Suite, write_suite
from confpred.problem.conv import LAYOUTS, ConvNd

SUITES = Path(__file__).parent / "suites" / "rank_dense"
#: Further networks that are held out, beside those of `rank_suites`.
HELD_OUT = (
    "hunyuan_encoder", "swin_unetr", "mel_gan_critic", "video_gan", "wave_gan", "fast_speech2",
)  # fmt: skip

#: Problems of a suite by rank.
COUNTS = {"training": {1: 200, 3: 300}, "holdout": {1: 30, 3: 40}}
FIRST_SHARE = 0.5
#: Share of problems that are in float32, beside those that a network's draw has.
WIDE_SHARE = 0.1
#: Share of the gradients that keep bias and activation, or the bias' gradient: cuDNN has no plan of
#: these that is compiled ahead, and kernels of their own may follow a plan.
FUSED_SHARE = 0.15


# Video encoders, and generators of volumes and video


def causal_encoder(widths: Sequence[int], units: int, latent: int, halved: int, size: Size) -> Net:
    """Write residual units of causal layers between strided ones, `halved` of which halve the
    frames, too."""
    net = Net(3, size).conv(widths[0], 3, causal="pad")

    def unit(k: int) -> None:
        if net.c != k:
            net.fork().conv(k, 1)
        net.conv(k, 3, causal="pad").conv(k, 3, causal="pad", residual=True)

    for level, k in enumerate(widths):
        for _ in range(units):
            unit(k)
        if level < len(widths) - 1:
            net.conv(k, (1, 3, 3), (1, 2, 2))
            if len(widths) - 2 - level < halved:
                net.conv(k, (3, 1, 1), (2, 1, 1), causal="pad")
    for _ in range(2):
        unit(net.c)
    return net.conv(2 * latent, 3, causal="pad")


def generator(widths: Sequence[int], first: Size, colors: int, latent: int, size: Size) -> Net:
    """Write a generator from a latent vector, and the critic of what it makes; 4/2/1 layers."""
    net = Net(latent, size).up(widths[0], first, 1, bias=False)
    for k in widths[1:]:
        net.up(k, 4, 2, padding=1, bias=False)
    net.up(colors, 4, 2, padding=1)
    for k in reversed(widths):
        net.conv(k, 4, 2, padding=1, bias=False)
    return net.conv(1, first, padding=0)


def tats(c: int, steps: Sequence[tuple[int, int, int]], size: Size) -> Net:
    """Write a quantised autoencoder of video: 4/2/1 layers, and transposed ones back."""
    net = Net(3, size).conv(c, 3)
    windows = [tuple(s + 2 for s in step) for step in steps]
    for window, step in zip(windows, steps, strict=True):
        net.conv(2 * net.c, window, step, padding=1).conv(net.c, act="silu")
        net.conv(net.c, residual=True)
    for window, step in zip(reversed(windows), reversed(steps), strict=True):
        net.conv(net.c, act="silu").conv(net.c, residual=True)
        net.up(net.c // 2, window, step, padding=1)
    return net.conv(3, 3)


# Medical volumes


def block(net: Net, k: int) -> Net:
    """Append a residual block of two layers without a bias."""
    if net.c != k:
        net.fork().conv(k, 1, bias=False)
    return net.conv(k, bias=False).conv(k, bias=False, residual=True)


def unetr(feature: int, hidden: int, size: Size) -> Net:
    """Write the decoder; a transformer has patches of 16, whose states go up once to thrice."""
    net = Net(1, size)
    block(net.fork(), feature)
    tokens = tuple(s // 16 for s in size)
    for level in (1, 2, 3):
        skip = net.fork().to(hidden, tokens).up(feature << level, 2, 2, bias=False)
        for _ in range(3 - level):
            skip.up(skip.c, 2, 2, bias=False)
            block(skip, skip.c)
    net.to(hidden, tokens)
    for level in (3, 2, 1, 0):
        k = feature << level
        block(net.up(k, 2, 2, bias=False).to(2 * k), k)
    return net.conv(14, 1)


def swin_unetr(feature: int, size: Size) -> Net:
    """Write the residual blocks after each stage of a transformer, and the decoder."""
    net = Net(1, size)
    block(net.fork(), feature)
    sizes = [tuple(s >> level for s in size) for level in range(6)]
    for level in (1, 2, 3, 5):
        at = net.fork().to(feature << level - 1, sizes[level])
        block(at, at.c)
    net.to(feature * 16, sizes[5])
    for level in (4, 3, 2, 1, 0):
        k = feature << max(level - 1, 0)
        block(net.up(k, 2, 2, bias=False).to(2 * k, sizes[level]), k)
    return net.conv(14, 1)


# Sound and speech


def critic(layers: Sequence[tuple[int, int, int, int]], length: int) -> Net:
    """Write a critic of sound; `layers` are channels, taps, strides and groups."""
    net = Net(1, (length,))
    for k, taps, stride, groups in layers:
        net.conv(k, taps, stride, groups=groups)
    return net


def wave_u_net(c: int, levels: int, length: int) -> Net:
    net, skips = Net(1, (length,)), []
    for level in range(1, levels + 1):
        net.conv(c * level, 15)
        skips.append((net.c, net.size))
        net.to(size=(net.size[0] + 1) // 2)
    net.conv(c * (levels + 1), 15)
    for k, at in reversed(skips):
        net.to(net.c + k, at).conv(k, 5)
    return net.to(net.c + 1).conv(1, 1)


def wave_gan(c: int, length: int) -> Net:
    """Write generator and critic, of 25 taps at a stride of 4; `length` is of the first layer."""
    net = Net(16 * c, (length,))
    for k in (8 * c, 4 * c, 2 * c, c, 1):
        net.up(k, 25, 4, padding=11, more=1)
    for k in (c, 2 * c, 4 * c, 8 * c, 16 * c):
        net.conv(k, 25, 4, padding=11)
    return net


def residual_codec(c: int, width: int, halvings: int, depth: int, length: int) -> Net:
    """Write an autoencoder: 4/2/1 layers, and dilated residual units of 3 taps and 1."""
    net = Net(1, (length,))

    def units(dilations: Sequence[int]) -> None:
        for dilation in dilations:
            net.conv(width, 3, dilation=dilation, act="relu").conv(c, 1, residual=True)

    dilations = [3**i for i in range(depth)]
    for _ in range(halvings):
        net.conv(c, 4, 2, padding=1)
        units(dilations)
    net.conv(64, 3).conv(c, 3)
    for _ in range(halvings):
        units(dilations[::-1])
        net.up(c, 4, 2, padding=1)
    return net.conv(1, 3)


def tacotron2(length: int) -> Net:
    """Write the encoder of characters, and the layers after the decoder; five taps."""
    net = Net(512, (length,))
    for _ in range(3):
        net.conv(512, 5, act="relu", norm=True)
    net.to(80, 6 * length)
    for _ in range(4):
        net.conv(512, 5, norm=True)
    return net.conv(80, 5, norm=True)


def fast_speech2(c: int, inner: int, length: int) -> Net:
    """Write the layers of blocks, of the predictors of variance, and the decoder's at 8 times the
    length."""
    net = Net(c, (length,)).conv(inner, 9, act="relu").conv(c, 1)
    net.fork().conv(c, 3, act="relu").conv(c, 3, act="relu")
    return net.to(size=8 * length).conv(inner, 9, act="relu").conv(c, 1)


def diffusion_policy(widths: Sequence[int], length: int) -> Net:
    """Write a U-Net over a few actions: five taps, strided and 4/2/1 layers between."""
    net, skips = Net(10, (length,)), []

    def units(k: int) -> None:
        for _ in range(2):
            if net.c != k:
                net.fork().conv(k, 1)
            net.conv(k, 5).conv(k, 5)

    for k in widths:
        units(k)
        skips.append(k)
        if k != widths[-1]:
            net.conv(k, 3, 2)
    for k in reversed(skips[1:]):
        net.to(2 * k)
        units(k // 2)
        net.up(k // 2, 4, 2, padding=1)
    return net.conv(10, 1)


_SOUND = ((16, 8192), (1, 65_536), (4, 44_100))

FURTHER: Mapping[str, Network] = {
    "wan_encoder": Network(
        "video-encoder", "arXiv:2503.20314",
        partial(causal_encoder, (96, 192, 384, 384), 2, 16, 2),
        ((1, 9, 240, 416), (1, 5, 480, 832)),
    ),
    "hunyuan_encoder": Network(
        "video-encoder", "arXiv:2412.03603",
        partial(causal_encoder, (128, 256, 512, 512), 2, 16, 2), ((1, 9, 256, 256),),
    ),
    "cog_video_x_encoder": Network(
        "video-encoder", "arXiv:2408.06072",
        partial(causal_encoder, (128, 256, 256, 512), 3, 16, 2), ((1, 8, 240, 360),),
    ),
    "tats": Network(
        "video-encoder", "arXiv:2204.03638",
        partial(tats, 32, ((1, 2, 2), (2, 2, 2), (2, 2, 2))), ((4, 16, 128, 128),),
    ),
    "gan_3d": Network(
        "volumes", "arXiv:1610.07584",
        partial(generator, (512, 256, 128, 64), (4, 4, 4), 1, 200), ((64, 1, 1, 1), (4, 1, 1, 1)),
    ),
    "video_gan": Network(
        "video", "arXiv:1609.02612",
        partial(generator, (512, 256, 128, 64), (2, 4, 4), 3, 100), ((64, 1, 1, 1), (8, 1, 1, 1)),
    ),
    "unetr": Network(
        "volumes", "arXiv:2103.10504", partial(unetr, 16, 768),
        ((2, 96, 96, 96), (1, 128, 128, 128)),
    ),
    "swin_unetr": Network(
        "volumes", "arXiv:2201.01266", partial(swin_unetr, 48), ((2, 96, 96, 96),)
    ),
    "hifi_gan_critic": Network(
        "vocoder", "arXiv:2010.05646",
        partial(critic, (
            (128, 15, 1, 1), (128, 41, 2, 4), (256, 41, 2, 16), (512, 41, 4, 16),
            (1024, 41, 4, 16), (1024, 41, 1, 16), (1024, 5, 1, 1), (1, 3, 1, 1),
        )),
        _SOUND,
    ),
    "mel_gan_critic": Network(
        "vocoder", "arXiv:1910.06711",
        partial(critic, (
            (16, 15, 1, 1), (64, 41, 4, 4), (256, 41, 4, 16), (1024, 41, 4, 64),
            (1024, 41, 4, 256), (1024, 5, 1, 1), (1, 3, 1, 1),
        )),
        _SOUND,
    ),
    "wave_u_net": Network(
        "separation", "arXiv:1806.03185", partial(wave_u_net, 24, 12), ((16, 16_384), (1, 147_456))
    ),
    "wave_gan": Network(
        "vocoder", "arXiv:1802.04208", partial(wave_gan, 64), ((64, 16), (1, 16))
    ),
    "jukebox": Network(
        "codec", "arXiv:2005.00341", partial(residual_codec, 64, 32, 3, 4),
        ((4, 131_072), (1, 262_144)),
    ),
    "tacotron2": Network("speech", "arXiv:1712.05884", tacotron2, ((64, 150), (1, 120))),
    "fast_speech2": Network(
        "speech", "arXiv:2006.04558", partial(fast_speech2, 256, 1024), ((48, 100), (1, 120))
    ),
    "diffusion_policy": Network(
        "time-series", "arXiv:2303.04137",
        partial(diffusion_policy, (256, 512, 1024)), ((256, 16), (56, 16)),
    ),
}  # fmt: skip

ALL: Mapping[str, Network] = {**NETWORKS, **FURTHER}


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", default=SUITES, type=click.Path(path_type=Path), help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write suites/rank_dense/*.json."""
    for suite in suites(seed):
        write_suite(suite, out / f"{suite.name.removeprefix('rank-dense-')}.json")
        names = {name for entry in suite.entries for name in entry.networks}
        click.echo(f"{suite.name}: {len(suite.entries)} problems of {len(names)} networks")


def suites(seed: int) -> Iterator[Suite]:
    """Yield a training suite and a hold-out, of layers that no training suite of any rank has."""
    held_out = {*rank_suites.HELD_OUT, *HELD_OUT}
    uses = {
        name: [use for use in uses_of(network) if _is_wanted(use.layer.problem)]
        for name, network in ALL.items()
    }
    held = {shape(use.layer.problem) for name in held_out for use in uses[name]}
    # The suites of `rank_suites` know nothing of the further networks that are held out.
    trained = {
        shape(u.layer.problem) for name in NETWORKS if name not in held_out for u in uses[name]
    }
    for part, counts in COUNTS.items():
        apart = part == "training"
        chosen = {}
        for name, found in uses.items():
            if (name in held_out) != apart:
                barred = held if apart else trained if name in FURTHER else set()
                chosen[name] = [u for u in found if shape(u.layer.problem) not in barred]
        generator = np.random.default_rng([seed, 2, apart])
        of_ranks = {rank: (count, 0) for rank, count in counts.items()}
        entries = entries_of(chosen, of_ranks, held, generator, problem_of)
        yield Suite(f"rank-dense-{part}", tuple(entries))


def problem_of(use: Use, generator: np.random.Generator) -> ConvNd | None:
    """Return a problem of a layer, in either layout."""
    problem = rank_suites.problem_of(use, generator)
    is_first, is_wide, is_fused = generator.random(3) < (FIRST_SHARE, WIDE_SHARE, FUSED_SHARE)
    if problem is None:
        return None
    fields = {"layout": LAYOUTS[int(is_first)]}
    fields |= {"dtype": "float32"} if is_wide else {}
    if problem.direction != "fprop" and not is_fused:
        fields |= {"bias": False, "activation": "none", "residual": False}
    problem = replace(problem, **fields)
    return problem if is_affordable(problem) else None


def _is_wanted(p: ConvNd) -> bool:
    return not p.cut and (p.groups == 1 or p.group_width > 1)


if __name__ == "__main__":
    main()

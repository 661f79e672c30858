"""Networks of one spatial dimension, written down from their publications layer by layer.

They follow the published architectures in channels, filters and sizes, but not in every detail.
Products of matrices, attention and gates are left out. A length is that of the tensor that the
first layer here reads: frames of a spectrogram, samples of sound, tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rank_layers import Net, Network

# Speech encoders


def conformer(d: int, taps: int, length: int) -> Net:
    """Write a convolution module; its batch norm is folded."""
    return Net(d, (length,)).conv(2 * d, 1).to(d).dw(taps, act="silu", norm=True).conv(d, 1)


def squeezeformer(d: int, length: int) -> Net:
    """Write a module at the full and one at half the rate, with the strided layer between them."""
    net = Net(d, (length,))
    for stride in (1, 2):
        if stride > 1:
            net.dw(5, 2).conv(d, 1)
        net.conv(d, 1).dw(31, act="silu", norm=True).conv(d, 1)
    return net


def zipformer(widths: Sequence[int], length: int) -> Net:
    """Six stacks at rates of 50 Hz over 1, 2, 4, 8, 4 and 2; `length` is that of the first."""
    net = Net(widths[0], (length,))
    stacks = zip(widths, (1, 2, 4, 8, 4, 2), (31, 31, 15, 15, 15, 31), strict=True)
    for d, rate, taps in stacks:
        net.to(d, -(-length // rate)).dw(taps)
    return net.to(size=length)


def branchformer(d: int, hidden: int, length: int) -> Net:
    """Write the gate over space of a branch, and the layer that merges both; tensors are
    transposed."""
    net = Net(hidden // 2, (length,), "channels_last").dw(31)
    return net.to(2 * d).dw(31)


def causal_conformer(d: int, taps: int, length: int) -> Net:
    """Write a convolution module whose input is padded in front; a layer norm follows."""
    net = Net(d, (length,)).conv(2 * d, 1, bias=False).to(d)
    return net.dw(taps, bias=False, causal="pad").conv(d, 1, bias=False)


def separable(
    net: Net, k: int, taps: int, repeats: int, stride: int = 1, act: str = "relu", last: bool = True
) -> Net:
    """Append a block of separable layers, the stride in its first one or its last, and its
    shortcut."""
    shortcut = net.fork().conv(k, 1, stride, norm=True)
    for number in range(repeats):
        here = number == (repeats - 1 if last else 0)
        net.dw(taps, stride if here else 1, bias=False).conv(k, 1, act=act, norm=True)
    return net.to(size=shortcut.size[0])


def quartznet(repeats: int, length: int) -> Net:
    net = Net(64, (length,)).dw(33, 2, bias=False).conv(256, 1, act="relu", norm=True)
    for k, taps in ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75)):
        for _ in range(repeats):
            separable(net, k, taps, 5)
    net.dw(87, dilation=2, bias=False).conv(512, 1, act="relu", norm=True)
    return net.conv(1024, 1, act="relu", norm=True).conv(29, 1)


def citrinet(c: int, length: int) -> Net:
    net = Net(80, (length,)).dw(5, bias=False).conv(c, 1, act="relu", norm=True)
    for first, last in ((11, 21), (13, 25), (25, 39)):
        for taps in range(first, last + 1, 2):
            separable(net, c, taps, 5, 2 if taps == first else 1)
    return net.dw(41, bias=False).conv(640, 1, act="relu", norm=True).conv(1024, 1)


def contextnet(alpha: float, length: int) -> Net:
    net = separable(Net(80, (length,)), int(256 * alpha), 5, 1, act="silu")
    for block in range(1, 22):
        k = int((256 if block < 11 else 512) * alpha)
        separable(net, k, 5, 5, 2 if block in (3, 7, 14) else 1, act="silu")
    return separable(net, int(640 * alpha), 5, 1, act="silu")


def titanet(c: int, length: int) -> Net:
    net = separable(Net(80, (length,)), c, 3, 1)
    for taps in (7, 11, 15):
        separable(net, c, taps, 3)
    return separable(net, 3072, 1, 1)


def matchboxnet(c: int, repeats: int, length: int) -> Net:
    net = Net(64, (length,)).dw(11, 2, bias=False).conv(128, 1, act="relu", norm=True)
    for taps in (13, 15, 17):
        separable(net, c, taps, repeats)
    net.dw(29, dilation=2, bias=False).conv(128, 1, act="relu", norm=True)
    return net.conv(128, 1, act="relu", norm=True)


def wav2vec2(d: int, bias: bool, length: int) -> Net:
    """Write the feature encoder, and the convolution of positions, whose last output is left
    out."""
    net = Net(1, (length,))
    for taps, stride in ((10, 5), *((3, 2),) * 4, *((2, 2),) * 2):
        net.conv(512, taps, stride, "gelu", bias=bias, padding=0)
    net.to(d).conv(d, 128, groups=16, act="gelu", padding=64)
    return net.to(size=net.size[0] - 1)


def whisper(d: int, mels: int, length: int) -> Net:
    return Net(mels, (length,)).conv(d, act="gelu").conv(d, 3, 2, act="gelu")


# Separators


def conv_tasnet(length: int) -> Net:
    net = Net(1, (length,)).conv(512, 16, 8, "relu", bias=False, padding=0).conv(128, 1)
    for dilation in [2**i for i in range(8)] * 3:
        net.conv(512, 1).dw(3, dilation=dilation)
        net.fork().conv(128, 1)  # to the sum of all
        net.conv(128, 1, residual=True)
    return net.conv(2 * 512, 1).to(512).up(1, 16, 8, bias=False)


def masked(k: int, taps: int, length: int) -> Net:
    """Write the layers around a separator in the time domain that has no other ones."""
    net = Net(1, (length,)).conv(k, taps, taps // 2, "relu", bias=False, padding=0)
    return net.conv(k, 1, bias=False).conv(2 * k, 1).to(k).up(1, taps, taps // 2, bias=False)


def sudo_rm_rf(length: int) -> Net:
    """Blocks that halve the rate four times; sums on the way back have no layers."""
    net = Net(1, (length,)).conv(512, 21, 10, "relu", bias=False).conv(128, 1)
    for _ in range(16):
        block = net.fork().conv(512, 1)
        for stride in (1, 2, 2, 2, 2):
            block.dw(5, stride)
        net.to(512).conv(128, 1, residual=True)
    return net.conv(512, 1)


def demucs(c: int, levels: int, length: int) -> Net:
    net = Net(2, (length,))
    for level in range(levels):
        net.conv(c << level, 8, 4, "relu", padding=0).conv(2 * net.c, 1).to(net.c // 2)
    for level in reversed(range(levels)):
        net.conv(2 * net.c, 3).to(net.c // 2).up((c << level) // 2 if level else 8, 8, 4)
    return net


# Vocoders


def hifi_gan(
    c: int, rates: Sequence[tuple[int, int]], units: Mapping[int, Sequence[Sequence[int]]],
    length: int, mels: int = 80,
) -> Net:  # fmt: skip
    """`rates` are strides and filters; `units` are dilations of each residual unit by filter."""
    net = Net(mels, (length,)).conv(c, 7)
    for stride, taps in rates:
        net.up(net.c // 2, taps, stride, padding=(taps - stride) // 2)
        for window, dilations in units.items():
            for number, dilation in enumerate(d for unit in dilations for d in unit):
                net.conv(net.c, window, dilation=dilation, residual=number % 2 == 1)
    return net.conv(1, 7)


def big_vgan(c: int, rates: Sequence[tuple[int, int]], length: int) -> Net:
    """Its activations run at twice the rate, between two low-pass filters of 12 taps for all
    channels; the first is transposed."""

    def unit(net: Net, window: int, dilation: int) -> None:
        size = net.size[0]
        net.to(size=size + 10).up(net.c, 12, 2, groups=net.c, bias=False)
        net.to(size=2 * size + 11).dw(12, 2, bias=False, padding=0)
        net.conv(net.c, window, dilation=dilation)

    net = Net(100, (length,)).conv(c, 7)
    for stride, taps in rates:
        net.up(net.c // 2, taps, stride, padding=(taps - stride) // 2)
        for window in (3, 7, 11):
            for dilation in (1, 1, 3, 1, 5, 1):
                unit(net, window, dilation)
    unit(net.to(net.c), 7, 1)
    return net.conv(1, 7)


def mel_gan(length: int) -> Net:
    net = Net(80, (length,)).conv(512, 7)
    for stride in (8, 8, 2, 2):
        net.up(net.c // 2, 2 * stride, stride, padding=stride // 2)
        for dilation in (1, 3, 9):
            net.fork().conv(net.c, 1)
            net.conv(net.c, 3, dilation=dilation).conv(net.c, 1, residual=True)
    return net.conv(1, 7)


def gated(
    c: int, skip: int, taps: int, aux: int, dilations: Sequence[int], length: int, *, causal: bool
) -> Net:
    """Write a stack of dilated layers with gates, each with a product for the condition."""
    net = Net(1, (length,)).conv(c, 1)
    for dilation in dilations:
        net.fork().to(aux).conv(2 * c, 1, bias=False)
        net.conv(2 * c, taps, dilation=dilation, causal="pad" if causal else "").to(c)
        net.fork().conv(skip, 1)
        net.conv(c, 1, residual=True)
    return net.to(skip).conv(skip, 1, act="relu").conv(256 if causal else 1, 1)


def univ_net(c: int, length: int) -> Net:
    """Write the predictors of kernels, and the blocks whose kernels they predict."""
    net, frames = Net(64, (length,)).conv(c, 7), length
    for stride in (8, 8, 4):
        size = net.up(c, 2 * stride, stride, padding=stride // 2).size[0]
        predictor = net.fork().to(100, frames).conv(64, 5)
        for _ in range(6):
            predictor.conv(64, 3)
        predictor.fork().conv(4 * 2 * c * c * 3, 3)
        predictor.conv(4 * 2 * c, 3)
        for dilation in (1, 3, 9, 27):
            net.conv(c, 3, dilation=dilation)
        net.to(size=size)
    return net.conv(1, 7)


def vocos(d: int, inputs: int, length: int) -> Net:
    net = Net(inputs, (length,)).conv(d, 7)
    for _ in range(8):
        net.dw(7)
    return net


def vits(d: int, length: int) -> Net:
    """Write the predictor of durations: dilated depthwise layers and products."""
    net = Net(d, (length,)).conv(d, 1)
    for dilation in (1, 3, 9):
        net.dw(3, dilation=dilation).conv(d, 1)
    return net.conv(d, 1)


# Codecs


def codec_units(net: Net, window: int, dilations: Sequence[int], causal: str, half: bool) -> Net:
    for dilation in dilations:
        if half:
            net.fork().conv(net.c, 1)
        c = net.c
        net.conv(c // 2 if half else c, window, dilation=dilation, causal=causal)
        net.conv(c, 1, residual=True)
    return net


def codec(
    c: int, rates: Sequence[int], latent: int, decoder: int, window: int, dilations: Sequence[int],
    length: int, *, causal: bool, half: bool = False,
) -> Net:  # fmt: skip
    """Write encoder and decoder; a strided filter is twice its stride."""
    how, net = "pad" if causal else "", Net(1, (length,))
    net.conv(c, 7, causal=how)
    for stride in rates:
        codec_units(net, window, dilations, how, half)
        size = net.size[0]
        net.to(size=size + stride).conv(2 * net.c, 2 * stride, stride, padding=0)
        net.to(size=size // stride)
    net.conv(latent, 7 if half else 3, causal=how).conv(decoder, 7, causal=how)
    for stride in reversed(rates):
        size = net.size[0]
        net.up(net.c // 2, 2 * stride, stride).to(size=size * stride)
        codec_units(net, window, dilations, how, half)
    return net.conv(1, 7, causal=how)


# State-space blocks


def short(
    c: int, length: int, taps: int = 4, act: str = "silu", layout: str = "channels_last", *,
    bias: bool = True,
) -> Net:  # fmt: skip
    """Write the short causal layer of a block: padded at both ends, its last outputs left out."""
    return Net(c, (length,), layout).dw(taps, act=act, bias=bias, causal="cut")


def mamba(c: int, length: int) -> Net:
    """Its product writes channels first."""
    return short(c, length, layout="channels_first")


# Time series


def inception_time(length: int) -> Net:
    net = Net(1, (length,))
    for block in range(6):
        if block:
            net.conv(32, 1, bias=False)
        for taps in (39, 19, 9):
            net.fork().conv(32, taps, bias=False)
        net.to(128)
        if block % 3 == 2:
            net.fork().conv(128, 1, norm=True)
    return net


def tcn(c: int, levels: int, taps: int, length: int) -> Net:
    net = Net(1, (length,))
    for level in range(levels):
        for _ in range(2):
            net.conv(c, taps, dilation=2**level, act="relu", causal="cut")
    return net


def ecg_resnet(length: int) -> Net:
    net = Net(12, (length,)).conv(64, 17, act="relu", norm=True)
    for k in (128, 196, 256, 320):
        net.conv(k, 17, act="relu", norm=True).conv(k, 17, 4, norm=True, residual=True)
    return net


def modern_tcn(variables: int, d: int, length: int) -> Net:
    """Large depthwise filters over patches, of all features of all variables."""
    return Net(variables * d, (length,)).dw(51, norm=True)


_SPEECH = ((1, 400), (16, 250), (32, 375), (8, 1000))
_VOICE = ((16, 32), (1, 500), (4, 120))
_TOKENS = ((1, 4096), (8, 2048), (4, 8192), (32, 512), (1, 32_768))
_LONG = ((1, 8192), (4, 2048), (1, 65_536), (2, 16_384))
_SOUND = ((1, 24_000), (16, 16_000), (4, 96_000))
_UNITS = ((1, 1), (3, 1), (5, 1))
_FIRST = dict.fromkeys((3, 7, 11), _UNITS)
_RATES = ((8, 16), (8, 16), (2, 4), (2, 4))

LINES: Mapping[str, Network] = {
    **{
        f"conformer_{size}": Network(
            "speech", "arXiv:2005.08100", partial(conformer, d, 31), _SPEECH
        )
        for size, d in (("s", 144), ("m", 256), ("l", 512))
    },
    **{
        f"fastconformer_{size}": Network(
            "speech", "arXiv:2305.05084", partial(conformer, d, 9),
            ((1, 375), (32, 190), (16, 500)),
        )
        for size, d in (("l", 512), ("xl", 1024))
    },
    **{
        f"squeezeformer_{size}": Network(
            "speech", "arXiv:2206.00888", partial(squeezeformer, d), _SPEECH
        )
        for size, d in (("xs", 144), ("sm", 196), ("m", 324), ("l", 640))
    },
    **{
        f"zipformer_{size}": Network(
            "speech", "arXiv:2310.11230", partial(zipformer, widths), _SPEECH
        )
        for size, widths in (
            ("s", (192, 256, 256, 256, 256, 256)), ("m", (192, 256, 384, 512, 384, 256)),
            ("l", (192, 256, 512, 768, 512, 256)),
        )
    },
    "e_branchformer_l": Network(
        "speech", "arXiv:2210.00077", partial(branchformer, 512, 3072), _SPEECH
    ),
    "w2v_bert_2": Network(
        "speech", "arXiv:2312.05187", partial(causal_conformer, 1024, 31),
        ((1, 500), (8, 750)),
    ),
    "quartznet_5x5": Network(
        "speech", "arXiv:1910.10261", partial(quartznet, 1), ((1, 1000), (32, 800))
    ),
    "quartznet_15x5": Network(
        "speech", "arXiv:1910.10261", partial(quartznet, 3), ((1, 1600), (32, 1200))
    ),
    "citrinet_256": Network(
        "speech", "arXiv:2104.01721", partial(citrinet, 256), ((1, 1600), (32, 1000))
    ),
    "citrinet_1024": Network(
        "speech", "arXiv:2104.01721", partial(citrinet, 1024), ((1, 800), (16, 1200))
    ),
    **{
        f"contextnet_{size}": Network(
            "speech", "arXiv:2005.03191", partial(contextnet, alpha),
            ((1, 1000), (16, 1500)),
        )
        for size, alpha in (("s", 0.5), ("m", 1), ("l", 2))
    },
    "titanet_l": Network(
        "speech", "arXiv:2110.04410", partial(titanet, 1024), ((1, 300), (64, 300))
    ),
    "matchboxnet_3x2": Network(
        "speech", "arXiv:2004.08531", partial(matchboxnet, 64, 2), ((128, 128), (1, 128))
    ),
    "wav2vec2_base": Network(
        "speech", "arXiv:2006.11477", partial(wav2vec2, 768, False),
        ((1, 160_000), (8, 250_000)),
    ),
    "hubert_large": Network(
        "speech", "arXiv:2106.07447", partial(wav2vec2, 1024, True), ((4, 160_000),)
    ),
    "whisper_large": Network(
        "speech", "arXiv:2212.04356", partial(whisper, 1280, 128),
        ((1, 3000), (8, 3000)),
    ),
    "conv_tasnet": Network(
        "separation", "arXiv:1809.07454", conv_tasnet,
        ((1, 32_000), (8, 32_000), (4, 64_000)),
    ),
    "sepformer": Network(
        "separation", "arXiv:2010.13154", partial(masked, 256, 16),
        ((1, 64_000), (1, 32_000)),
    ),
    "dprnn": Network(
        "separation", "arXiv:1910.06379", partial(masked, 64, 2), ((2, 32_000),)
    ),
    "sudo_rm_rf": Network(
        "separation", "arXiv:2007.06833", sudo_rm_rf, ((4, 32_000), (1, 160_000))
    ),
    "demucs": Network(
        "separation", "arXiv:1911.13254", partial(demucs, 64, 6), ((4, 169_300),)
    ),
    "hifi_gan_v1": Network(
        "vocoder", "arXiv:2010.05646", partial(hifi_gan, 512, _RATES, _FIRST), _VOICE
    ),
    "hifi_gan_v2": Network(
        "vocoder", "arXiv:2010.05646", partial(hifi_gan, 128, _RATES, _FIRST), _VOICE
    ),
    "hifi_gan_v3": Network(
        "vocoder", "arXiv:2010.05646",
        partial(
            hifi_gan, 256, ((8, 16), (8, 16), (4, 8)),
            {3: ((1,), (2,)), 5: ((2,), (6,)), 7: ((3,), (12,))},
        ),
        _VOICE,
    ),
    "big_vgan_base": Network(
        "vocoder", "arXiv:2206.04658", partial(big_vgan, 512, _RATES), _VOICE
    ),
    "big_vgan": Network(
        "vocoder", "arXiv:2206.04658",
        partial(big_vgan, 1536, ((4, 8), (4, 8), *((2, 4),) * 4)), _VOICE,
    ),
    "mel_gan": Network("vocoder", "arXiv:1910.06711", mel_gan, _VOICE),
    "wave_net": Network(
        "vocoder", "arXiv:1609.03499",
        partial(gated, 64, 256, 2, 80, [2**i for i in range(10)] * 3, causal=True),
        ((4, 16_000), (1, 8_000)),
    ),
    "parallel_wave_gan": Network(
        "vocoder", "arXiv:1910.11480",
        partial(gated, 64, 64, 3, 80, [2**i for i in range(10)] * 3, causal=False),
        ((6, 25_600), (1, 96_000)),
    ),
    "univ_net_c32": Network("vocoder", "arXiv:2106.07889", partial(univ_net, 32), _VOICE),
    "vocos": Network(
        "vocoder", "arXiv:2306.00814", partial(vocos, 512, 100),
        ((16, 64), (1, 1000), (64, 375)),
    ),
    "vits": Network(
        "vocoder", "arXiv:2106.06103", partial(vits, 192), ((64, 150), (1, 400))
    ),
    "encodec_24khz": Network(
        "codec", "arXiv:2210.13438",
        partial(codec, 32, (2, 4, 5, 8), 128, 512, 3, (1,), causal=True, half=True), _SOUND,
    ),
    "sound_stream": Network(
        "codec", "arXiv:2107.03312",
        partial(codec, 32, (2, 4, 5, 8), 512, 512, 7, (1, 3, 9), causal=True), _SOUND,
    ),
    "dac_44khz": Network(
        "codec", "arXiv:2306.06546",
        partial(codec, 64, (2, 4, 8, 8), 1024, 1536, 7, (1, 3, 9), causal=False),
        ((1, 44_032), (12, 16_896)),
    ),
    **{
        f"mamba_{size}": Network(
            "state-space", "arXiv:2312.00752; an expansion of 2, 4 taps",
            partial(mamba, 2 * d), _TOKENS,
        )
        for size, d in (
            ("130m", 768), ("370m", 1024), ("790m", 1536), ("1_4b", 2048), ("2_8b", 2560),
        )
    },
    "falcon_mamba_7b": Network(
        "state-space", "arXiv:2410.05355", partial(mamba, 8192), _LONG
    ),
    "vim_tiny": Network(
        "state-space", "arXiv:2401.09417", partial(mamba, 384), ((128, 197), (1, 197))
    ),
    "vim_small": Network(
        "state-space", "arXiv:2401.09417", partial(mamba, 768), ((64, 197), (8, 785))
    ),
    **{
        f"mamba2_{size}": Network(
            "state-space", "arXiv:2405.21060; 128 states of one group",
            partial(short, 2 * d + 256), _TOKENS,
        )
        for size, d in (
            ("130m", 768), ("370m", 1024), ("780m", 1536), ("1_3b", 2048), ("2_7b", 2560),
        )
    },
    "codestral_mamba_7b": Network(
        "state-space", "huggingface.co/mistralai/Mamba-Codestral-7B-v0.1, config.json",
        partial(short, 8192 + 2 * 8 * 128), _LONG,
    ),
    "hyena_dna": Network(
        "state-space", "arXiv:2306.15794",
        partial(short, 3 * 256, taps=3, act="none"), ((256, 1024), (8, 32_768), (1, 160_000)),
    ),
    "hyena_small": Network(
        "state-space", "arXiv:2302.10866",
        partial(short, 3 * 864, taps=3, act="none"), ((8, 2048), (2, 8192)),
    ),
    "striped_hyena_7b": Network(
        "state-space", "github.com/togethercomputer/stripedhyena, configs",
        partial(short, 3 * 4096, taps=3, act="none"), _LONG,
    ),
    "recurrent_gemma_2b": Network(
        "state-space", "arXiv:2404.07839", partial(short, 2560, act="none"), _TOKENS
    ),
    "recurrent_gemma_9b": Network(
        "state-space", "arXiv:2404.07839", partial(short, 4096, act="none"), _LONG
    ),
    "gated_delta_net_1_3b": Network(
        "state-space", "arXiv:2412.06464; queries and keys, and values, each",
        lambda length: short(1536, length, bias=False).to(3072).dw(
            4, act="silu", bias=False, causal="cut"
        ),
        _TOKENS,
    ),
    "qwen3_next": Network(
        "state-space", "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, config.json",
        partial(short, 2 * 2048 + 4096, bias=False), _LONG,
    ),
    "xlstm_1_3b": Network(
        "state-space", "arXiv:2405.04517", partial(short, 4096), ((1, 8192), (8, 2048))
    ),
    "inception_time": Network(
        "time-series", "arXiv:1909.04939", inception_time, ((64, 500), (64, 152))
    ),
    "tcn": Network(
        "time-series", "arXiv:1803.01271", partial(tcn, 25, 8, 7), ((64, 784), (32, 600))
    ),
    "ecg_resnet": Network(
        "time-series", "arXiv:1904.01949", ecg_resnet, ((64, 4096), (1, 4096))
    ),
    **{
        f"modern_tcn_{name}": Network(
            "time-series", "openreview.net/forum?id=vpJMJerXHU",
            partial(modern_tcn, variables, 64), ((32, 84), (128, 42)),
        )
        for name, variables in (("ett", 7), ("weather", 21), ("electricity", 321))
    },
}  # fmt: skip

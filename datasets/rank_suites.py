"""Makes the suites of convolutions in one and three dimensions, from the networks that
`rank_lines.py` and `rank_volumes.py` write down.

    python datasets/rank_suites.py    suites/rank/*.json

Depthwise layers, for which there are kernels, have suites of their own beside all others: dense,
grouped and transposed ones. No layer and no network of a hold-out is in a training suite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from make_suite import log_uniform
from rank_layers import Layer, Network
from rank_lines import LINES
from rank_volumes import VOLUMES

from confpred.data.suites import Entry, Suite, write_suite
from confpred.errors import InvalidProblem
from confpred.problem.conv import LAYOUTS, ConvNd
from confpred.problem.conv2d import DIRECTIONS
from confpred.problem.device import get_device

SUITES = Path(__file__).parent / "suites" / "rank"
NETWORKS: Mapping[str, Network] = {**LINES, **VOLUMES}
HELD_OUT = """
    conformer_m fastconformer_l squeezeformer_m zipformer_l contextnet_m quartznet_5x5 titanet_l
    hubert_large sepformer sudo_rm_rf hifi_gan_v3 mel_gan big_vgan_base vits sound_stream
    mamba_790m mamba2_780m vim_small codestral_mamba_7b striped_hyena_7b recurrent_gemma_2b
    modern_tcn_weather ecg_resnet nn_unet seg_former_3d med_next_b_5 x3d_m movi_net_a2 ir_csn_50
    uni_former_s mvit_v2_s_2 i3d mc3_18 cost_r50 hunyuan_decoder ltx_decoder
""".split()  # noqa: SIM905

#: Problems of a suite by rank: of networks' layers, and of coverage.
DEPTHWISE = {"training": {1: (410, 70), 3: (270, 50)}, "holdout": {1: (90, 0), 3: (60, 0)}}
OTHERS = {"training": {1: (220, 0), 3: (220, 0)}, "holdout": {1: (60, 0), 3: (60, 0)}}
DIRECTION_SHARES = (0.4, 0.3, 0.3)
DTYPES, DTYPE_SHARES = ("float16", "bfloat16", "float32"), (0.48, 0.46, 0.06)
EPILOGUE_SHARE = 0.6
DETERMINISTIC_SHARE = 0.15
#: Share of depthwise lines that are channels first, whatever the network's layout: a graph may
#: convert its tensors, and kernels of other ranks than two read rows.
FIRST_SHARE = 0.75
#: Bytes of a problem, and most seconds of it at an H100's limits.
LEAST_BYTES, MOST_BYTES, MOST_SECONDS = 2**18, 2**30, 4e-3
MOST_TAPS = {1: 64, 3: 7}  # of an axis of a depthwise layer
IMAGE_CHANNELS = 4  # up to so many of a network's own input, which needs no gradient
#: How often a transposed layer is drawn where another one is drawn once.
TRANSPOSED_TIMES = 12
_DRAWS = 200  # in vain, after which nothing new is left of a network
#: Share of pointwise layers that are drawn: each is a product of matrices.
POINTWISE_SHARE = 0.2

LINE_TAPS = (2, 3, 3, 3, 4, 4, 4, 5, 7, 7, 9, 11, 15, 17, 21, 31, 31, 41, 63)
VOLUME_WINDOWS = (
    *((3, 3, 3),) * 4, (5, 5, 5), (7, 7, 7), (1, 3, 3), (3, 1, 1), (5, 1, 1), (5, 3, 3), (1, 5, 5),
)  # fmt: skip


class Use(NamedTuple):
    """A layer in a network, at a batch."""

    batch: int
    layer: Layer


#: Returns a problem of a layer; None where the draw is of no use.
Draw = Callable[[Use, np.random.Generator], ConvNd | None]


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", default=SUITES, type=click.Path(path_type=Path), help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write suites/rank/*.json."""
    for suite in suites(seed):
        write_suite(suite, out / f"{suite.name.removeprefix('rank-')}.json")
        names = {name for entry in suite.entries for name in entry.networks}
        click.echo(f"{suite.name}: {len(suite.entries)} problems of {len(names)} networks")


def suites(seed: int) -> Iterator[Suite]:
    """Yield a training suite and a hold-out of depthwise layers, and of all others."""
    uses = {name: uses_of(network) for name, network in NETWORKS.items()}
    held = {shape(use.layer.problem) for name in HELD_OUT for use in uses[name]}
    for number, (prefix, counts) in enumerate((("", DEPTHWISE), ("other_", OTHERS))):
        wanted = {
            name: [u for u in found if is_depthwise(u.layer.problem) != bool(number)]
            for name, found in uses.items()
        }
        for part, of_ranks in counts.items():
            apart = part == "training"
            chosen = {
                name: [u for u in found if not (apart and shape(u.layer.problem) in held)]
                for name, found in wanted.items()
                if (name in HELD_OUT) != apart
            }
            generator = np.random.default_rng([seed, number, apart])
            yield Suite(
                f"rank-{prefix}{part}", tuple(entries_of(chosen, of_ranks, held, generator))
            )


def uses_of(network: Network) -> list[Use]:
    """Return the distinct layers of a network in each of its runs, transposed ones repeated."""
    found: dict[Use, None] = {}
    for batch, *size in network.runs:
        net = network.write(size[0] if len(size) == 1 else tuple(size))
        found |= dict.fromkeys(Use(batch, layer) for layer in net.layers)
    return [
        use
        for use in found
        for _ in range(TRANSPOSED_TIMES if use.layer.problem.direction == "dgrad" else 1)
    ]


def is_depthwise(p: ConvNd) -> bool:
    """Whether kernels of depthwise layers may compute it, transposed or not."""
    return p.groups == p.c == p.k and p.groups > 1 and 1 < max(p.filter_shape) <= MOST_TAPS[p.rank]


def shape(p: ConvNd) -> tuple[Any, ...]:
    """Return the key of layers that are the same to the hold-out, whatever their layout, padding
    and epilogue."""
    return (p.c, p.k, p.groups, p.input_shape, p.filter_shape, p.stride, p.dilation)


def entries_of(
    uses: Mapping[str, Sequence[Use]],
    counts: Mapping[int, tuple[int, int]],
    held: set[tuple[Any, ...]],
    generator: np.random.Generator,
    draw: Draw | None = None,
) -> Iterator[Entry]:
    """Yield the entries of a suite, the problems of each rank by `draw` or `problem_of`."""
    for rank, (of_networks, coverage) in counts.items():
        own = {n: [u for u in us if u.layer.problem.rank == rank] for n, us in uses.items()}
        own = {name: found for name, found in own.items() if found}
        users: dict[ConvNd, list[str]] = defaultdict(list)
        for name, found in own.items():
            for layer in dict.fromkeys(use.layer.problem.layer() for use in found):
                users[replace(layer, layout=LAYOUTS[0])].append(name)
        problems = _drawn(own, of_networks, generator, draw or problem_of)
        yield from (Entry(p, tuple(users[replace(p.layer(), layout=LAYOUTS[0])])) for p in problems)
        if coverage:
            yield from map(Entry, _coverage(rank, coverage, {*problems}, held, generator))


def _drawn(
    uses: Mapping[str, Sequence[Use]], count: int, generator: np.random.Generator, draw: Draw
) -> list[ConvNd]:
    """Return `count` problems: turn by turn a layer of each network, until nothing is new."""
    found: dict[ConvNd, None] = {}
    left: dict[str, list[int]] = {name: [] for name in uses}
    in_vain = dict.fromkeys(uses, 0)
    while open_networks := [name for name in uses if in_vain[name] < _DRAWS]:
        for name in open_networks:
            if not left[name]:
                left[name] = generator.permutation(len(uses[name])).tolist()
            problem = draw(uses[name][left[name].pop()], generator)
            in_vain[name] += problem is None or problem in found
            if problem is not None:
                found.setdefault(problem)
            if len(found) == count:
                return list(found)
    raise ValueError(f"{len(found)} problems where {count} were asked for")


def problem_of(use: Use, generator: np.random.Generator) -> ConvNd | None:
    """Return a problem of a layer; None where the draw is senseless, too large or too small."""
    layer, bias = use.layer.problem, use.layer.bias_gradient
    if layer.taps == 1 and generator.random() > POINTWISE_SHARE:
        return None
    direction = str(generator.choice(DIRECTIONS, p=DIRECTION_SHARES))
    if layer.direction == "dgrad":  # a transposed layer: its forward pass is the one of two
        direction = {"fprop": "dgrad", "dgrad": "fprop"}.get(direction, direction)
    fused = generator.random() < EPILOGUE_SHARE
    exact = generator.random() < DETERMINISTIC_SHARE
    dtype = str(generator.choice(DTYPES, p=DTYPE_SHARES))
    layout = LAYOUTS[int(generator.random() < FIRST_SHARE)]
    is_gradient = direction == "dgrad" and layer.direction == "fprop"
    if is_gradient and layer.c <= IMAGE_CHANNELS:
        return None
    fields: dict[str, Any] = {"n": use.batch, "dtype": dtype, "direction": direction}
    if direction != layer.direction or not fused:
        fields |= {"bias": False, "activation": "none", "residual": False}
    if direction == "wgrad":
        # The gradient of a transposed layer's bias is a sum over the larger tensor, not this one.
        fields |= {"bias": bias and layer.direction == "fprop", "deterministic": exact}
    if layer.rank == 1 and is_depthwise(layer):
        fields["layout"] = layout
    problem = replace(layer, **fields)
    return problem if is_affordable(problem) else None


def is_affordable(problem: ConvNd) -> bool:
    seconds = get_device("h100").roofline_s(problem)
    return LEAST_BYTES <= problem.minimum_bytes <= MOST_BYTES and seconds <= MOST_SECONDS


def _coverage(
    rank: int,
    count: int,
    known: set[ConvNd],
    held: set[tuple[Any, ...]],
    generator: np.random.Generator,
) -> list[ConvNd]:
    """Return depthwise problems of no network: odd channels, and sizes that are log-uniform."""
    found: dict[ConvNd, None] = {}
    while len(found) < count:
        step = int(generator.choice((1, 2, 4, 8, 8, 16)))
        c = max(1, log_uniform(generator, 8, 4096) // step) * step
        stride = int(generator.choice((1, 1, 1, 2)))
        fields: dict[str, Any] = {"n": 2 ** int(generator.integers(6)), "c": c, "k": c, "groups": c}
        if rank == 1:
            fields |= {"w": log_uniform(generator, 64, 65_536)}
            taps: tuple[int, ...] = (int(generator.choice(LINE_TAPS)),)
            fields |= {"s": taps[0]}
        else:
            side = log_uniform(generator, 6, 128)
            fields |= {"d": log_uniform(generator, 2, 64), "h": side, "w": side}
            taps = VOLUME_WINDOWS[int(generator.integers(len(VOLUME_WINDOWS)))]
            fields |= dict(zip("trs", taps, strict=True))
        spread = int(generator.choice((1, 1, 1, 2, 4))) if stride == 1 and rank == 1 else 1
        steps = {"stride": stride, "dilation": spread, "padding": [spread * (t // 2) for t in taps]}
        try:
            layer = Layer(ConvNd(rank=rank, bias=True, activation="silu", **steps, **fields), True)
        except InvalidProblem:
            continue
        problem = problem_of(Use(layer.problem.n, layer), generator)
        if problem and problem not in known and shape(problem) not in held:
            found.setdefault(problem)
    return list(found)


if __name__ == "__main__":
    main()

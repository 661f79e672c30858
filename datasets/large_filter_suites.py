"""Makes the suites of large depthwise filters, from networks that are written down here.

    python datasets/large_filter_suites.py    suites/large_filters/*.json

Widths, filters and sizes are those of the publications; layers that other kernels serve, such as
the 5x5 ones of SLaK, and dilated ones, are left out. No network of the hold-out, and no layer of
it, is in the training suite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from make_suite import log_uniform

from confpred.data.suites import Entry, Suite, write_suite
from confpred.problem.conv2d import DIRECTIONS, Problem

SUITES = Path(__file__).parent / "suites" / "large_filters"

HELD_OUT = (
    "replknet_31l", "slak_b", "slak_t_800", "unireplknet_p", "unireplknet_s", "segnext_s",
    "strip_net_s", "overlock_b",
)  # fmt: skip

COUNTS = {"training": 400, "holdout": 96}  # problems of networks
ALIGNED_SHARE = 0.7  # of coverage: as many channels as instructions load at once
COVERAGE = 80  # problems to train on that no network has
DIRECTION_SHARES = (0.4, 0.3, 0.3)
DTYPES = ("float16", "bfloat16")
EPILOGUE_SHARE = 0.6
DETERMINISTIC_SHARE = 0.15
MAX_BATCH, POWER_OF_TWO_SHARE = 64, 0.8
#: Bytes and operations of a problem: with more, PyTorch's operator takes a tenth of a second.
LEAST_BYTES, MOST_BYTES, MOST_FLOPS = 2**17, 2**29, 2**37

Filters = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Network:
    """A network as it is published.

    Attributes:
        image: height and width of its input.
        widths: channels of each stage.
        filters: those of each stage, none where it has no large ones.
        activation: follows a filter, once batch norm is folded.
        bias: the layer itself has one, so that training needs its gradient.
        first: the first stage's stride.
    """

    image: int
    widths: tuple[int, ...]
    filters: tuple[Filters, ...]
    activation: str = "none"
    bias: bool = False
    first: int = 4

    def layers(self) -> Iterator[Problem]:
        """Yield its distinct layers for one image, forward."""
        for stage, (c, filters) in enumerate(zip(self.widths, self.filters, strict=True)):
            side = self.image // (self.first << stage)
            for r, s in filters:
                yield Problem(1, c, side, side, c, r, s, padding=(r // 2, s // 2), groups=c)


def _square(*sizes: int) -> tuple[Filters, ...]:
    """Return the filters of stages with square ones of these sizes; 0 is a stage without."""
    return tuple(((size, size),) if size else () for size in sizes)


def _strips(small: int, *sizes: int) -> tuple[Filters, ...]:
    """Return the filters of stages with two strips each."""
    return tuple(((size, small), (small, size)) for size in sizes)


def _doubled(first: int) -> tuple[int, ...]:
    return tuple(first << stage for stage in range(4))


def _slak(*widths: int) -> tuple[int, ...]:
    """Return widths of SLaK, which are 1.3 times those of ConvNeXt."""
    return tuple(width * 13 // 10 for width in widths)


_31 = _square(31, 29, 27, 13)
_51 = _strips(5, 51, 49, 47, 13)
_13 = _square(0, 13, 13, 13)
_21 = _strips(1, 21, 21, 21, 21)
_19 = _strips(1, 19, 19, 19, 19)
_17 = _square(17, 15, 13, 0)
NETWORKS: Mapping[str, Network] = {
    # Ding and others, "Scaling Up Your Kernels to 31x31", CVPR 2022.
    "replknet_31b": Network(224, _doubled(128), _31, "relu"),
    "replknet_31b_384": Network(384, _doubled(128), _31, "relu"),
    "replknet_31l": Network(384, _doubled(192), _31, "relu"),
    "replknet_xl": Network(320, _doubled(256), _square(27, 27, 27, 13), "relu"),
    "replknet_25b": Network(224, _doubled(128), _square(25, 25, 25, 13), "relu"),
    "replknet_13b": Network(224, _doubled(128), _square(13, 13, 13, 13), "relu"),
    # Liu and others, "More ConvNets in the 2020s", ICLR 2023; S has the widths of T.
    "slak_t": Network(224, _slak(96, 192, 384, 768), _51),
    "slak_t_800": Network(800, _slak(96, 192, 384, 768), _51),  # detection
    "slak_b": Network(224, _slak(128, 256, 512, 1024), _51),
    "convnext_t_31": Network(224, _doubled(96), _31, bias=True),
    "convnext_b_31": Network(224, _doubled(128), _31, bias=True),
    # Ding and others, "UniRepLKNet", CVPR 2024; N has the widths of T.
    "unireplknet_a": Network(224, _doubled(40), _13),
    "unireplknet_f": Network(224, _doubled(48), _13),
    "unireplknet_p": Network(224, _doubled(64), _13),
    "unireplknet_t": Network(224, _doubled(80), _13),
    "unireplknet_s": Network(224, _doubled(96), _13),
    "unireplknet_b": Network(384, _doubled(128), _13),
    "unireplknet_l": Network(384, _doubled(192), _13),
    "unireplknet_xl": Network(384, _doubled(256), _13),
    # Guo and others, "SegNeXt", NeurIPS 2022; B and L have the widths of S.
    "segnext_t": Network(512, (32, 64, 160, 256), _21, bias=True),
    "segnext_t_1024": Network(1024, (32, 64, 160, 256), _21, bias=True),
    "segnext_s": Network(512, (64, 128, 320, 512), _21, bias=True),
    # Yuan and others, "Strip R-CNN", 2025.
    "strip_net_t": Network(1024, (32, 64, 160, 256), _19, bias=True),
    "strip_net_s": Network(1024, (64, 128, 320, 512), _19, bias=True),
    # Lou and Yu, "OverLoCK", CVPR 2025.
    "overlock_xt": Network(224, (56, 112, 256, 336), _17),
    "overlock_t": Network(224, (64, 128, 256, 512), _17),
    "overlock_s": Network(224, (64, 128, 320, 512), _17),
    "overlock_b": Network(224, (80, 160, 384, 576), _17),
}


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", default=SUITES, type=click.Path(path_type=Path), help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write suites/large_filters/*.json."""
    for suite in suites(seed):
        write_suite(suite, out / f"{suite.name.removeprefix('large-filters-')}.json")
        names = {name for entry in suite.entries for name in entry.networks}
        click.echo(f"{suite.name}: {len(suite.entries)} problems of {len(names)} networks")


def suites(seed: int) -> Iterator[Suite]:
    """Yield the training suite and the hold-out."""
    layers = {name: list(network.layers()) for name, network in NETWORKS.items()}
    held = {layer for name in HELD_OUT for layer in layers[name]}
    trained = {
        name: [layer for layer in found if layer not in held]
        for name, found in layers.items()
        if name not in HELD_OUT
    }
    generator = np.random.default_rng([seed, 56])
    problems = _drawn(trained, COUNTS["training"], generator)
    more = _coverage(held, generator)
    yield Suite("large-filters-training", (*problems, *map(Entry, more)))
    apart = {name: layers[name] for name in HELD_OUT}
    yield Suite("large-filters-holdout", tuple(_drawn(apart, COUNTS["holdout"], generator)))


def _drawn(
    layers: Mapping[str, Sequence[Problem]], count: int, generator: np.random.Generator
) -> list[Entry]:
    """Return `count` problems, none of them twice: turn by turn a layer of each network."""
    users: dict[Problem, list[str]] = defaultdict(list)
    for name, found in layers.items():
        for layer in found:
            users[layer].append(name)
    problems: dict[Problem, None] = {}
    while True:
        for name, found in layers.items():
            layer = found[int(generator.integers(len(found)))] if found else None
            if layer and (problem := _problem(layer, NETWORKS[name], generator)):
                problems.setdefault(problem)
            if len(problems) == count:
                return [Entry(p, tuple(users[p.layer()])) for p in problems]


def _coverage(held: set[Problem], generator: np.random.Generator) -> list[Problem]:
    """Return problems of no network: filters between and beyond these, even ones, odd channels,
    images smaller than the filter."""
    found: dict[Problem, None] = {}
    network = Network(0, (), (), "silu", bias=True)
    while len(found) < COVERAGE:
        large, small = log_uniform(generator, 12, 64), log_uniform(generator, 1, 11)
        r, s = [(large, large), (large, small), (small, large)][int(generator.integers(3))]
        c = log_uniform(generator, 8, 1024)
        c -= c % 8 if generator.random() < ALIGNED_SHARE else 0
        h, w = (log_uniform(generator, 5, 160) for _ in range(2))
        h = h if generator.random() < 0.4 else w
        layer = Problem(1, c, h, w, c, r, s, padding=(r // 2, s // 2), groups=c)
        if layer not in held and (problem := _problem(layer, network, generator)):
            found.setdefault(problem)
    return list(found)


def _problem(layer: Problem, network: Network, generator: np.random.Generator) -> Problem | None:
    """Return `layer` at a batch, in a direction and a dtype, with the epilogue that the network has
    in inference or none; None if it is too large or too small."""
    batch = 1 << int(generator.integers(MAX_BATCH.bit_length()))
    if generator.random() > POWER_OF_TWO_SHARE:
        batch = log_uniform(generator, 1, MAX_BATCH)
    direction = str(generator.choice(DIRECTIONS, p=DIRECTION_SHARES))
    fused, exact = generator.random() < EPILOGUE_SHARE, generator.random() < DETERMINISTIC_SHARE
    fields: dict[str, Any] = {
        "n": batch, "direction": direction, "dtype": str(generator.choice(DTYPES)),
    }  # fmt: skip
    if direction == "fprop" and fused:
        fields |= {"bias": True, "activation": network.activation}
    if direction == "wgrad":
        fields |= {"bias": network.bias, "deterministic": bool(exact)}
    problem = replace(layer, **fields)
    fits = LEAST_BYTES <= problem.minimum_bytes <= MOST_BYTES and problem.flops <= MOST_FLOPS
    return problem if fits else None


if __name__ == "__main__":
    main()

"""Makes the suites of dense convolutions: real networks' layers, and sizes between and beyond them.

    python datasets/dense_suites.py    suites/dense/*.json, from dense_networks.json

They are for a choice among the plans of a library, which has to be trusted on networks that it has
never seen. So whole kinds of networks are held out (`HELD_OUT`), and a layer of these is in the
training suite under no network and at no batch. Plans need no kernels of their own, so filters,
channels and epilogues are drawn as freely as sizes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from dense_layers import Network, read_networks
from dense_written import Layer
from make_suite import log_uniform

from confpred.data.suites import Entry, Suite, write_suite
from confpred.errors import InvalidProblem
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device

SUITES = Path(__file__).parent / "suites" / "dense"
HELD_OUT = ("optical-flow", "pose", "super-resolution")

#: Problems of each direction: of networks' layers, and of coverage. The forward has twice as many,
#: because half of them are with an epilogue.
TRAINING = {"fprop": (600, 200), "dgrad": (300, 100), "wgrad": (300, 100)}
HOLDOUT = {"fprop": (200, 0), "dgrad": (100, 0), "wgrad": (100, 0)}

DTYPES = ("float16", "bfloat16", "float32")
DTYPE_SHARES = (0.7, 0.18, 0.12)
EPILOGUE_SHARE = 0.5
DETERMINISTIC_SHARE = 0.2
POWER_OF_TWO_SHARE = 0.75
MAX_BATCH = 128
#: Most bytes of all tensors of a problem together, and most seconds of it at an H100's limits.
MAX_BYTES = 2**30
MAX_SECONDS = 4e-3
#: Least bytes of a coverage problem: below, every plan takes the time of an empty launch.
MIN_BYTES = 2**17
#: Share of a layer on an image of a single pixel, relative to others: networks have many, in their
#: attention over channels, but each is a product of small matrices that takes hardly any time.
PIXEL_SHARE = 0.1
#: Up to so many channels of an input of the network itself, of which training has no gradient.
IMAGE_CHANNELS = 4

#: Channels that no multiple of eight hides, and the filters, strides and dilations of coverage.
ODD_CHANNELS = (1, 2, 3, 5, 6, 12, 17, 20, 33, 36, 48, 50, 68, 85, 100, 129, 185, 250, 255, 300)
WINDOWS = (
    *((1, 1, 1, 1),) * 4, *((3, 3, 1, 1),) * 6, *((3, 3, 2, 1),) * 3, (1, 1, 2, 1), (3, 3, 1, 2),
    (3, 3, 1, 4), (5, 5, 1, 1), (5, 5, 2, 1), (7, 7, 1, 1), (7, 7, 2, 1), (2, 2, 2, 1),
    (4, 4, 2, 1), (4, 4, 4, 1), (1, 3, 1, 1), (3, 1, 1, 1), (1, 7, 1, 1), (7, 1, 1, 1),
)  # fmt: skip


@dataclass(slots=True)
class Users:
    """Networks that have a layer, their kinds, and the layer with its epilogue in each."""

    kinds: set[str] = field(default_factory=set)
    networks: dict[str, None] = field(default_factory=dict)  # in order
    layers: list[Layer] = field(default_factory=list)


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", default=SUITES, type=click.Path(path_type=Path), help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write training.json and holdout.json from dense_networks.json."""
    training, holdout = suites(read_networks(), seed)
    for suite in (training, holdout):
        write_suite(suite, out / f"{suite.name.removeprefix('dense-')}.json")
        click.echo(f"{suite.name}: {len(suite.entries)} problems")


def suites(networks: Mapping[str, Network], seed: int) -> tuple[Suite, Suite]:
    """Return the training suite and the one of the kinds that are held out."""
    held = users_of_layers({n: x for n, x in networks.items() if x.kind in HELD_OUT})
    shapes = {shape(layer) for layer in held}
    others = users_of_layers({n: x for n, x in networks.items() if x.kind not in HELD_OUT})
    users = {layer: x for layer, x in others.items() if shape(layer) not in shapes}
    training = Suite("dense-training", _entries(users, TRAINING, shapes, [seed, 0]))
    return training, Suite("dense-holdout", _entries(held, HOLDOUT, set(), [seed, 1]))


def shape(problem: Problem) -> tuple[Any, ...]:
    """Return the key of layers that are the same to the hold-out, whatever their padding and
    epilogue."""
    p = problem
    return (p.c, p.k, p.h, p.w, p.r, p.s, p.stride)


def users_of_layers(networks: Mapping[str, Network]) -> dict[Problem, Users]:
    """Return who has each layer; layers are apart in their sizes, and not in their epilogue."""
    users: dict[Problem, Users] = defaultdict(Users)
    for name, network in networks.items():
        for layer in network.layers:
            found = users[layer.problem.layer()]
            found.kinds.add(network.kind)
            found.networks[name] = None
            found.layers.append(layer)
    return users


def _entries(
    users: Mapping[Problem, Users],
    counts: Mapping[str, tuple[int, int]],
    forbidden: set[tuple[Any, ...]],
    seed: Sequence[int],
) -> tuple[Entry, ...]:
    """Return as many problems of each direction as `counts` says, of networks and of coverage, all
    of them different and none of a forbidden shape."""
    found: dict[Problem, tuple[str, ...]] = {}
    for index, (direction, (network, coverage)) in enumerate(counts.items()):
        generator = np.random.default_rng([*seed, index])
        for proposals, count in (
            (_of_networks(users, direction, generator), network),
            (_of_coverage(users, direction, generator), coverage),
        ):
            end = len(found) + count
            while len(found) < end:
                problem, names = next(proposals)
                if shape(problem) not in forbidden:
                    found.setdefault(problem, names)
    return tuple(Entry(problem, names) for problem, names in found.items())


def _of_networks(
    users: Mapping[Problem, Users], direction: str, generator: np.random.Generator
) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """Yield an endless stream of problems that are layers of networks, with the networks."""
    layers = list(users)
    sizes = Counter(kind for user in users.values() for kind in user.kinds)
    # A kind of many layers is met more often, but one of few teaches as much.
    shares = np.array([
        sum(sizes[kind] ** -0.5 for kind in sorted(users[layer].kinds))
        * (PIXEL_SHARE if layer.p * layer.q == 1 else 1)
        for layer in layers
    ])  # fmt: skip
    shares /= shares.sum()
    while True:
        layer = layers[int(generator.choice(len(layers), p=shares))]
        user = users[layer]
        one = user.layers[int(generator.integers(len(user.layers)))]
        variant = _variant(layer, direction, one.problem, one.bias_gradient, generator)
        seen = direction != "dgrad" or layer.c > IMAGE_CHANNELS
        if seen and (problem := _with_batch(variant, generator)):
            yield problem, tuple(user.networks)


def _of_coverage(
    users: Mapping[Problem, Users], direction: str, generator: np.random.Generator
) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """Yield an endless stream of problems of no network: odd channels, and images down to one
    pixel."""
    # Each distinct epilogue is as likely as another, so that rare ones occur at all.
    seen = {_epilogue(x.problem): x.problem for user in users.values() for x in user.layers}
    epilogues = [seen[key] for key in sorted(seen) if key != _epilogue(seen[key].layer())]
    while True:
        c, k = _channels(generator), _channels(generator)
        r, s, stride, dilation = WINDOWS[int(generator.integers(len(WINDOWS)))]
        h, w = log_uniform(generator, 1, 256), log_uniform(generator, 1, 256)
        if generator.random() < 0.6:
            w = h
        padding = (dilation * (r // 2), dilation * (s // 2))
        if generator.random() < 0.15:
            padding = (0, 0)
        epilogue = epilogues[int(generator.integers(len(epilogues)))]
        try:
            layer = Problem(1, c, h, w, k, r, s, (stride,) * 2, padding, (dilation,) * 2)
        except InvalidProblem:  # a filter larger than the image
            continue
        variant = _variant(layer, direction, epilogue, bool(generator.random() < 0.5), generator)
        problem = _with_batch(variant, generator)
        if problem and problem.minimum_bytes >= MIN_BYTES:
            yield problem, ()


def _variant(
    layer: Problem,
    direction: str,
    epilogue: Problem,
    bias_gradient: bool,
    generator: np.random.Generator,
) -> Problem:
    """Return `layer` in a direction and a dtype, with the epilogue or none, in a mode."""
    dtype = DTYPES[int(generator.choice(len(DTYPES), p=DTYPE_SHARES))]
    fused, exact = generator.random() < EPILOGUE_SHARE, generator.random() < DETERMINISTIC_SHARE
    problem = replace(layer, direction=direction, dtype=dtype)
    if direction == "fprop" and fused:
        bias, activation, residual = _epilogue(epilogue)
        return replace(problem, bias=bias, activation=activation, residual=residual)
    if direction == "wgrad":
        return replace(problem, bias=bias_gradient, deterministic=bool(exact))
    return problem


def _epilogue(problem: Problem) -> tuple[bool, str, bool]:
    return problem.bias, problem.activation, problem.residual


def _with_batch(problem: Problem, generator: np.random.Generator) -> Problem | None:
    """Return `problem` at a random batch that a measurement can afford; None if it affords none."""
    most = MAX_BATCH
    while most and not _affordable(replace(problem, n=most)):
        most //= 2
    if not most:
        return None
    if generator.random() < POWER_OF_TWO_SHARE:
        return replace(problem, n=1 << int(generator.integers(most.bit_length())))
    return replace(problem, n=log_uniform(generator, 1, most))


def _affordable(problem: Problem) -> bool:
    seconds = get_device("h100").roofline_s(problem)
    return problem.minimum_bytes <= MAX_BYTES and seconds <= MAX_SECONDS


def _channels(generator: np.random.Generator) -> int:
    """Return channels: half of them from the menu of odd ones, the other half any, log-uniform."""
    if generator.random() < 0.5:
        return ODD_CHANNELS[int(generator.integers(len(ODD_CHANNELS)))]
    return log_uniform(generator, 1, 2048)


if __name__ == "__main__":
    main()

"""Makes the suites of grouped layers of any group width: those of timm's networks that no other
family serves, and widths between them; and of layers with groups of 64 channels, for cuDNN's plans.

    python datasets/any_width_suites.py    suites/any_width/*.json, from networks.json

Thirty networks are trained on (`TRAINED`). All others are held out, with all their layers save
those that a network to train on has too; a held-out layer is in the training suite at no size of
the batch, in no direction and dtype.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
from make_holdout import _turns
from make_suite import BATCH_SHARES, BATCHES, NETWORKS, Layer, _affordable

from confpred.data.suites import Entry, Suite, write_suite
from confpred.errors import InvalidProblem
from confpred.families import anywidth
from confpred.problem.conv2d import Problem

SUITES = Path(__file__).parent / "suites" / "any_width"
#: Networks to train on: of each kind some, so that both suites have narrow and wide groups.
TRAINED = (
    *(f"cpubone_{name}" for name in ("b0_bfrobust", "b1_bfrobust", "b2_bfrobust", "nano", "s0")),
    *("dm_nfnet_f0", "dm_nfnet_f3", "nfnet_f0", "nfnet_f2", "nfnet_f5"),
    *("dpn92", "legacy_senet154", "mobilenet_edgetpu_v2_l", "mobilenet_edgetpu_v2_s"),
    *(f"regnetx_{size}" for size in ("006", "032", "064", "080", "160")),
    *(f"regnety_{size}" for size in ("016", "080", "120", "320", "1280")),
    *("regnetv_064", "repvgg_b2g4", "visformer_small"),
    *("resnest14d", "resnest101e", "resnest50d_1s4x24d"),
)
#: Problems of each direction, of networks and of coverage; the forward has epilogues, too.
TRAINING = {"fprop": (180, 60), "dgrad": (130, 50), "wgrad": (130, 50)}
HOLDOUT = {"fprop": (60, 0), "dgrad": (45, 0), "wgrad": (45, 0)}
#: Problems of groups of 64 channels, in and out, and the networks that have none there: those that
#: a benchmark of networks has, or their sisters.
OF_64 = {"fprop": (110, 0), "dgrad": (50, 0), "wgrad": (50, 0)}
LEFT_OUT = ("eca_nfnet_l0", "nfnet_l0")
#: A network's layer is taken at inputs of other sizes, too: factors of its height and width.
FACTORS = (1.0, 1.0, 1.0, 0.57, 1.43)

#: Group widths of coverage, filters with stride and dilation, and output channels an input channel.
WIDTHS = (
    2, 3, 5, 6, 10, 12, 18, 20, 24, 28, 36, 40, 48, 60, 72, 80, 96, 112, 128, 144, 192, 256, 384,
)  # fmt: skip
FILTERS = (
    *((3, 1, 1),) * 4, *((3, 2, 1),) * 2, (1, 1, 1), (5, 1, 1), (5, 2, 1), (7, 1, 1), (3, 1, 2),
    (2, 2, 1),
)  # fmt: skip
MULTIPLIERS = (1, 1, 1, 1, 2, 3, 0.5)
SIDES = (7, 9, 14, 20, 28, 33, 40, 56)
MOST_CHANNELS = 2048

PLAIN_SHARE, DETERMINISTIC_SHARE = 0.5, 0.2
#: Dtypes and epilogues of layers that are not plain float16.
VARIANTS: Mapping[str, tuple[Layer, ...]] = {
    "fprop": (
        {"bias": True, "activation": "relu"},
        {"bias": True, "activation": "silu"},
        {"bias": True, "activation": "relu", "residual": True},
        {"bias": True},
        {"dtype": "bfloat16"},
    ),
    "dgrad": ({"dtype": "bfloat16"},),
    "wgrad": ({"bias": True}, {"dtype": "bfloat16"}),
}


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", default=SUITES, type=click.Path(path_type=Path), help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write training.json and holdout.json from networks.json."""
    for suite in (*suites(seed), suite_of_64(seed)):
        write_suite(suite, out / f"{suite.name.removeprefix('any-width-')}.json")
        names = {name for entry in suite.entries for name in entry.networks}
        click.echo(f"{suite.name}: {len(suite.entries)} problems of {len(names)} networks")


def suites(seed: int) -> tuple[Suite, Suite]:
    """Return the training suite and the one of the networks that are held out."""
    trained, held, never = split(layers_of_networks(), TRAINED)
    return (
        Suite("any-width-training", _entries(trained, TRAINING, never, FACTORS, [seed, 0])),
        Suite("any-width-holdout", _entries(held, HOLDOUT, set(), (1.0,), [seed, 1])),
    )


def suite_of_64(seed: int) -> Suite:
    """Return a suite to train on of layers with groups of 64 channels, in and out."""
    layers = layers_of_networks(lambda p: p.groups > 1 and {p.c, p.k} == {64 * p.groups})
    never = {layer for name in LEFT_OUT for layer in layers.pop(name)}
    return Suite("any-width-64", _entries(layers, OF_64, never, FACTORS, [seed, 4]))


def split(
    layers: Mapping[str, list[Problem]], names: Collection[str]
) -> tuple[dict[str, list[Problem]], dict[str, list[Problem]], set[Problem]]:
    """Return the layers of the networks in `names`, those of the others that these lack, and the
    latter as a set."""
    trained = {name: layers[name] for name in names}
    shapes = {layer for own in trained.values() for layer in own}
    apart = {
        name: [layer for layer in own if layer not in shapes]
        for name, own in layers.items()
        if name not in trained
    }
    held = {name: own for name, own in apart.items() if own}
    return trained, held, {layer for own in held.values() for layer in own}


def layers_of_networks(
    serves: Callable[[Problem], bool] = anywidth.handles,
) -> dict[str, list[Problem]]:
    """Return the layers of each network that the families of any width, or what `serves` says,
    serve, at a batch of 1."""
    found: dict[str, list[Problem]] = defaultdict(list)
    for name, layers in json.loads(NETWORKS.read_text())["networks"].items():
        for fields in layers:
            layer = Problem.from_json({k: v for k, v in fields.items() if k != "count"} | {"n": 1})
            if serves(layer):
                found[name].append(layer)
    return dict(found)


def _entries(
    networks: Mapping[str, Sequence[Problem]],
    counts: Mapping[str, tuple[int, int]],
    never: Collection[Problem],
    factors: Sequence[float],
    seed: Sequence[int],
) -> tuple[Entry, ...]:
    """Return as many problems of each direction as `counts` says, all of them different and none of
    a layer that is `never` to be used."""
    names: dict[Problem, list[str]] = defaultdict(list)
    for name, layers in networks.items():
        for layer in layers:
            names[layer].append(name)
    found: dict[Problem, Entry] = {}
    for index, (direction, (of_networks, of_coverage)) in enumerate(counts.items()):
        generator = np.random.default_rng([*seed, index])
        for layers, count in (
            (_turns(networks, generator), of_networks),
            (_coverage(generator), of_coverage),
        ):
            end = len(found) + count
            while len(found) < end:
                layer = next(layers)
                problem = _variant(layer, direction, factors, generator)
                if problem and problem.layer() not in never and problem not in found:
                    found[problem] = Entry(problem, tuple(names.get(layer, ())))
    return tuple(found.values())


def _coverage(generator: np.random.Generator) -> Iterator[Problem]:
    """Yield endlessly layers of no network that the families serve."""
    while True:
        width = int(generator.choice(WIDTHS))
        depth = max(1, int(width * generator.choice(MULTIPLIERS)))
        groups = int(generator.integers(2, max(3, MOST_CHANNELS // max(width, depth) + 1)))
        r, stride, dilation = FILTERS[generator.integers(len(FILTERS))]
        side, padding = int(generator.choice(SIDES)), dilation * (r // 2)
        sizes = {"n": 1, "c": width * groups, "k": depth * groups, "h": side, "w": side}
        steps = {"stride": stride, "dilation": dilation, "padding": padding}
        layer = Problem.from_json({**sizes, **steps, "r": r, "s": r, "groups": groups})
        if anywidth.handles(layer):
            yield layer


def _variant(
    layer: Problem, direction: str, factors: Sequence[float], generator: np.random.Generator
) -> Problem | None:
    """Return `layer` at a batch and a size of its image, in a direction, plain or with a variant;
    None where that is no layer, or takes too long to measure."""
    factor, menu = float(generator.choice(factors)), VARIANTS[direction]
    fields = layer.to_json() | {"direction": direction}
    fields |= {"h": round(layer.h * factor), "w": round(layer.w * factor)}
    fields["n"] = int(generator.choice(BATCHES, p=BATCH_SHARES))
    if generator.random() >= PLAIN_SHARE:
        fields |= menu[generator.integers(len(menu))]
    if direction == "wgrad" and generator.random() < DETERMINISTIC_SHARE:
        fields["deterministic"] = True
    try:
        problem = Problem.from_json(fields)
    except InvalidProblem:  # a filter larger than the image
        return None
    return problem if _affordable(problem) else None


if __name__ == "__main__":
    main()

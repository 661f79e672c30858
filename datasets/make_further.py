"""Makes the third draw of problems to train on: as many again as the first two have together, and
a fourth of those depthwise layers of which the first three have few.

    python datasets/make_further.py    suites/further/*.json, from networks.json

More is drawn where choices for networks that training has not seen are worst (`COUNTS`). Only the
filters, strides, group widths, dtypes and epilogues of the hold-out are drawn, so that its compiled
kernels serve here as well (`make_holdout.VARIANTS`). No network and no layer of the hold-out is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import make_holdout
import make_suite
import numpy as np
from make_suite import Layer

from confpred.data.suites import Entry, Suite, read_suite, write_suite
from confpred.errors import InvalidProblem
from confpred.problem.conv2d import DIRECTIONS, Problem

HERE = Path(__file__).parent
SUITES = HERE / "suites" / "further"

#: Problems of a direction by kind and by where they come from; of ``wgrad`` so many times as many.
COUNTS = {
    "depthwise": {"network": 120, "resized": 120, "strided": 40, "small": 70, "odd": 110},
    "grouped": {"network": 100, "resized": 100, "strided": 40, "small": 70, "odd": 90},
}
TIMES = {"fprop": 1.0, "dgrad": 1.0, "wgrad": 1.28}
#: The fourth draw: depthwise problems of a direction that have these fields in common, by suite and
#: by where they come from.
LACKING: Mapping[str, tuple[Layer, tuple[str, ...], Mapping[str, int]]] = {
    "float32": ({"dtype": "float32"}, DIRECTIONS, {"network": 40, "resized": 30, "odd": 30}),
    "banded_wgrad": ({"dtype": "float16"}, ("wgrad",), {"network": 150, "resized": 150, "odd": 60}),
}
#: Batches that are no power of two, and the share of problems that have one.
ODD_BATCHES = (3, 5, 6, 7, 9, 10, 12, 15, 20, 24, 25, 30, 36, 48, 50, 60, 72, 96, 100, 160, 192)
ODD_SHARE = 0.4
#: Heights and widths of small images.
SMALL = (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
#: Factors by which a network's image is larger or smaller than its own, beside whole sevenths.
FACTORS = (0.57, 0.71, 0.86, 1.07, 1.14, 1.29, 1.43, 1.61, 1.71, 2.29)


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", type=click.Path(path_type=Path), default=SUITES, help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write suites/further/*.json from networks.json."""
    users = users_of_layers()
    taken = {e.problem for path in make_holdout.TRAINING for e in read_suite(path).entries}
    held_out = held_out_layers()
    for direction in DIRECTIONS:
        entries = further_entries(users, direction, seed, taken, held_out)
        write_suite(Suite(f"further-{direction}", entries), out / f"{direction}.json")
        kernels = {make_suite._compiled_in(entry.problem) for entry in entries}
        click.echo(f"{direction}: {len(entries)} problems, {len(kernels)} kernel variants")
        taken |= {entry.problem for entry in entries}
    for name in LACKING:
        entries = lacking_entries(users, name, seed, taken, held_out)
        write_suite(Suite(f"further-{name}", entries), out / f"{name}.json")
        click.echo(f"{name}: {len(entries)} problems")


def held_out_layers() -> frozenset[Problem]:
    """Return every layer that the hold-out has."""
    suites = (read_suite(make_holdout.SUITES / f"{d}.json") for d in DIRECTIONS)
    return frozenset(entry.problem.layer() for suite in suites for entry in suite.entries)


def users_of_layers() -> dict[Problem, tuple[str, ...]]:
    """Return the networks of each layer in the menu, save the networks that are held out."""
    networks = json.loads(make_suite.NETWORKS.read_text())["networks"]
    shown = {
        name: {"layers": layers}
        for name, layers in networks.items()
        if name not in make_holdout.TIMM
    }
    return make_holdout.users_of_layers(shown, frozenset())


def further_entries(
    users: Mapping[Problem, tuple[str, ...]],
    direction: str,
    seed: int,
    taken: set[Problem],
    held_out: frozenset[Problem],
) -> tuple[Entry, ...]:
    """Return the problems of one direction, none of them `taken`, nor of a layer that is
    `held_out`."""
    generator = np.random.default_rng([seed, 3, DIRECTIONS.index(direction)])
    found: dict[Problem, Entry] = {}
    for kind, counts in COUNTS.items():
        for origin, count in counts.items():
            target = len(found) + round(count * TIMES[direction])
            for layer, networks in _proposals(origin, kind, users, generator):
                entry = _entry(layer, networks, direction, generator)
                if entry is None or entry.problem in taken or entry.problem in found:
                    continue
                if entry.problem.layer() not in held_out:
                    found[entry.problem] = entry
                if len(found) == target:
                    break
    return tuple(found.values())


def lacking_entries(
    users: Mapping[Problem, tuple[str, ...]],
    name: str,
    seed: int,
    taken: set[Problem],
    held_out: frozenset[Problem],
) -> tuple[Entry, ...]:
    """Return the problems of one suite of ``LACKING``, as `further_entries` does."""
    common, directions, counts = LACKING[name]
    generator = np.random.default_rng([seed, 4, list(LACKING).index(name)])
    found: dict[Problem, Entry] = {}
    for direction in directions:
        for origin, count in counts.items():
            target = len(found) + count
            for layer, networks in _proposals(origin, "depthwise", users, generator):
                entry = _entry(layer, networks, direction, generator, common)
                if entry is None or entry.problem in taken or entry.problem in found:
                    continue
                if name == "banded_wgrad" and entry.problem.stride != (1, 1):
                    continue  # the family has no strided ones
                if entry.problem.layer() not in held_out:
                    found[entry.problem] = entry
                if len(found) == target:
                    break
    return tuple(found.values())


def _entry(
    fields: Layer,
    networks: tuple[str, ...],
    direction: str,
    generator: np.random.Generator,
    common: Layer | None = None,
) -> Entry | None:
    """Return the layer of `fields` at a batch, and with the fields `common`, or a dtype and
    epilogue of the hold-out; None where it is no good."""
    try:
        layer = Problem.from_json(fields | {"n": 1})
        if make_holdout._key(layer) not in make_holdout.VARIANTS:
            return None
        variant = common or make_holdout._variant(layer, direction, generator)
        batch = {"n": _batch(generator), "direction": direction}
        problem = Problem.from_json(layer.to_json() | batch | variant)
    except InvalidProblem:
        return None
    small = not networks and make_suite.tensor_bytes(problem) < make_suite.MIN_BYTES
    good = make_suite.in_scope(problem) and make_suite._affordable(problem) and not small
    return Entry(problem, networks) if good else None


def _proposals(
    origin: str,
    kind: str,
    users: Mapping[Problem, tuple[str, ...]],
    generator: np.random.Generator,
) -> Iterator[tuple[Layer, tuple[str, ...]]]:
    """Yield an endless stream of layers and their networks; some are impossible."""
    layers = [layer for layer in users if make_suite._kind(layer) == kind]
    shares = np.sqrt([len(users[layer]) for layer in layers])
    while origin in ("network", "resized"):
        layer = layers[generator.choice(len(layers), p=shares / shares.sum())]
        fields = layer.to_json()
        if origin == "resized":
            factor = generator.choice(FACTORS)
            fields |= {side: max(4, round(fields[side] * factor)) for side in "hw"}
        yield fields, users[layer]
    while True:
        yield _unknown(origin, kind, generator), ()


def _unknown(origin: str, kind: str, generator: np.random.Generator) -> Layer:
    """Return a layer of no network, of a sort that is hard to choose for."""
    menu = [key for key in make_holdout.VARIANTS if (key[0] == 1) == (kind == "depthwise")]
    if origin == "strided":
        menu = [key for key in menu if key[2] == 2]
    width, window, stride = menu[generator.integers(len(menu))]
    step = max(width, 8)
    c = step * make_suite.log_uniform(generator, 1, 2048 // step)
    if origin == "odd" and c // step % 2 == 0:
        c += step  # an odd number of eights, or of groups
    h, w = (make_suite.log_uniform(generator, 7, 160) for _ in range(2))
    if origin == "small":
        h, w = (int(generator.choice(SMALL)) for _ in range(2))
    if generator.random() < 0.7:
        w = h
    fields = make_suite._square(1, c, h, width, window, window, stride)
    return fields | {"w": w}


def _batch(generator: np.random.Generator) -> int:
    if generator.random() < ODD_SHARE:
        return int(generator.choice(ODD_BATCHES))
    return make_suite._batch(generator)


if __name__ == "__main__":
    main()

"""Makes the hold-out: whole networks that no training suite has, to judge models by.

    python datasets/make_holdout.py extract    holdout_networks.json; needs timm and torchvision
    python datasets/make_holdout.py build      suites/holdout/*.json, from holdout_networks.json

Every legal config of every problem is to be measured, so that regret is against what is really the
fastest. So there is a short menu of what needs kernels of its own (`VARIANTS`), and a suite for
each direction, which is measured in one command of ten minutes on a GPU.

No problem shares its layer with a problem to train on, in whatever direction, dtype or batch. The
networks of ``TIMM`` and ``TORCHVISION`` have no layer at all in the training suites, those of
``ELSEWHERE`` (backbones of detectors and segmenters, which are fed other images) are known to
training at another size, and bear that size in their name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import make_suite
import numpy as np
from make_suite import _BFLOAT16, _BIAS, _FLOAT32, _RELU, _SILU, Layer

from confpred.data.suites import Entry, Suite, read_suite, write_suite
from confpred.errors import InvalidProblem
from confpred.files import read_json
from confpred.problem.conv2d import DIRECTIONS, Problem

HERE = Path(__file__).parent
NETWORKS = HERE / "holdout_networks.json"
FORMAT = "confpred-holdout-networks/1"
SUITES = HERE / "suites" / "holdout"
#: Suites to train on: the hold-out shares no layer with them.
TRAINING = tuple(HERE / "suites" / f"{name}.json" for name in (*DIRECTIONS, "smoke"))

#: Networks of timm that no training suite has, with the height and width of their input.
TIMM: Mapping[str, tuple[int, int]] = {
    "coat_lite_medium_384": (384, 384),
    "coatnet_rmlp_2_rw_384": (384, 384),
    "convmixer_768_32": (224, 224),
    "csatv2_21m": (512, 512),
    "efficientnet_em": (240, 240),
    "efficientnetv2_rw_m": (320, 320),
    "efficientvit_l3": (224, 224),
    "gernet_l": (256, 256),
    "hgnet_small": (224, 224),
    "lowformer_b2": (224, 224),
    "tf_efficientnet_b8": (600, 600),
    "vitamin_large2_336": (336, 336),
    "vitamin_xlarge_384": (384, 384),
}
#: EfficientNets with groups of 16 channels in place of depthwise layers (Masters et al., "Making
#: EfficientNet More Efficient", 2021): width, depth and input of timm's builder.
GROUPED_EFFICIENTNETS: Mapping[str, tuple[float, float, int]] = {
    "efficientnet_b1_g16": (1.0, 1.1, 240),
    "efficientnet_b2_g16": (1.1, 1.2, 260),
    "efficientnet_b4_g16": (1.4, 1.8, 380),
}
#: Networks of torchvision that timm does not have.
TORCHVISION: Mapping[str, tuple[int, int]] = {
    "shufflenet_v2_x1_5": (232, 232),
    "shufflenet_v2_x2_0": (250, 250),
}
#: Networks of timm at the sizes of the images that other tasks feed them.
ELSEWHERE: Mapping[str, tuple[tuple[int, int], ...]] = {
    "convnext_tiny": ((480, 672),),
    "cspresnext50": ((608, 608),),
    "mobilenetv2_100": ((513, 513), (300, 300)),
    "mobilenetv3_large_100": ((520, 520), (250, 190)),
    "efficientnet_b3": ((600, 904),),
    "regnetx_004": ((300, 300),),
    "regnetx_008": ((360, 640),),
    "regnety_004": ((200, 200),),
    "regnetz_040": ((350, 350),),
    "repvgg_b1g4": ((330, 330),),
    "resnext50_32x4d": ((250, 250), (800, 1088)),
    "resnext101_32x8d": ((331, 331), (800, 1216)),
    "resnext101_64x4d": ((272, 480),),
    "seresnext26d_32x4d": ((270, 270),),
}

#: Measured: (group width, filter size, stride) -> what a layer of the kind may be other than
#: plain float16, by direction. Each entry is a table of kernels.
VARIANTS: Mapping[tuple[int, int, int], Mapping[str, tuple[Layer, ...]]] = {
    (1, 3, 1): {
        "fprop": (_SILU, _BFLOAT16, _FLOAT32),
        **dict.fromkeys(("dgrad", "wgrad"), (_BFLOAT16, _FLOAT32)),
    },
    (1, 3, 2): {},
    (1, 5, 1): {},
    (1, 5, 2): {},
    (1, 7, 1): {"fprop": (_BIAS,), "dgrad": (_BFLOAT16,), "wgrad": (_BIAS,)},
    (4, 3, 1): {},
    (8, 3, 1): {"fprop": (_RELU,)},
    (8, 3, 2): {},
    (16, 3, 1): {"wgrad": (_BFLOAT16,)},
    (16, 3, 2): {"dgrad": (_BFLOAT16,)},
    (16, 5, 1): {},
    (32, 3, 1): {"fprop": (_BFLOAT16,)},
    (32, 3, 2): {},
    (64, 3, 1): {},
}
PLAIN_SHARE = 0.6
DETERMINISTIC_SHARE = 0.2
#: Problems of each direction, by kind; filter gradients have more configs, and slower ones.
COUNTS = {
    "fprop": {"depthwise": 62, "grouped": 48},
    "dgrad": {"depthwise": 62, "grouped": 48},
    "wgrad": {"depthwise": 54, "grouped": 42},
}
#: Batches, of which half are no power of two.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 3, 5, 6, 7, 12, 20, 24, 25, 33, 48, 50, 63, 96, 100)
ODD_SHARE = 0.5


@click.group()
def main() -> None:
    """Make the hold-out."""


@main.command()
def extract() -> None:
    """Write holdout_networks.json."""
    import timm
    import torchvision

    networks: dict[str, Any] = {}
    for name, size, make in _models():
        layers = make_suite.grouped_layers(make, size)
        networks[name] = {"input": list(size), "layers": layers}
        click.echo(f"{name}: {len(layers)} grouped layers")
    versions = {"timm": timm.__version__, "torchvision": torchvision.__version__}
    make_suite.write_networks(NETWORKS, {"format": FORMAT, **versions}, networks)


def _models() -> Iterator[tuple[str, tuple[int, int], Callable[[], Any]]]:
    """Yield name, size of the input, and how the network is made."""
    import timm
    import torchvision
    from timm.models import efficientnet

    def of_timm(name: str, size: tuple[int, int]) -> Any:
        try:
            return timm.create_model(name, img_size=size)
        except TypeError:  # most networks take any size
            return timm.create_model(name)

    for name, size in TIMM.items():
        yield name, size, lambda name=name, size=size: of_timm(name, size)
    for name, (width, depth, side) in GROUPED_EFFICIENTNETS.items():
        groups = {"group_size": 16, "channel_divisor": 16}
        scaled = {"channel_multiplier": width, "depth_multiplier": depth}
        build = partial(efficientnet._gen_efficientnet, "efficientnet_b0", **groups, **scaled)
        yield name, (side, side), build
    for name, size in TORCHVISION.items():
        yield name, size, lambda name=name: torchvision.models.get_model(name)
    for name, sizes in ELSEWHERE.items():
        for h, w in sizes:
            yield f"{name}@{h}x{w}", (h, w), lambda name=name: timm.create_model(name)


@main.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", type=click.Path(path_type=Path), default=SUITES, help="Folder to write to.")
def build(seed: int, out: Path) -> None:
    """Write suites/holdout/*.json from holdout_networks.json."""
    networks = read_json(NETWORKS, "layers of the hold-out", FORMAT)["networks"]
    users = users_of_layers(networks, trained_layers())
    for direction in DIRECTIONS:
        entries = holdout_entries(users, direction, seed)
        write_suite(Suite(f"holdout-{direction}", entries), out / f"{direction}.json")
        names = {name for entry in entries for name in entry.networks}
        kernels = {make_suite._compiled_in(entry.problem) for entry in entries}
        click.echo(
            f"{direction}: {len(entries)} problems of {len(names)} networks, "
            f"{len(kernels)} kernel variants"
        )


def trained_layers() -> frozenset[Problem]:
    """Return every layer that a suite to train on has."""
    return frozenset(
        entry.problem.layer() for path in TRAINING for entry in read_suite(path).entries
    )


def users_of_layers(
    networks: Mapping[str, Mapping[str, Any]], trained: frozenset[Problem]
) -> dict[Problem, tuple[str, ...]]:
    """Return the networks of each layer that is in the menu and not `trained`."""
    users: dict[Problem, tuple[str, ...]] = {}
    for name, network in networks.items():
        for fields in network["layers"]:
            layer = Problem.from_json({k: v for k, v in fields.items() if k != "count"} | {"n": 1})
            ours = make_suite.in_scope(layer) and layer.k == layer.c and _key(layer) in VARIANTS
            if ours and layer not in trained:
                users[layer] = (*users.get(layer, ()), name)
    return users


def _key(p: Problem) -> tuple[int, int, int] | None:
    square = p.r == p.s and p.stride[0] == p.stride[1] and p.dilation == (1, 1)
    return (p.group_width, p.r, p.stride[0]) if square else None


def holdout_entries(
    users: Mapping[Problem, Sequence[str]], direction: str, seed: int
) -> tuple[Entry, ...]:
    """Return the problems of one direction: turn by turn a layer of each network, at a batch and of
    a dtype and epilogue of its own."""
    generator = np.random.default_rng([seed, 2, DIRECTIONS.index(direction)])
    found: dict[Problem, Entry] = {}
    for kind, count in COUNTS[direction].items():
        layers: dict[str, list[Problem]] = defaultdict(list)
        for layer, names in users.items():
            for name in names if make_suite._kind(layer) == kind else ():
                layers[name].append(layer)
        turns, target = _turns(layers, generator), len(found) + count
        while len(found) < target:
            layer = next(turns)
            fields = layer.to_json() | {"n": _batch(generator), "direction": direction}
            fields |= _variant(layer, direction, generator)
            try:
                problem = Problem.from_json(fields)
            except InvalidProblem:
                continue
            if problem not in found and make_suite._affordable(problem):
                found[problem] = Entry(problem, tuple(users[layer]))
    return tuple(found.values())


def _turns(
    layers: Mapping[str, Sequence[Problem]], generator: np.random.Generator
) -> Iterator[Problem]:
    """Yield endlessly a layer of one network after the other, in random order."""
    left: dict[str, list[Problem]] = {name: [] for name in layers}
    while True:
        for name in layers:
            if not left[name]:
                order = generator.permutation(len(layers[name]))
                left[name] = [layers[name][i] for i in order]
            yield left[name].pop()


def _batch(generator: np.random.Generator) -> int:
    odd = generator.random() < ODD_SHARE
    return int(generator.choice([n for n in BATCHES if bool(n & (n - 1)) == odd]))


def _variant(layer: Problem, direction: str, generator: np.random.Generator) -> Layer:
    menu = VARIANTS[_key(layer)].get(direction, ())  # type: ignore[index]  # no others are drawn
    plain = not menu or generator.random() < PLAIN_SHARE
    chosen: Layer = {} if plain else dict(menu[generator.integers(len(menu))])
    if direction == "wgrad" and generator.random() < DETERMINISTIC_SHARE:
        chosen["deterministic"] = True
    return chosen


if __name__ == "__main__":
    main()

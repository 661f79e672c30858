"""Makes the problem suites: real networks' layers, and coverage of the sizes between them.

    python datasets/make_suite.py extract    networks.json, from timm's models; needs timm, no GPU
    python datasets/make_suite.py build      suites/*.json, from networks.json

``networks.json`` maps each network that has grouped or depthwise convolutions to its distinct
layers of that kind at the network's own input size: the fields of a problem without the batch, and
``count``, how often the layer occurs.

Sampling is mostly compiling: every filter, stride, dilation, group width, dtype and epilogue needs
kernels of its own, as many as tiles are measured. So these come from a limited menu, while sizes
are drawn freely. Each suite is made in two draws: the first stays as it was measured, and the
second takes what needs kernels from the first.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import click
import numpy as np

from confpred.data.suites import Entry, Suite, write_suite
from confpred.errors import InvalidProblem
from confpred.files import write_whole
from confpred.problem.conv2d import DIRECTIONS, Problem
from confpred.problem.device import get_device

Layer = dict[str, Any]

HERE = Path(__file__).parent
NETWORKS = HERE / "networks.json"
FORMAT = "confpred-networks/1"
MODEL_SECONDS = 30

#: Problems of one direction, by kind of layer and by where they come from: of the first draw, and
#: of the second, which is for sizes that the first has few of.
FIRST = {
    "depthwise": {"network": 150, "typical": 60, "coverage": 50},
    "grouped": {"network": 110, "typical": 55, "coverage": 45},
}
SECOND = {
    "depthwise": {"network": 90, "resized": 70, "thin": 100},
    "grouped": {"network": 55, "resized": 55, "thin": 100},
}
GROUP_WIDTHS = (4, 8, 16, 32, 64)
#: A layer of the networks is left out if fewer distinct layers than this share its kernels.
MIN_LAYERS = 8
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCH_SHARES = (0.08, 0.04, 0.06, 0.1, 0.1, 0.16, 0.18, 0.18, 0.1)
#: Heights of typical layers, and their (filter size, stride), about as often as networks have them.
SIZES = (7, 8, 10, 12, 14, 15, 16, 18, 20, 24, 28, 30, 32, 36, 40, 44, 48, 56, 64, 72, 80, 96, 112)
TYPICAL = {
    "depthwise": ((3, 1),) * 8 + ((3, 2),) * 4 + ((5, 1),) * 4 + ((5, 2),) * 2 + ((7, 1),) * 4,
    "grouped": ((3, 1),) * 10 + ((3, 2),) * 6,
}
#: (multiplier, group width, r, s, stride, dilation) of coverage layers.
COVERAGE = {
    "depthwise": (
        *((1, 1, r, r, 1, 1) for r in (1, 2, 3, 4, 5, 7, 9, 11)),
        *((1, 1, r, r, 2, 1) for r in (3, 5, 6, 7)),
        *((1, 1, r, s, 1, 1) for r, s in ((1, 5), (5, 1), (1, 11), (11, 1), (3, 5))),
        *((1, 1, r, r, 1, 2) for r in (3, 5, 7)),
        (1, 1, 3, 3, 2, 2), (2, 1, 3, 3, 2, 1), (2, 1, 7, 7, 2, 1), (4, 1, 5, 5, 1, 1),
    ),
    "grouped": (
        *((1, width, 3, 3, stride, 1) for width in GROUP_WIDTHS for stride in (1, 2)),
        *((1, width, 5, 5, 1, 1) for width in (8, 16, 32)),
        (1, 8, 5, 5, 2, 1), (1, 4, 7, 7, 1, 1), (1, 16, 7, 7, 1, 1), (1, 16, 6, 6, 1, 1),
        (1, 4, 4, 4, 1, 1), (1, 16, 1, 1, 1, 1), (1, 64, 1, 1, 1, 1), (1, 32, 2, 2, 2, 1),
        (1, 8, 1, 7, 1, 1), (1, 16, 7, 1, 1, 1),
        *((1, width, 3, 3, 1, 2) for width in (8, 16, 64)),
        (1, 32, 3, 3, 2, 2),
    ),
}  # fmt: skip

#: (group width, r, s, stride, heights) of layers that the first draw has few of, and that networks
#: to come may well have.
THIN = {
    "depthwise": (
        *((1, r, r, 1, sizes) for r in (5, 7) for sizes in ((7,), (14,))),
        *((1, r, r, 2, (7, 14)) for r in (5, 7)),
        *((1, r, r, 2, SIZES) for r in (3, 5, 7)),
        *((1, r, s, 1, SIZES) for r, s in ((11, 11), (1, 11), (11, 1))),
    ),
    "grouped": tuple((width, 3, 3, stride, SIZES) for width in (32, 64) for stride in (1, 2)),
}
#: Heights of a network's layers at an input of 224, and what 7 becomes at inputs of 128 to 384.
HEIGHTS = (7, 14, 28, 56, 112)
SEVENTHS = (4, 5, 6, 8, 9, 10, 12)

_BFLOAT16, _FLOAT32, _BIAS = {"dtype": "bfloat16"}, {"dtype": "float32"}, {"bias": True}
_RELU, _RELU6, _SILU, _GELU, _HARDSWISH = (
    _BIAS | {"activation": name} for name in ("relu", "relu6", "silu", "gelu", "hardswish")
)
#: Variants of a layer of filter (r, s) and a stride, other than plain float16, by kind and
#: direction: the epilogues that networks give it, and the other dtypes.
VARIANTS: Mapping[str, Mapping[str, Mapping[tuple[int, int, int], tuple[Layer, ...]]]] = {
    "depthwise": {
        "fprop": {
            (3, 3, 1): (_SILU, _RELU6, _HARDSWISH, _BIAS | {"residual": True}, _BFLOAT16, _FLOAT32),
            (3, 3, 2): (_SILU, _RELU6, _BFLOAT16),
            (5, 5, 1): (_SILU, _HARDSWISH, _BFLOAT16),
            (5, 5, 2): (_HARDSWISH,),
            (7, 7, 1): (_BIAS, _GELU, _BFLOAT16, _FLOAT32),
        },
        "dgrad": {
            (3, 3, 1): (_BFLOAT16, _FLOAT32),
            (3, 3, 2): (_BFLOAT16,),
            (5, 5, 1): (_BFLOAT16,),
            (7, 7, 1): (_BFLOAT16, _FLOAT32),
        },
        "wgrad": {
            (3, 3, 1): (_BIAS, _BFLOAT16, _FLOAT32),
            (3, 3, 2): (_BFLOAT16,),
            (5, 5, 1): (_BFLOAT16,),
            (7, 7, 1): (_BIAS, _BFLOAT16, _FLOAT32),
        },
    },
    "grouped": {
        "fprop": {
            (3, 3, 1): (_RELU, _SILU, _RELU | _BFLOAT16 | {"residual": True}),
            (3, 3, 2): (_RELU, _BFLOAT16),
        },
        "dgrad": {(3, 3, 1): (_BFLOAT16,), (3, 3, 2): (_BFLOAT16,)},
        "wgrad": {(3, 3, 1): (_BIAS, _BFLOAT16), (3, 3, 2): (_BFLOAT16,)},
    },
}
PLAIN_SHARES = {"fprop": 0.6, "dgrad": 0.75, "wgrad": 0.7}
DETERMINISTIC_SHARE = 0.2

#: Most bytes of a problem: what a sampler can afford for each of hundreds of configs.
MAX_BYTES = 2**30
MAX_SECONDS = 0.5e-3
#: Least bytes of a problem of no network: below, every config takes the time of an empty launch.
MIN_BYTES = 2**18


@click.group()
def main() -> None:
    """Make the problem suites."""


@main.command()
@click.option("--minutes", default=30.0, show_default=True, help="Stop looking after this long.")
def extract(minutes: float) -> None:
    """Write networks.json from every model that timm can build."""
    import timm

    end = time.monotonic() + 60 * minutes
    networks: dict[str, list[Layer]] = {}
    names = timm.list_models(exclude_filters="test_*")  # timm's own toys
    for index, name in enumerate(names):
        if time.monotonic() > end:
            click.echo(f"time is up: {len(names) - index} models were not looked at", err=True)
            break
        try:
            layers = _with_time_limit(name)
        except Exception as error:  # any of a thousand models may fail; the others still count
            click.echo(f"skipped {name}: {type(error).__name__}: {error}"[:200], err=True)
            continue
        if layers:
            networks[name] = layers
            click.echo(f"{name}: {len(layers)} grouped layers")
    write_networks(NETWORKS, {"format": FORMAT, "timm": timm.__version__}, networks)
    click.echo(f"{len(networks)} networks in {NETWORKS}")


def write_networks(path: Path, head: Mapping[str, str], networks: Mapping[str, Any]) -> None:
    """Write `networks` as JSON, one a line, so that versions compare well."""
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in networks.items())
    text = f'{json.dumps(head)[:-1]}, "networks": {{\n{lines}\n}}}}\n'
    write_whole(path, lambda file: file.write(text.encode()))


def _with_time_limit(name: str) -> list[Layer]:
    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {MODEL_SECONDS} s")

    import timm

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(MODEL_SECONDS)
    try:
        return grouped_layers(lambda: timm.create_model(name))
    finally:
        signal.alarm(0)


def grouped_layers(make: Callable[[], Any], size: tuple[int, int] | None = None) -> list[Layer]:
    """Return the distinct layers of several groups that a forward pass of a network computes, with
    their ``count``, for an image of `size` pixels or of the network's own."""
    import torch

    found: Counter[str] = Counter()

    def note(module: torch.nn.Conv2d, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if layer := _layer(module, inputs[0].shape, out.shape):
            found[json.dumps(layer)] += 1

    with torch.device("meta"), torch.no_grad():
        model = make().eval()
        convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
        if not any(m.groups > 1 for m in convolutions):
            return []
        for module in convolutions:
            module.register_forward_hook(note)
        model(torch.empty(1, *(model.default_cfg["input_size"] if size is None else (3, *size))))
    return [json.loads(layer) | {"count": count} for layer, count in found.items()]


def _layer(module: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Layer | None:
    """Return a problem's fields without the batch; None unless the module has several groups and
    the same padding on opposite sides.

    A network may pad outside of the convolution itself ("same" padding), so the padding is what
    the sizes say where the module's own does not explain them.
    """
    if module.groups == 1:
        return None
    padding = []
    for axis in (0, 1):
        size, out = inputs[2 + axis], outputs[2 + axis]
        window = module.dilation[axis] * (module.kernel_size[axis] - 1) + 1
        own = module.padding[axis] if not isinstance(module.padding, str) else 0
        if (size + 2 * own - window) // module.stride[axis] + 1 != out:
            both = (out - 1) * module.stride[axis] + window - size
            if both < 0 or both % 2:
                return None
            own = both // 2
        padding.append(own)
    names = ("c", "h", "w", "k", "r", "s")
    fields = dict(zip(names, (*inputs[1:], outputs[1], *module.kernel_size), strict=True))
    pairs = {"stride": module.stride, "padding": padding, "dilation": module.dilation}
    fields |= {name: a if a == b else [a, b] for name, (a, b) in pairs.items()}
    return fields | {"groups": module.groups}


@main.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
def build(seed: int) -> None:
    """Write suites/*.json from networks.json."""
    content = json.loads(NETWORKS.read_text())
    if content.get("format") != FORMAT:
        raise click.ClickException(f'{NETWORKS} lacks "format": "{FORMAT}"')
    users = users_of_layers(content["networks"])
    suites = [Suite("smoke", smoke_entries())]
    suites += [Suite(d, training_entries(users, d, seed)) for d in DIRECTIONS]
    for suite in suites:
        write_suite(suite, HERE / "suites" / f"{suite.name}.json")
        kernels = {_compiled_in(entry.problem) for entry in suite.entries}
        click.echo(f"{suite.name}: {len(suite.entries)} problems, {len(kernels)} kernel variants")


def users_of_layers(networks: Mapping[str, list[Layer]]) -> dict[str, list[str]]:
    """Return the networks of each layer, which is the text of its JSON, in our scope and not too
    rare."""
    users: dict[str, list[str]] = defaultdict(list)
    variant: dict[str, tuple[Any, ...]] = {}
    for name, layers in networks.items():
        for layer in layers:
            fields = {k: v for k, v in layer.items() if k != "count"}
            problem = Problem.from_json(fields | {"n": 1})
            if in_scope(problem):
                text = json.dumps(fields)
                users[text].append(name)
                variant[text] = _compiled_in(problem)
    common = Counter(variant.values())
    return {text: names for text, names in users.items() if common[variant[text]] >= MIN_LAYERS}


def training_entries(
    users: Mapping[str, list[str]], direction: str, seed: int
) -> tuple[Entry, ...]:
    """Return the problems of `FIRST`, then those of `SECOND`, all of them different."""
    index = DIRECTIONS.index(direction)
    generator = np.random.default_rng([seed, index])
    found: dict[Problem, Entry] = {}
    for kind, counts in FIRST.items():
        _draw(found, counts, users, kind, direction, generator)
    variants = {_compiled_in(problem) for problem in found}
    for menu in THIN.values():
        for width, r, s, stride, _ in menu:
            fields = _square(1, 8 * width, 28, width, r, s, stride)
            variants.add(_compiled_in(Problem.from_json(fields | {"direction": direction})))
    generator = np.random.default_rng([seed, index, 1])
    for kind, counts in SECOND.items():
        _draw(found, counts, users, kind, direction, generator, variants)
    return tuple(found.values())


def _draw(
    found: dict[Problem, Entry],
    counts: Mapping[str, int],
    users: Mapping[str, list[str]],
    kind: str,
    direction: str,
    generator: np.random.Generator,
    variants: Collection[tuple[Any, ...]] | None = None,
) -> None:
    """Add `counts` problems, by where they come from, to `found`; None stands for any variant."""
    for origin, count in counts.items():
        for fields in _proposals(origin, kind, users, generator):
            networks = fields.pop("networks", ())
            fields |= {"direction": direction} | _variant(kind, direction, fields, generator)
            try:
                problem = Problem.from_json(fields)
            except InvalidProblem:  # a filter larger than the image
                continue
            small = not networks and tensor_bytes(problem) < MIN_BYTES
            if problem in found or small or not in_scope(problem) or not _affordable(problem):
                continue
            if variants is None or _compiled_in(problem) in variants:
                found[problem] = Entry(problem, tuple(networks))
                count -= 1
            if not count:
                break


def _proposals(
    origin: str, kind: str, users: Mapping[str, list[str]], generator: np.random.Generator
) -> Iterator[Layer]:
    """Yield an endless stream of fields of problems, all plain float16 and forward; some are
    impossible."""
    if origin in ("network", "resized"):
        layers = [
            text for text in users if _kind(Problem.from_json(json.loads(text) | {"n": 1})) == kind
        ]
        # A layer of many networks is met more often, but one of a single network teaches as much.
        shares = np.sqrt([len(users[text]) for text in layers])
        while True:
            text = str(generator.choice(layers, p=shares / shares.sum()))
            layer = json.loads(text) | {"n": _batch(generator), "networks": users[text]}
            if origin == "network":
                yield layer
            elif layer["h"] == layer["w"] and layer["h"] in HEIGHTS:
                size = layer["h"] // 7 * int(generator.choice(SEVENTHS))
                yield layer | {"h": size, "w": size}
    draw = {"typical": typical, "coverage": coverage, "thin": thin}[origin]
    while True:
        yield draw(kind, generator)


def typical(kind: str, generator: np.random.Generator) -> Layer:
    """Return a layer of no known network that looks as if it came from one: a future network may
    have it."""
    window, stride = (int(v) for v in generator.choice(TYPICAL[kind]))
    width = 1 if kind == "depthwise" else int(generator.choice(GROUP_WIDTHS))
    c = _channels(width, generator)
    size = int(generator.choice(SIZES))
    return _square(_batch(generator), c, size, width, window, window, stride)


def thin(kind: str, generator: np.random.Generator) -> Layer:
    """Return a layer of no known network, of a sort that the first draw has few of."""
    menu = THIN[kind]
    width, r, s, stride, sizes = menu[generator.integers(len(menu))]
    size = int(generator.choice(sizes))
    return _square(_batch(generator), _channels(width, generator), size, width, r, s, stride)


def _channels(width: int, generator: np.random.Generator) -> int:
    """Up to 2048; multiples of 8, as in all but a few networks."""
    step = max(width, 8)
    return step * log_uniform(generator, 1, 2048 // step)


def _square(n: int, c: int, size: int, width: int, r: int, s: int, stride: int) -> Layer:
    """Return the fields of a layer of as many filters as channels, padded by half its filter."""
    sizes = {"n": n, "c": c, "h": size, "w": size, "k": c, "r": r, "s": s}
    return sizes | {"stride": stride, "padding": [r // 2, s // 2], "groups": c // width}


def coverage(kind: str, generator: np.random.Generator) -> Layer:
    """Return a layer of no network: odd sizes, few and many channels, all kinds of filters."""
    multiplier, width, r, s, stride, dilation = (int(v) for v in generator.choice(COVERAGE[kind]))
    c = width * log_uniform(generator, 1, 4096 // width)
    h, w = log_uniform(generator, 4, 256), log_uniform(generator, 4, 256)
    if generator.random() < 0.5:
        w = h
    padding = [dilation * (r // 2), dilation * (s // 2)]
    if generator.random() < 0.3:
        padding = [int(generator.integers(0, size)) for size in (r, s)]
    layer = _square(log_uniform(generator, 1, 256), c, h, width, r, s, stride)
    return layer | {"w": w, "k": multiplier * c, "dilation": dilation, "padding": padding}


def smoke_entries() -> tuple[Entry, ...]:
    """Return a few small layers, measured in seconds: one of each group width, filter and
    epilogue."""
    return (
        Entry(Problem(4, 256, 56, 56, 256, 3, 3, padding=1, groups=32), ("resnext101_32x8d",)),
        Entry(Problem(8, 128, 28, 28, 128, 3, 3, padding=1, groups=8), ("regnetx_008",)),
        Entry(Problem(8, 64, 28, 28, 64, 3, 3, padding=1, groups=8, bias=True, activation="relu")),
        Entry(Problem(4, 128, 14, 14, 128, 5, 5, padding=2, groups=4, dtype="bfloat16")),
    )


def in_scope(problem: Problem) -> bool:
    """Return whether the kernel families are meant for the problem."""
    depthwise = problem.group_width == 1
    multiplied = depthwise and problem.direction == "fprop"
    return (
        problem.groups > 1
        and (depthwise or problem.group_width in GROUP_WIDTHS)
        and (problem.k == problem.c or multiplied)
        and max(problem.r, problem.s) <= (11 if depthwise else 7)
        and set(problem.stride) <= {1, 2}
        and set(problem.dilation) <= {1, 2}
        and (depthwise or problem.dtype != "float32")
    )


def tensor_bytes(problem: Problem) -> int:
    """Return the bytes of the three tensors: suites are drawn by these, so that they stay
    as they were measured whatever is found out about the bytes that must move."""
    elements = problem.input_elements + problem.filter_elements + problem.output_elements
    return problem.itemsize * elements


def _affordable(problem: Problem) -> bool:
    sizes = problem.input_elements + problem.output_elements
    return (
        problem.itemsize * sizes <= MAX_BYTES
        and get_device("h100").roofline_s(problem) <= MAX_SECONDS
    )


def _kind(problem: Problem) -> str:
    return "depthwise" if problem.group_width == 1 else "grouped"


def _variant(
    kind: str, direction: str, fields: Mapping[str, Any], generator: np.random.Generator
) -> Layer:
    """Return fields for a dtype, an epilogue and a mode, where they are not the default."""
    chosen: Layer = {}
    menu = VARIANTS[kind][direction].get((fields["r"], fields["s"], fields["stride"]), ())
    if menu and fields.get("dilation", 1) == 1 and generator.random() >= PLAIN_SHARES[direction]:
        chosen |= menu[generator.integers(len(menu))]
    if direction == "wgrad" and generator.random() < DETERMINISTIC_SHARE:
        chosen |= {"deterministic": True}
    return chosen


def _compiled_in(problem: Problem) -> tuple[Any, ...]:
    """Return the part of a problem that is compiled into a kernel: each combination costs the
    sampler a table."""
    p = problem
    return (
        p.group_width, p.k // p.c, p.r, p.s, p.stride, p.dilation,
        p.dtype, p.bias, p.activation, p.residual,
    )  # fmt: skip


def _batch(generator: np.random.Generator) -> int:
    return int(generator.choice(BATCHES, p=BATCH_SHARES))


def log_uniform(generator: np.random.Generator, low: int, high: int) -> int:
    """Return an integer from `low` to `high`, of which each doubling is as likely as another."""
    return round(float(np.exp(generator.uniform(np.log(low), np.log(high)))))


if __name__ == "__main__":
    main()

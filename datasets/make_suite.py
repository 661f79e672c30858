"""Makes the problem suites: real networks' grouped layers, and coverage of the sizes between them.

    python datasets/make_suite.py extract    networks.json, from timm's models; needs timm, no GPU
    python datasets/make_suite.py build      suites/*.json, from networks.json

``networks.json`` maps each network that has grouped convolutions (1 < groups < channels) to its
distinct grouped layers at the network's own input size: the fields of a problem without the batch,
and ``count``, how often the layer occurs.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import click
import numpy as np

from confpred.device import get_device
from confpred.errors import InvalidProblem
from confpred.families import all_families
from confpred.files import write_whole
from confpred.problem import Problem
from confpred.suite import Entry, Suite, write_suite

HERE = Path(__file__).parent
NETWORKS = HERE / "networks.json"
FORMAT = "confpred-networks/1"
MODEL_SECONDS = 30
#: Windows of coverage problems. Each costs the sampler a kernel for each config and group width.
WINDOWS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (1, 7), (7, 1), (3, 5), (5, 2))
#: Heights and windows of typical problems; windows by how often networks have them.
SIZES = (7, 8, 10, 12, 14, 15, 16, 18, 20, 24, 28, 30, 32, 36, 40, 44, 48, 56, 64, 72, 80, 96, 112)
TYPICAL_WINDOWS = (*((3, 3),) * 13, *((5, 5),) * 3, (1, 1), (1, 1), (7, 7), (2, 2))
#: Shares of float16 without epilogue, bfloat16, and a bias with relu, silu, gelu or no activation.
VARIANTS = (0.6, 0.15, 0.1, 0.08, 0.04, 0.03)

NETWORK_PROBLEMS = 350
MORE_NETWORK_PROBLEMS = 500
TYPICAL_PROBLEMS = 350
COVERAGE_PROBLEMS = 110
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: What a sampler can afford for each of hundreds of configs.
MAX_BYTES = 2**30
MAX_SECONDS = 0.5e-3
#: Of a coverage problem: below, every config takes the time of an empty launch.
MIN_BYTES = 2**18

Layer = dict[str, Any]


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
        except Exception as error:  # of any of a thousand models; the others still count
            click.echo(f"skipped {name}: {type(error).__name__}: {error}"[:200], err=True)
            continue
        if layers:
            networks[name] = layers
            click.echo(f"{name}: {len(layers)} grouped layers")
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in networks.items())
    text = f'{{"format": "{FORMAT}", "timm": "{timm.__version__}", "networks": {{\n{lines}\n}}}}\n'
    write_whole(NETWORKS, lambda file: file.write(text.encode()))
    click.echo(f"{len(networks)} networks in {NETWORKS}")


def _with_time_limit(name: str) -> list[Layer]:
    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {MODEL_SECONDS} s")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(MODEL_SECONDS)
    try:
        return grouped_layers(name)
    finally:
        signal.alarm(0)


def grouped_layers(name: str) -> list[Layer]:
    """The distinct grouped layers that a forward pass of timm's model `name` computes."""
    import timm
    import torch

    found: Counter[str] = Counter()

    def note(module: torch.nn.Conv2d, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if layer := _layer(module, inputs[0].shape, out.shape):
            found[json.dumps(layer)] += 1

    with torch.device("meta"), torch.no_grad():
        model = timm.create_model(name).eval()
        convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
        if not any(m.groups > 1 for m in convolutions):
            return []
        for module in convolutions:
            module.register_forward_hook(note)
        model(torch.empty(1, *model.default_cfg["input_size"]))
    return [json.loads(layer) | {"count": count} for layer, count in found.items()]


def _layer(module: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Layer | None:
    """A problem's fields without the batch; None unless grouped, with the same padding all round.

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
    fields = {
        "c": inputs[1],
        "h": inputs[2],
        "w": inputs[3],
        "k": outputs[1],
        "r": module.kernel_size[0],
        "s": module.kernel_size[1],
        "stride": list(module.stride),
        "padding": padding,
        "dilation": list(module.dilation),
        "groups": module.groups,
    }
    return {k: v[0] if isinstance(v, list) and v[0] == v[1] else v for k, v in fields.items()}


@main.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
def build(seed: int) -> None:
    """Write suites/*.json from networks.json."""
    content = json.loads(NETWORKS.read_text())
    if content.get("format") != FORMAT:
        raise click.ClickException(f'{NETWORKS} lacks "format": "{FORMAT}"')
    generator = np.random.default_rng(seed)
    entries = [
        *network_entries(content["networks"], NETWORK_PROBLEMS, generator),
        *coverage_entries(generator),
    ]
    more = [
        *network_entries(content["networks"], MORE_NETWORK_PROBLEMS, generator),
        *typical_entries(generator),
    ]
    for suite in (
        Suite("grouped_fprop", tuple(entries)),
        Suite("grouped_fprop_more", tuple(more)),
        Suite("smoke", smoke_entries()),
    ):
        write_suite(suite, HERE / "suites" / f"{suite.name}.json")
        click.echo(f"{suite.name}: {len(suite.entries)} problems")


def network_entries(
    networks: Mapping[str, list[Layer]], count: int, generator: np.random.Generator
) -> Iterator[Entry]:
    """Every layer of the networks that we can compute, at a few batch sizes."""
    users: dict[str, list[str]] = {}
    for name, layers in networks.items():
        for layer in layers:
            fields = {k: v for k, v in layer.items() if k != "count"}
            if _served(fields | {"n": 1}):
                users.setdefault(json.dumps(fields), []).append(name)
    layers = list(users)
    # As even a number of batch sizes a layer as adds up to the total.
    turns = [layers[i] for i in generator.permutation(len(layers))]
    shares = Counter(turns[i % len(turns)] for i in range(count))
    for layer in layers:
        batches = [n for n in BATCHES if _served(json.loads(layer) | {"n": n})]
        share = min(shares[layer], len(batches))
        for n in sorted(generator.choice(batches, share, replace=False)):
            fields = json.loads(layer) | {"n": int(n)} | _variant(generator)
            yield Entry(Problem.from_json(fields), tuple(users[layer]))


def typical_entries(generator: np.random.Generator) -> Iterator[Entry]:
    """Layers of no known network that look as if they were: a network not yet made has them."""
    made = 0
    while made < TYPICAL_PROBLEMS:
        width = int(generator.choice([8, 16, 32]))
        c = width * _log_uniform(generator, 1, 2048 // width)
        r, s = (int(v) for v in generator.choice(TYPICAL_WINDOWS))
        size = int(generator.choice(SIZES))
        fields = {
            "n": int(generator.choice(BATCHES)),
            "c": c,
            "h": size,
            "w": size,
            "k": c,
            "r": r,
            "s": s,
            "padding": [r // 2, s // 2],
            "groups": c // width,
            **_variant(generator),
        }
        if _served(fields) and (problem := Problem.from_json(fields)).minimum_bytes >= MIN_BYTES:
            made += 1
            yield Entry(problem)


def coverage_entries(generator: np.random.Generator) -> Iterator[Entry]:
    """Layers of no network: odd sizes, few and many channels, all kinds of windows."""
    made = 0
    while made < COVERAGE_PROBLEMS:
        width = int(generator.choice([8, 16, 32]))
        c = width * _log_uniform(generator, 1, 4096 // width)
        r, s = (int(v) for v in generator.choice(WINDOWS))
        h, w = _log_uniform(generator, 4, 256), _log_uniform(generator, 4, 256)
        if generator.random() < 0.5:
            w = h
        padding = [r // 2, s // 2]
        if generator.random() < 0.3:
            padding = [int(generator.integers(0, r)), int(generator.integers(0, s))]
        fields = {
            "n": _log_uniform(generator, 1, 256),
            "c": c,
            "h": h,
            "w": w,
            "k": c,
            "r": r,
            "s": s,
            "padding": padding,
            "groups": c // width,
        }
        if _served(fields) and (problem := Problem.from_json(fields)).minimum_bytes >= MIN_BYTES:
            made += 1
            yield Entry(problem)


def smoke_entries() -> tuple[Entry, ...]:
    """A few small layers, measured in seconds: one of each group width, window and epilogue."""
    return (
        Entry(Problem(4, 256, 56, 56, 256, 3, 3, padding=1, groups=32), ("resnext101_32x8d",)),
        Entry(Problem(8, 128, 28, 28, 128, 3, 3, padding=1, groups=8), ("regnetx_008",)),
        Entry(Problem(8, 64, 28, 28, 64, 3, 3, padding=1, groups=8, bias=True, activation="relu")),
        Entry(Problem(4, 128, 14, 14, 128, 5, 5, padding=2, groups=4, dtype="bfloat16")),
    )


def _variant(generator: np.random.Generator) -> Layer:
    """A dtype or an epilogue: mostly float16 and none. Not both at once: the sampler would have to
    compile every kernel for every pair."""
    kind = generator.choice(["plain", "bfloat16", "relu", "silu", "gelu", "none"], p=VARIANTS)
    if kind == "plain":
        return {}
    if kind == "bfloat16":
        return {"dtype": "bfloat16"}
    return {"bias": True, "activation": str(kind)}


def _served(fields: Layer) -> bool:
    """Whether some family can compute the layer, within what a sampler can spend."""
    try:
        problem = Problem.from_json(fields)
    except InvalidProblem:
        return False
    device = get_device("h100")
    return (
        2 * (problem.input_elements + problem.output_elements) <= MAX_BYTES
        and device.roofline_s(problem) <= MAX_SECONDS
        and any(family.legal(problem, device).any() for family in all_families().values())
    )


def _log_uniform(generator: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(generator.uniform(np.log(low), np.log(high)))))


if __name__ == "__main__":
    main()

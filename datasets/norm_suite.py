"""Makes the suites of batch norm with its activation: layers of real networks in training.

    python datasets/norm_suite.py extract    norm_networks.json, from timm's models; needs no GPU
    python datasets/norm_suite.py build      suites/norm/*.json, from norm_networks.json

A forward pass in training mode on tensors without data shows each batch norm, and what follows it:
an addition of a tensor of its shape, an activation. No layer of the hold-out has the channels and
the image of a layer to train on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import make_suite
import numpy as np

from confpred.data.suites import Entry, Suite, write_suite
from confpred.errors import InvalidProblem
from confpred.files import read_json
from confpred.problem.norm import DIRECTIONS, BatchNorm

HERE = Path(__file__).parent
NETWORKS = HERE / "norm_networks.json"
FORMAT = "confpred-norm-networks/1"
SUITES = HERE / "suites" / "norm"

TRAINING = """
    bat_resnext26ts botnet26t_256 convmixer_768_32 cspdarknet53 cspresnet50 darknet53 densenet121
    densenet169 dla34 dla60 dpn68 eca_botnext26ts_256 ecaresnet26t efficientformer_l1
    efficientformerv2_s0 efficientnet_b0 efficientnet_b3 efficientnet_es efficientnet_lite0
    efficientnetv2_rw_s efficientvit_b0 ese_vovnet19b_dw ese_vovnet39b fastvit_t8 fbnetc_100
    gcresnet33ts gernet_s ghostnet_100 ghostnetv2_100 halonet26t hardcorenas_a hgnet_tiny
    hgnetv2_b0 hrnet_w18_small inception_next_tiny inception_v3 inception_v4 lambda_resnet26t
    lcnet_100 levit_128 mixnet_s mnasnet_100 mnasnet_small mobilenetv2_100 mobilenetv2_140
    mobilenetv3_large_100 mobilenetv3_small_100 mobilenetv4_conv_small mobileone_s0 mobilevit_s
    mobilevitv2_100 regnetx_004 regnetx_016 regnety_008 regnety_032 regnetz_b16 repghostnet_100
    repvgg_a0 repvit_m1 res2net50_26w_4s resnest14d resnet18 resnet26t resnet33ts resnet34 resnet50
    resnetblur18 resnetrs50 resnext50_32x4d rexnet_100 rexnet_150 selecsls42b semnasnet_100
    seresnet50 seresnext26t_32x4d skresnet18 spnasnet_100 starnet_s1 tf_efficientnetv2_b0
    tf_mobilenetv3_small_075 tinynet_a vgg11_bn vgg16_bn visformer_tiny vovnet39a wide_resnet50_2
    xception41 xception65
""".split()  # noqa: SIM905
HOLDOUT = """
    convmixer_1536_20 cs3darknet_l densenet161 dpn107 efficientnet_b5 efficientvit_l2 hrnet_w48
    inception_resnet_v2 mixnet_xl mobilenetv3_large_150d mobilenetv4_conv_large nasnetalarge
    pnasnet5large regnetx_080 regnety_064 resnetrs200 rexnet_300 tf_efficientnet_b7 tresnet_l
    xception71
""".split()  # noqa: SIM905

#: Batches and their shares.
BATCHES, BATCH_SHARES = (128, 32, 64, 16, 8, 256), (0.36, 0.32, 0.12, 0.1, 0.05, 0.05)
DTYPES, DTYPE_SHARES = ("float16", "bfloat16", "float32"), (0.7, 0.18, 0.12)
FROZEN_SHARE = 0.06
COUNTS = {"training": 640, "holdout": 72}  # problems of a suite, both directions together
COVERAGE = 80  # problems to train on of sizes between those of networks
MOST_BYTES, LEAST_BYTES = 2**30, 2**17  # of a problem
_ACTIVATIONS = {
    "relu": "relu", "silu": "silu", "gelu": "gelu", "hardswish": "hardswish", "hardtanh": "relu6",
}  # fmt: skip


@click.group()
def main() -> None:
    """Make the suites of batch norm."""


@main.command()
def extract() -> None:
    """Write norm_networks.json."""
    import timm

    networks: dict[str, Any] = {}
    for name in (*TRAINING, *HOLDOUT):
        networks[name] = layers_of(timm.create_model, name)
        click.echo(f"{name}: {len(networks[name])} batch norms")
    make_suite.write_networks(NETWORKS, {"format": FORMAT, "timm": timm.__version__}, networks)


def layers_of(make: Any, name: str) -> list[dict[str, Any]]:
    """Return the distinct batch norms of a network at its own input, with their ``count``."""
    import torch

    with torch.device("meta"), torch.no_grad():
        model = make(name).train()
        found = watched(model, torch.empty(2, *model.default_cfg["input_size"]))
    counts = Counter(json.dumps(layer) for layer in found)
    return [json.loads(layer) | {"count": count} for layer, count in counts.items()]


def watched(model: Any, image: Any) -> list[dict[str, Any]]:
    """Return the fields of each batch norm that a forward pass computes."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        """Follows the output of each batch norm to the addition and the activation after it.

        A tensor that something else reads as well has to be stored, so nothing joins its batch
        norm, except the addition of a shortcut, whose result both have.
        """

        def __init__(self) -> None:
            super().__init__()
            self.layers: list[dict[str, Any]] = []
            self.open: dict[int, dict[str, Any]] = {}  # by the tensor that it would go on with
            self.kept: list[Any] = []  # so that no other tensor gets the same number

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.name().partition("::")[2].partition(".")[0].rstrip("_")
            if "batch_norm" in name and args[0].dim() == 4:
                (_, c, h, w), result = args[0].shape, out[0] if isinstance(out, tuple) else out
                layer = {"h": h, "w": w, "c": c, "activation": "none", "residual": False}
                self.layers.append(layer)
                self._begin(result, layer)
                return out
            read = [a for a in args if isinstance(a, torch.Tensor) and id(a) in self.open]
            for tensor in read[:1]:
                layer = self.open.pop(id(tensor))
                if name in _ACTIVATIONS:
                    layer["activation"] = _ACTIVATIONS[name]
                elif name == "add" and args[0].shape == getattr(args[1], "shape", None):
                    layer["residual"] = True
                    self._begin(out, layer)
            for tensor in read[1:]:  # the other branch of an addition
                self.open.pop(id(tensor), None)
            return out

        def _begin(self, tensor: Any, layer: dict[str, Any]) -> None:
            self.open[id(tensor)] = layer
            self.kept.append(tensor)

    with Watch() as watch:
        model(image)
    return watch.layers


@main.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", type=click.Path(path_type=Path), default=SUITES, help="Folder to write to.")
def build(seed: int, out: Path) -> None:
    """Write suites/norm/*.json from norm_networks.json."""
    networks = read_json(NETWORKS, "batch norms of networks", FORMAT)["networks"]
    for suite in suites(networks, seed):
        write_suite(suite, out / f"{suite.name.removeprefix('norm-')}.json")
        names = {name for entry in suite.entries for name in entry.networks}
        click.echo(f"{suite.name}: {len(suite.entries)} problems of {len(names)} networks")


def suites(networks: Mapping[str, Sequence[Mapping[str, Any]]], seed: int) -> Iterator[Suite]:
    """Yield the training suite and the hold-out."""
    of_training = users({name: networks[name] for name in TRAINING})
    trained = {(f["h"], f["w"], f["c"]) for f in map(json.loads, of_training)}
    generator = np.random.default_rng([seed, 3])
    found = drawn(of_training, COUNTS["training"], generator)
    more = coverage(generator, found)
    yield Suite("norm-training", tuple((found | more).values()))
    apart = {
        text: names
        for text, names in users({name: networks[name] for name in HOLDOUT}).items()
        if (f := json.loads(text)) and (f["h"], f["w"], f["c"]) not in trained
    }
    yield Suite("norm-holdout", tuple(drawn(apart, COUNTS["holdout"], generator).values()))


def users(networks: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[str, ...]]:
    """Return the networks of each layer, which is the text of its JSON."""
    found: dict[str, tuple[str, ...]] = {}
    for name, layers in networks.items():
        for layer in layers:
            text = json.dumps({k: v for k, v in layer.items() if k != "count"})
            found[text] = (*found.get(text, ()), name)
    return found


def drawn(
    layers: Mapping[str, tuple[str, ...]], count: int, generator: np.random.Generator
) -> dict[BatchNorm, Entry]:
    """Return `count` problems: turn by turn a layer of each network, at a batch, of a dtype and in
    a direction of its own."""
    of_network: dict[str, list[str]] = {}
    for text, names in layers.items():
        for name in names:
            of_network.setdefault(name, []).append(text)
    left: dict[str, list[str]] = {name: [] for name in of_network}
    found: dict[BatchNorm, Entry] = {}
    while True:
        for name, texts in of_network.items():
            if not left[name]:
                left[name] = [texts[i] for i in generator.permutation(len(texts))]
            text = left[name].pop()
            problem = _problem(json.loads(text), generator)
            if problem is not None and problem not in found:
                found[problem] = Entry(problem, layers[text])
            if len(found) == count:
                return found


def coverage(
    generator: np.random.Generator, known: Mapping[BatchNorm, Entry]
) -> dict[BatchNorm, Entry]:
    """Return problems of no network: odd channels and images, in log-uniform sizes."""
    found: dict[BatchNorm, Entry] = {}
    while len(found) < COVERAGE:
        step = int(generator.choice((1, 2, 4, 8, 8, 16)))
        c = max(1, int(2 ** generator.uniform(3, 11.5)) // step) * step
        side = int(2 ** generator.uniform(2.5, 7.5))
        activation = str(generator.choice(("none", *_ACTIVATIONS.values())))
        fields = {"h": side, "w": side, "c": c, "activation": activation, "residual": False}
        problem = _problem(fields, generator)
        if problem is not None and problem not in known:
            found[problem] = Entry(problem)
    return found


def _problem(layer: Mapping[str, Any], generator: np.random.Generator) -> BatchNorm | None:
    """Return a problem of a layer; None where the draw is senseless or too large or small."""
    backward = generator.random() < 0.5
    fields = dict(layer) | {
        "n": int(generator.choice(BATCHES, p=BATCH_SHARES)),
        "dtype": str(generator.choice(DTYPES, p=DTYPE_SHARES)),
        "direction": DIRECTIONS[backward],
        "frozen": bool(generator.random() < FROZEN_SHARE),
    }
    if backward and layer["activation"] == "none":
        fields["residual"] = False  # its gradient is that of the output
    try:
        problem = BatchNorm.from_json(fields)
    except InvalidProblem:
        return None
    return problem if LEAST_BYTES <= problem.minimum_bytes <= MOST_BYTES else None


if __name__ == "__main__":
    main()

"""Writes ``dense_networks.json``: the dense convolutions of networks of many kinds.

    python datasets/dense_layers.py    from timm, torchvision and dense_written.py; needs no GPU

Dense means a single group. The file maps each network to its kind and to its distinct layers at all
of its input sizes: the fields of a problem that are not at their defaults, without the batch, with
what follows the layer in inference; ``bias_gradient`` where training computes that of a bias; and
``count``. The committed file is of an earlier capture, which listed layers of one pixel too.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from dense_written import WRITTEN, Layer

from confpred.files import read_json, write_whole
from confpred.problem.conv2d import Problem

NETWORKS = Path(__file__).parent / "dense_networks.json"
FORMAT = "confpred-dense-networks/1"

#: Networks of timm by kind, each with the heights and widths of its input.
TIMM: Mapping[str, Mapping[str, tuple[tuple[int, int], ...]]] = {
    "classification": {
        **dict.fromkeys(("resnet18", "resnet50"), ((160, 160), (224, 224), (288, 288))),
        **dict.fromkeys(
            (
                "convnext_tiny", "cspdarknet53", "darknet53", "densenet121", "dla34",
                "efficientnet_b0", "efficientnetv2_rw_s", "ese_vovnet39b", "fastvit_sa12",
                "ghostnet_100", "hardcorenas_a", "levit_256", "mobilenetv3_large_100",
                "mobilenetv4_conv_medium", "regnety_040", "repvgg_a2", "res2net50_26w_4s",
                "resnext50_32x4d", "seresnet33ts", "swin_tiny_patch4_window7_224", "vgg16_bn",
                "vit_base_patch16_224", "wide_resnet50_2",
            ),
            ((224, 224),),
        ),
        **dict.fromkeys(("inception_v3", "inception_v4", "xception41"), ((299, 299),)),
    },
    "pose": dict.fromkeys(("hrnet_w18", "hrnet_w32", "hrnet_w48"), ((256, 192), (384, 288))),
}  # fmt: skip

#: Networks of torchvision by kind: the attribute path of its maker, and the sizes of its input.
TORCHVISION: Mapping[str, Mapping[str, tuple[tuple[int, int], ...]]] = {
    "classification": dict.fromkeys(
        ("squeezenet1_1", "googlenet", "shufflenet_v2_x1_0", "mnasnet1_0", "alexnet"),
        ((224, 224),),
    ),
    "detection": {
        "detection.retinanet_resnet50_fpn": ((512, 512), (800, 1056)),
        "detection.fcos_resnet50_fpn": ((640, 640),),
        "detection.ssd300_vgg16": ((300, 300),),
        "detection.ssdlite320_mobilenet_v3_large": ((320, 320),),
    },
    "segmentation": {
        "segmentation.deeplabv3_resnet50": ((520, 520), (512, 1024)),
        "segmentation.fcn_resnet50": ((480, 480),),
        "segmentation.lraspp_mobilenet_v3_large": ((520, 520),),
    },
    "optical-flow": {
        "optical_flow.raft_large": ((368, 768), (440, 1024)),
        "optical_flow.raft_small": ((368, 768),),
    },
}


@dataclass(frozen=True, slots=True)
class Network:
    """One network: its kind, and how often it has each of its distinct layers."""

    kind: str
    layers: Mapping[Layer, int]


@click.command()
def main() -> None:
    """Write dense_networks.json."""
    import timm
    import torchvision

    networks: dict[str, Network] = {}
    for name, kind, layers in (*_of_timm(), *_of_torchvision(), *_written()):
        networks[name] = Network(kind, Counter(layers))
        click.echo(f"{kind} {name}: {len(networks[name].layers)} distinct layers")
    builds = {"timm": timm.__version__, "torchvision": torchvision.__version__}
    versions = {name: version.partition("+")[0] for name, version in builds.items()}
    write_networks(networks, versions, NETWORKS)
    click.echo(f"{len(networks)} networks in {NETWORKS}")


def read_networks(path: Path = NETWORKS) -> dict[str, Network]:
    """Return the networks in the file at `path`, by name.

    Raises:
        DataError: the file cannot be read, or is of another format.
        InvalidProblem: a layer is none.
    """
    networks = read_json(path, "dense networks", FORMAT)["networks"]
    return {
        name: Network(content["kind"], dict(map(_from_json, content["layers"])))
        for name, content in networks.items()
    }


def write_networks(
    networks: Mapping[str, Network], versions: Mapping[str, str], path: Path
) -> None:
    """Write `networks` to `path`, one layer a line so that versions compare well.

    Raises:
        StorageError: the file system refused the write.
    """
    parts = []
    for name, network in networks.items():
        layers = ",\n".join(
            f"    {json.dumps(_to_json(layer, count))}" for layer, count in network.layers.items()
        )
        head = f'  {json.dumps(name)}: {{"kind": {json.dumps(network.kind)}, "layers": [\n'
        parts.append(f"{head}{layers}\n  ]}}")
    head = json.dumps({"format": FORMAT, **versions})[:-1]
    text = f'{head}, "networks": {{\n' + ",\n".join(parts) + "\n}}\n"
    write_whole(path, lambda file: file.write(text.encode()))


def _to_json(layer: Layer, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(layer.problem):
        value = getattr(layer.problem, field.name)
        if field.name != "n" and value != field.default:
            pair = isinstance(value, tuple)
            fields[field.name] = value[0] if pair and value[0] == value[1] else value
    return fields | ({"bias_gradient": True} if layer.bias_gradient else {}) | {"count": count}


def _from_json(fields: dict[str, Any]) -> tuple[Layer, int]:
    fields = {"n": 1, **fields}
    bias_gradient, count = fields.pop("bias_gradient", False), fields.pop("count")
    return Layer(Problem.from_json(fields), bias_gradient), count


def _written() -> Iterator[tuple[str, str, list[Layer]]]:
    for kind, networks in WRITTEN.items():
        for name, parts in networks.items():
            yield name, kind, [layer for part in parts for layer in part()]


def _of_timm() -> Iterator[tuple[str, str, list[Layer]]]:
    import timm

    for kind, networks in TIMM.items():
        for name, sizes in networks.items():
            # A pose network has the branches only, and none of the layers that classify.
            pose = kind == "pose"
            options = {"features_only": True, "feature_location": ""} if pose else {}
            yield name, kind, _layers_of(partial(timm.create_model, name, **options), sizes)


def _of_torchvision() -> Iterator[tuple[str, str, list[Layer]]]:
    import torchvision

    for kind, networks in TORCHVISION.items():
        for path, sizes in networks.items():
            maker = operator.attrgetter(path)(torchvision.models)
            options: dict[str, Any] = {"weights": None}
            if kind in ("detection", "segmentation"):
                options["weights_backbone"] = None
            if path == "googlenet":
                options |= {"init_weights": False, "aux_logits": False}
            images = 2 if kind == "optical-flow" else 1
            layers = _layers_of(partial(maker, **options), sizes, images, kind == "detection")
            yield path.rpartition(".")[2], kind, layers


def _layers_of(
    make: Callable[[], Any],
    sizes: Iterable[tuple[int, int]],
    images: int = 1,
    detector: bool = False,
) -> list[Layer]:
    """Return the dense layers of inference at each of `sizes`, in order and with repeats.

    A detector is its backbone and its head alone: what it does with boxes depends on values, and
    has no convolution.
    """
    import torch

    from confpred.problem.device import get_device
    from confpred.pytorch.explain import capture

    class Detector(torch.nn.Module):
        def __init__(self, whole: Any) -> None:
            super().__init__()
            self.backbone, self.head = whole.backbone, whole.head

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(list(self.backbone(x).values()))

    layers = []
    with torch.device("cpu" if detector or images > 1 else "meta"):
        model = make().eval()
        model = Detector(model) if detector else model
        for size in sizes:
            inputs = tuple(torch.empty(1, 3, *size) for _ in range(images))
            for site in capture(model, inputs, get_device("h100"), dtype=torch.float16).sites:
                if site.problem is None or site.problem.groups > 1:
                    continue
                own = getattr(model.get_submodule(site.name), "bias", None) if site.name else None
                # The two images of a flow network pass its encoder as one batch.
                problem = dataclasses.replace(site.problem, n=1)
                layers.append(Layer(problem, own is not None))
    return layers


if __name__ == "__main__":
    main()

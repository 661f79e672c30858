"""`confpred devices`: the known GPUs, and their models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from confpred.cli.arguments import aligned, json_option, model_option
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import KNOWN, Device, get_device

if TYPE_CHECKING:
    from pathlib import Path

    from confpred.model.folder import Model

_DEVICE_HEADINGS = (
    "device", "product", "arch", "SMs", "GB/s", "TFLOP/s", "model", "layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device and its model. Without a model, the attributes after the first are None or empty.

    Attributes:
        device: description of the device.
        model: version of its model.
        operation: operation that the model chooses configs for, such as ``conv2d``.
        families: kernel families and libraries that the model was trained on.
        layers: kinds of layers that were measured: ``dense``, ``depthwise``, ``grouped``.
        rows, problems, networks: how many the model was trained on.
        driver, cudnn: versions that the measurements were made with.
    """

    device: Device
    model: str | None = None
    operation: str | None = None
    families: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    rows: int | None = None
    problems: int | None = None
    networks: int | None = None
    driver: tuple[str, ...] = ()
    cudnn: tuple[str, ...] = ()


def known_devices(models: Iterable[Model]) -> list[KnownDevice]:
    """Return the devices of `models`, once a model, then those of the table without a model.

    Raises:
        ModelError: a model is damaged.
    """
    learned = []
    for model in models:
        families, data = model.card.families, model.card.data
        layers = sorted({grouping for entry in families.values() for grouping in entry.groupings})
        what = (model.version, model.operation.name, tuple(families), tuple(layers))
        versions = (tuple(model.card.measured_with.get(name, ())) for name in ("driver", "cudnn"))
        amounts = (data.rows, data.problems, data.networks)
        learned.append(KnownDevice(model.device, *what, *amounts, *versions))
    has_one = {entry.device.key for entry in learned}
    return learned + [KnownDevice(device) for key, device in KNOWN.items() if key not in has_one]


@click.command("devices")
@click.argument("device", required=False)
@json_option(help="Print the devices as JSON.")
@model_option
def devices(device: str | None, as_json: bool, model: Path | None) -> None:
    """List the known GPUs and their models; or all facts of one DEVICE.

    \b
    confpred devices
    confpred devices h100
    confpred devices --json

    GB/s is the copy bandwidth, bytes read plus bytes written. TFLOP/s is the dense half-precision
    rate. For a device without a model, the model of the most similar device chooses, without a
    bound. A GPU that is not in the list is added when a process first uses it.
    """
    from confpred.families.registry import all_operations
    from confpred.model.folder import NewestModels
    from confpred.predict.predictor import Predictor

    models = [*Predictor.load(model).models.values()]
    if model is None:
        others = all_operations().keys() - {CONVOLUTION.name}
        models += [m for name in sorted(others) for m in NewestModels(operation=name).values()]
    entries = known_devices(sorted(models, key=lambda m: m.device.key))
    if device is not None:
        key = next((k.device.key for k in entries if k.device.key == device), None)
        wanted = get_device(device if key is None else key)
        entries = [k for k in entries if k.device.key == wanted.key] or [KnownDevice(wanted)]
    if as_json:
        click.echo(json.dumps({"devices": [asdict(entry) for entry in entries]}, indent=1))
    elif device is None:
        click.echo("\n".join(aligned([_DEVICE_HEADINGS, *map(_device_row, entries)])))
    else:
        click.echo("\n".join(_device_facts(entries)))


def _device_row(entry: KnownDevice) -> tuple[str, ...]:
    d = entry.device
    return (
        *(d.key, d.product.removeprefix("NVIDIA "), d.arch, str(d.sm_count)),
        *(f"{d.dram_bytes_per_s / 1e9:.0f}", f"{d.tensor_flops / 1e12:.0f}"),
        *(entry.model or "none", _layers(entry)),
    )


def _layers(entry: KnownDevice) -> str:
    """Return the kinds of layers of a model; those of convolutions have names."""
    return " ".join(entry.layers) if entry.operation == CONVOLUTION.name else entry.operation or ""


def _device_facts(models: Sequence[KnownDevice]) -> Iterator[str]:
    d = models[0].device
    yield f"{d.key}: {d.product}, {d.arch}"
    facts = {
        "multiprocessors": f"{d.sm_count}, of {d.warps_per_sm} warps and {d.blocks_per_sm} blocks",
        "shared memory": f"{d.smem_per_sm:,} bytes each, {d.smem_per_block:,} for a block",
        "L2 cache": f"{d.l2_bytes:,} bytes",
        "bandwidth": f"{d.dram_bytes_per_s / 1e9:.0f} GB/s, read plus written",
        "arithmetic": f"{d.tensor_flops / 1e12:.1f} TFLOP/s in half precision, "
        f"{d.simt_flops / 1e12:.1f} in float32",
    }
    yield from _aligned_facts(facts)
    for entry in models:
        yield from _aligned_facts(_model_facts(entry))


def _aligned_facts(facts: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name:15}  {value}" for name, value in facts.items() if value)


def _model_facts(entry: KnownDevice) -> dict[str, str]:
    none = "none: that of the nearest device answers, without a bound"
    facts = {"model": entry.model or none}
    if entry.model is not None:
        dense = (
            "" if entry.operation != CONVOLUTION.name or "dense" in entry.layers else "; not dense"
        )
        facts |= {
            "operation": str(entry.operation),
            "layers": _layers(entry) + dense,
            "families": " ".join(entry.families),
            "trained on": f"{entry.rows:,} rows of {entry.problems:,} problems of "
            f"{entry.networks:,} networks",
            "measured with": f"driver {' or '.join(entry.driver) or 'not recorded'}, "
            f"cuDNN {' or '.join(entry.cudnn) or 'not recorded'}",
        }
    return facts

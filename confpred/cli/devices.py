"""`confpred devices`: which GPUs are known, and what their models know."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.inputs import FOLDER
from confpred.cli.layers import aligned

if TYPE_CHECKING:
    from confpred.model.folder import KnownDevice

_HEADINGS = ("device", "board", "arch", "SMs", "GB/s", "TFLOP/s", "model", "layers", "problems")


@click.command()
@click.argument("device", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the devices as JSON.")
@click.option("--model", type=FOLDER, help="Model folder; default: the newest.")
def command(device: str | None, as_json: bool, model: Path | None) -> None:
    """List the GPUs that are known, and what their models know; or tell all of one DEVICE.

    \b
    confpred devices
    confpred devices h100
    confpred devices --json

    GB/s is the copy bandwidth, bytes read plus bytes written. TFLOP/s is the dense half-precision
    rate. A device without a model is answered by that of the nearest one, without a bound. A GPU
    that is not in the list is known once its driver was asked, when a process first uses it.
    """
    from confpred.model.folder import KnownDevice, known_devices
    from confpred.predict.predictor import Predictor
    from confpred.problem.device import get_device

    found = known_devices(Predictor.load(model).models)
    if device is not None:
        key = next((k.device.key for k in found if k.device.key == device), None)
        wanted = get_device(device if key is None else key)
        found = [k for k in found if k.device.key == wanted.key] or [KnownDevice(wanted)]
    if as_json:
        click.echo(json.dumps({"devices": [known.to_json() for known in found]}, indent=1))
        return
    for line in _all(found) if device is None else _one(found[0]):
        click.echo(line)


def _all(found: Sequence[KnownDevice]) -> Iterator[str]:
    rows = [_HEADINGS]
    for known in found:
        d = known.device
        rows.append(
            (
                d.key,
                d.product,
                d.arch,
                str(d.sm_count),
                f"{d.dram_bytes_per_s / 1e9:.0f}",
                f"{d.tensor_flops / 1e12:.0f}",
                known.model or "none",
                " ".join(known.layers),
                "" if known.problems is None else f"{known.problems:,}",
            )
        )
    yield from aligned(rows)


def _one(known: KnownDevice) -> Iterator[str]:
    d = known.device
    yield f"{d.key}: {d.product}, {d.arch}"
    facts = {
        "multiprocessors": f"{d.sm_count}, of {d.warps_per_sm} warps and {d.blocks_per_sm} blocks",
        "shared memory": f"{d.smem_per_sm:,} bytes each, {d.smem_per_block:,} for a block",
        "L2 cache": f"{d.l2_bytes:,} bytes",
        "bandwidth": f"{d.dram_bytes_per_s / 1e9:.0f} GB/s, read plus written",
        "arithmetic": f"{d.tensor_flops / 1e12:.1f} TFLOP/s in half precision, "
        f"{d.simt_flops / 1e12:.1f} in float32",
        "model": known.model or "none: that of the nearest device answers, without a bound",
    }
    if known.model is not None:
        dense = "" if known.operation != "conv2d" or "dense" in known.layers else "; not dense"
        facts |= {
            "operation": str(known.operation),
            "layers": " ".join(known.layers) + dense,
            "families": " ".join(known.families),
            "trained on": f"{known.rows:,} rows of {known.problems:,} problems of "
            f"{known.networks:,} networks",
            "measured with": f"driver {' or '.join(known.driver) or 'not recorded'}, "
            f"cuDNN {' or '.join(known.cudnn) or 'not recorded'}",
        }
    yield from (f"{name:15}  {value}" for name, value in facts.items() if value)

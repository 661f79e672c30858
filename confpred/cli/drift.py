"""`confpred drift`: whether the model in use still holds on this GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.gpu import check_pytorch, cores, find_gpu
from confpred.cli.inputs import FOLDER
from confpred.cli.sample import parse_duration
from confpred.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from confpred.model.folder import Model
    from confpred.problem.device import Device
    from confpred.retraining.drift import Drift

_SHOWN = 5


@click.command()
@click.option("--device", default="cuda:0", show_default=True, help="GPU of this machine.")
@click.option("--model", type=FOLDER, help="Model folder.  [default: the one in use]")
@click.option(
    "--count",
    type=click.IntRange(8, 1000),
    default=40,
    show_default=True,
    help="How many configs to time again.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--budget", default="3m", show_default=True, help="Begin no problem after this long.")
@click.option("--pytorch/--no-pytorch", default=True, show_default=True, help="Its operator too.")
@click.option(
    "--timeout", default="60s", show_default=True, help="Kill a GPU worker silent for longer."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything that was found as JSON.")
def command(
    device: str,
    model: Path | None,
    count: int,
    seed: int,
    budget: str,
    pytorch: bool,
    timeout: str,
    as_json: bool,
) -> None:
    """Time a few of the model's configs again: does it still hold?

    A random set of the layers that the model was trained on is launched with the config that was
    the fastest then, and its time compared with the one that was measured.

    \b
    ok                        times are as the model expects
    driver or cuDNN changed   the same, under other versions than it was measured with
    drifted                   times differ: another clock, a neighbour, a driver
    kernels changed           it was trained on other kernels than those installed

    Exit code: 0 for the first two, 1 for the last two; then `confpred retrain` makes a model that
    holds. (A changed kernel, driver or cuDNN is also noticed without this command: one warning when
    a model is loaded, or when it first chooses inside PyTorch.)

    \b
    confpred drift
    confpred drift --device cuda:1 --count 100 --json
    """
    budget_s, silence_s = parse_duration("budget", budget), parse_duration("timeout", timeout)
    check_pytorch(pytorch)
    runs, described = find_gpu(device)
    used = _model(model, described)
    from confpred.retraining.drift import time_again
    from confpred.sampler.interrupts import count_interrupts
    from confpred.sampler.run import Settings

    settings = Settings(pytorch=pytorch, processes=cores(), budget_s=budget_s, silence_s=silence_s)
    with count_interrupts() as interrupts:
        found = time_again(
            used,
            runs,
            settings,
            count=count,
            seed=seed,
            cudnn=_cudnn() if pytorch else "",
            interrupts=lambda: interrupts.count,
        )
    if interrupts.count:
        sys.exit(128 + interrupts.signal)
    click.echo(json.dumps(found.to_json(), indent=1) if as_json else "\n".join(told(found)))
    sys.exit(0 if found.holds else 1)


def _model(folder: Path | None, device: Device) -> Model:
    from confpred.model.folder import NewestModels, load_model

    if folder is not None:
        model = load_model(folder)
        if model.device.key != device.key:
            raise InvalidInput("model", str(folder), f"a model of {device.key}, this GPU")
        return model
    models = NewestModels()
    if device.key not in models:
        allowed = (
            f"a GPU that has a model ({', '.join(sorted(models))}); confpred retrain makes one"
        )
        raise InvalidInput("device", device.key, allowed)
    return models[device.key]


def _cudnn() -> str:
    try:
        from confpred.measure.pytorch import cudnn_version
    except ImportError as error:
        raise MissingExtra(str(error.name), "gpu") from error
    return cudnn_version()


def told(found: Drift) -> list[str]:
    """The verdict, and the times that are furthest off."""
    lines = [f"{found.state}: model {found.model} on {found.device}: {found.why}"]
    for each in found.retimed[:_SHOWN]:
        times = f"{each.expected_ms:.4f} -> {each.measured_ms:.4f} ms"
        lines.append(f"  {each.ratio:5.2f}  {times}  {each.provider} {each.config}: {each.problem}")
    if not found.holds:
        lines.append("to make a model that holds: confpred retrain")
    return lines

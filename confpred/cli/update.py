"""Commands that keep this GPU's model up to date: `confpred retrain` and `confpred drift`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.arguments import (
    FILE,
    FILE_OR_FOLDER,
    FOLDER,
    OUTPUT,
    check_folder,
    gpu_option,
    json_option,
    needing,
    pytorch_option,
    require_packages,
    timeout_option,
)
from confpred.cli.sample import check_pytorch, cores, find_gpu, parse_duration
from confpred.data.suites import join, read_suite
from confpred.errors import InvalidInput
from confpred.problem.conv2d import CONVOLUTION, DIRECTIONS
from confpred.training import MODULES

if TYPE_CHECKING:
    from confpred.model.folder import Model
    from confpred.problem.device import Device
    from confpred.retraining.drift import Drift
    from confpred.retraining.retrain import Request, RetrainingReport

_DEFAULT_GPU = "cuda:0"
#: Exit code of a successful run that keeps the old model.
NOT_BETTER = 3


@click.command("retrain")
@gpu_option
@click.option(
    "--budget",
    default="15m",
    show_default=True,
    help="Time to measure, compilations included, such as 90s, 8m or 1.5h.",
)
@click.option(
    "--data",
    type=FILE_OR_FOLDER,
    multiple=True,
    help="Further measurements to train on, of such a GPU or another; may be repeated.",
)
@click.option(
    "--suite",
    "suites",
    type=FILE,
    multiple=True,
    help="Problem suite (JSON) to measure; may be repeated.  [default: those of confpred]",
)
@click.option(
    "--folder",
    type=OUTPUT,
    help="Folder of its measurements.  [default: in your data folder, one a device]",
)
@click.option("--jobs", type=click.IntRange(1, 1024), help="Compilations at a time.")
@pytorch_option(help="Time PyTorch's operator as well; else it is never chosen.")
@click.option(
    "--from",
    "source",
    metavar="URL-OR-FOLDER",
    help="Train on measurements of a service, a folder, or a URL such as s3://bucket, alone.",
)
@click.option(
    "--holdout",
    type=FILE_OR_FOLDER,
    multiple=True,
    help="With --from: measurements to judge by, never to train on; may be repeated.",
)
@click.option("--kept", is_flag=True, help="Learn from what tuning measured and kept, too.")
@timeout_option
def retrain(
    device: str,
    budget: str,
    data: tuple[Path, ...],
    suites: tuple[Path, ...],
    folder: Path | None,
    jobs: int | None,
    pytorch: bool,
    source: str | None,
    holdout: tuple[Path, ...],
    kept: bool,
    timeout: str,
) -> None:
    """Measure this GPU, train on it, and use the model if it is better.

    \b
    1. measures, for most of the budget, the problems of most worth a minute:
       far from those measured before, or with a large bound on regret; of each,
       20 configs that the present model puts first and 20 random ones
    2. trains on these, on the measurements of earlier runs, and on --data; with
       --kept also on those that `confpred.optimize` kept for this GPU, which
       are not measured again
    3. lets the old and the new model choose for networks held out of training,
       and measures the choices that differ
    4. puts the new model where `confpred.optimize` and `confpred predict` find
       it, if its choices are faster by more than chance; the old one stays
       beside it. Else it prints the reason.

    Training comes on top of the budget: some minutes of one core. A run that is stopped (Ctrl-C) or
    killed continues when the same command is run again. Any GPU of compute capability 8.0 or later
    will do; one that no table has is described by its driver and a short benchmark.

    With --from no GPU is needed, and --device is the one to train for, such as h100. The present
    model is trained again with the uploads to a service, beside your own --data; --holdout judges
    it, or else one network in ten of your own.

    Exit code: 0 if a new model is in use, 3 if the old one stays, 130 if stopped, 1 on an error, 2
    on a wrong option.

    \b
    confpred retrain --device cuda:0 --budget 15m
    confpred retrain --budget 1h --data datasets/h100
    confpred retrain --kept
    confpred retrain --from http://127.0.0.1:8000 --device h100 --data base --holdout holdout
    confpred drift        # later, to check the model
    """
    require_packages("train", *MODULES)
    if source is not None:
        trained_for = None if device == _DEFAULT_GPU else device
        sys.exit(retrain_from_and_report(source, data, holdout, trained_for))
    budget_s, silence_s = parse_duration("budget", budget), parse_duration("timeout", timeout)
    check_pytorch(pytorch)
    with as_file(files("confpred.suites")) as own:
        directions = [own / f"{direction}.json" for direction in DIRECTIONS]
        suite = join([read_suite(file) for file in suites or directions])
    runs, described = find_gpu(device)
    from confpred.retraining.retrain import Request, check_suite, default_folder
    from confpred.sampler.run import Sampling

    check_suite(suite)
    where = folder or default_folder(described.key)
    check_folder("folder", where)
    settings = Sampling(pytorch=pytorch, processes=jobs or cores(), silence_s=silence_s)
    request = Request(described, runs, suite, budget_s, data, where, settings)
    if kept:
        from confpred.sampler.kept import folders_of

        (run,) = runs.values()
        folders = folders_of(described.key, CONVOLUTION, run.driver)
        request = replace(request, kept=tuple(folders))
    sys.exit(retrain_and_report(request))


def retrain_from_and_report(
    source: str, data: tuple[Path, ...], holdout: tuple[Path, ...], device: str | None
) -> int:
    """Retrain on present measurements, with a summary; return the exit code."""
    from tempfile import TemporaryDirectory

    from confpred.model.folder import NewestModels, publish, users_models
    from confpred.retraining.exchanged import measurements_at, retrain_from
    from confpred.retraining.retrain import RetrainingReport

    with measurements_at(source) as folder, TemporaryDirectory(prefix="confpred-") as made:
        out, say = Path(made) / "model", partial(click.echo, err=True)
        models = NewestModels().paths
        outcome = retrain_from(
            [folder, *data], models, out, holdout=holdout, device=device, say=say
        )
        published = publish(out, users_models()) if outcome.verdict.better else None
    for line in verdict_lines(RetrainingReport(outcome.verdict, published, outcome.old)):
        click.echo(line)
    return 0 if published is not None else NOT_BETTER


def retrain_and_report(request: Request) -> int:
    """Retrain with progress, Ctrl-C and a summary; return the exit code."""
    from rich.console import Console

    from confpred.retraining.retrain import retrain
    from confpred.sampler.progress import count_interrupts, show_progress

    with (
        count_interrupts() as interrupts,
        show_progress(Console(stderr=True), request.budget_s) as show,
    ):
        report = retrain(
            request,
            interrupts=lambda: interrupts.count,
            show=show,
            say=lambda line: click.echo(line, err=True),
        )
    for line in verdict_lines(report):
        click.echo(line)
    if report.verdict is None:
        click.echo(f"not finished; to go on: {shlex.join(['confpred', *sys.argv[1:]])}")
        return 128 + interrupts.signal
    return 0 if report.published is not None else NOT_BETTER


def verdict_lines(report: RetrainingReport) -> list[str]:
    if report.verdict is None:
        return []
    old = f"model {report.old}" if report.old is not None else "PyTorch's operator"
    if report.published is None:
        return [f"not published: against {old}, {report.verdict.why}", f"{old} stays in use"]
    return [
        f"published: against {old}, {report.verdict.why}",
        f"in use from now on: {report.published}",
    ]


@click.command("submit")
@click.argument("folders", type=FOLDER, nargs=-1)
@click.option("--url", required=True, help="Service to send to, such as http://127.0.0.1:8000.")
def submit(folders: tuple[Path, ...], url: str) -> None:
    """Send the measurements in FOLDERS to a service, each file once.

    Without FOLDERS they are those that `confpred.optimize` made and kept on this machine, where no
    model knew its GPU: layers' sizes, configs and times, and names of the GPU and its driver. A
    token is read from CONFPRED_TOKEN.

    Exit code: 0 if the service has all of them, else 1.

    \b
    confpred submit --url http://127.0.0.1:8000
    confpred submit --url http://127.0.0.1:8000 runs
    """
    from confpred.cli.sample import submitting
    from confpred.sampler.kept import folders_of

    require_packages("client", "httpx")
    left = 0
    if not (folders := folders or tuple(folders_of("*", CONVOLUTION))):
        click.echo("tuning has kept nothing here")
    for folder in folders:
        with submitting(url, folder):
            pass
        record, shards = folder / ".submitted", [path.name for path in folder.glob("rows-*")]
        sent = record.read_text().split() if record.exists() else []
        left += (missing := sum(name not in sent for name in shards))
        click.echo(f"{folder}: {len(shards) - missing} of {len(shards)} files are at {url}")
    sys.exit(1 if left else 0)


_SHOWN = 5


@click.command("drift")
@gpu_option
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
@pytorch_option(
    help="Time layers too whose fastest was PyTorch's operator, and compare cuDNN's version."
)
@timeout_option
@json_option(help="Print the whole result as JSON.")
def drift(
    device: str,
    model: Path | None,
    count: int,
    seed: int,
    budget: str,
    pytorch: bool,
    timeout: str,
    as_json: bool,
) -> None:
    """Time a few of a model's configs again, to check the model.

    Random layers that the model was trained on, about as many for each kernel that was the fastest
    of one, are launched with what was the fastest then, and their times are compared.

    \b
    ok                        times are as the model expects
    driver or cuDNN changed   so they are, with other versions than those it was measured with
    drifted                   times differ: another clock, a neighbour, a driver
    kernels changed           it was trained on other kernels than those installed

    Exit code: 0 for the first two, 130 after Ctrl-C, 1 for the last two; then `confpred retrain`
    makes a model that holds. (A changed kernel, driver or cuDNN is also noticed without this
    command: one warning when a model is loaded, or when it first chooses inside PyTorch.)

    \b
    confpred drift
    confpred drift --device cuda:1 --count 100 --json
    """
    budget_s, silence_s = parse_duration("budget", budget), parse_duration("timeout", timeout)
    check_pytorch(pytorch)
    runs, gpu = find_gpu(device)
    used = _model_in_use(model, gpu)
    from confpred.retraining.drift import time_again
    from confpred.sampler.progress import count_interrupts
    from confpred.sampler.run import Sampling

    settings = Sampling(pytorch=pytorch, processes=cores(), budget_s=budget_s, silence_s=silence_s)
    with count_interrupts() as interrupts:
        try:
            check = time_again(
                used,
                runs,
                settings,
                count=count,
                seed=seed,
                cudnn=_cudnn() if pytorch else "",
                interrupts=lambda: interrupts.count,
            )
        finally:  # also where too few were timed for a verdict
            if interrupts.count:
                sys.exit(128 + interrupts.signal)
    click.echo(json.dumps(check.to_json(), indent=1) if as_json else "\n".join(drift_lines(check)))
    sys.exit(0 if check.holds else 1)


def _model_in_use(folder: Path | None, device: Device) -> Model:
    from confpred.model.folder import NewestModels, load_model

    if folder is not None:
        model = load_model(folder)
        if model.device.key != device.key:
            raise InvalidInput("model", str(folder), f"a model of {device.key}, this GPU")
        return model
    models = NewestModels()
    if device.key not in models:
        having = ", ".join(sorted(models))
        allowed = f"a GPU that has a model ({having}); confpred retrain makes one"
        raise InvalidInput("device", device.key, allowed)
    return models[device.key]


def _cudnn() -> str:
    with needing("gpu"):
        from confpred.measure.pytorch import cudnn_version
    return cudnn_version()


def drift_lines(check: Drift) -> list[str]:
    """Return the verdict, and the times that differ most, as lines of text."""
    lines = [f"{check.state}: model {check.model} on {check.device}: {check.why}"]
    for t in check.retimed[:_SHOWN]:
        times = f"{t.expected_ms:.4f} -> {t.measured_ms:.4f} ms"
        lines.append(f"  {t.ratio:5.2f}  {times}  {t.provider} {t.config}: {t.problem}")
    if not check.holds:
        lines.append("to make a model that holds: confpred retrain")
    return lines

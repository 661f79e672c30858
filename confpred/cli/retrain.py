"""`confpred retrain`: a model of one's own GPU in one command."""

from __future__ import annotations

import shlex
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.gpu import check_pytorch, cores, find_gpu
from confpred.cli.inputs import FILE, FILE_OR_FOLDER
from confpred.cli.outputs import check_folder
from confpred.cli.sample import parse_duration
from confpred.data.suites import Suite, join, read_suite
from confpred.problem.conv2d import DIRECTIONS
from confpred.training import require_packages

if TYPE_CHECKING:
    from confpred.retraining.retrain import Report, Request

#: The exit code where the run went well and the old model stays.
NOT_BETTER = 3


@click.command()
@click.option("--device", default="cuda:0", show_default=True, help="GPU of this machine.")
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
    help="Measurements to learn from too, of such a GPU or another; may be repeated.",
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
    type=click.Path(path_type=Path),
    help="Where its measurements are kept.  [default: in your data folder, one a device]",
)
@click.option("--jobs", type=click.IntRange(1, 1024), help="Compilations at a time.")
@click.option(
    "--pytorch/--no-pytorch",
    default=True,
    show_default=True,
    help="Time PyTorch's own operator as well: without it nothing is left to it.",
)
@click.option(
    "--timeout", default="60s", show_default=True, help="Kill a GPU worker silent for longer."
)
def command(
    device: str,
    budget: str,
    data: tuple[Path, ...],
    suites: tuple[Path, ...],
    folder: Path | None,
    jobs: int | None,
    pytorch: bool,
    timeout: str,
) -> None:
    """Measure this GPU, train on it, and use the model if it is better.

    \b
    1. measures, for most of the budget, what teaches most a minute: problems
       unlike those measured before and answers that may be far off; of each,
       20 configs that the present model puts first and 20 random ones
    2. trains on these, on what earlier runs measured, and on --data
    3. lets the old and the new model choose for networks that it never learns
       from, and measures what they choose differently
    4. puts the new model where `confpred.optimize` and `confpred predict` find
       it, if its choices are faster by more than chance; the old one stays
       beside it. Else it says why not.

    Training comes on top of the budget: some minutes of one core. A run that is stopped (Ctrl-C) or
    killed goes on where it was when the same command is given again. Any GPU of compute capability
    8.0 or later will do; one that no table has is described by its driver and a short benchmark.

    Exit code: 0 if a new model is in use, 3 if the old one stays, 130 if stopped, 1 on an error, 2
    on a wrong option.

    \b
    confpred retrain --device cuda:0 --budget 15m
    confpred retrain --budget 1h --data datasets/h100
    confpred drift        # later: does it still hold?
    """
    require_packages()
    budget_s, silence_s = parse_duration("budget", budget), parse_duration("timeout", timeout)
    check_pytorch(pytorch)
    suite = join([read_suite(file) for file in suites]) if suites else _own_suite()
    runs, described = find_gpu(device)
    from confpred.retraining.retrain import Request, check_suite, default_folder
    from confpred.sampler.run import Settings

    check_suite(suite)
    where = folder or default_folder(described.key)
    check_folder("folder", where)
    settings = Settings(pytorch=pytorch, processes=jobs or cores(), silence_s=silence_s)
    request = Request(described, runs, suite, budget_s, data, where, settings)
    sys.exit(retrain_and_report(request))


def _own_suite() -> Suite:
    """The suites of the three directions, which are installed with the package."""
    with as_file(files("confpred.suites")) as folder:
        return join([read_suite(folder / f"{direction}.json") for direction in DIRECTIONS])


def retrain_and_report(request: Request) -> int:
    """Retrain with progress, Ctrl-C and a summary; returns the exit code.

    Raises:
        ConfpredError: see `confpred.retraining.retrain.retrain`.
    """
    from rich.console import Console

    from confpred.retraining.retrain import retrain
    from confpred.sampler.interrupts import count_interrupts
    from confpred.sampler.progress import show_progress

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
    for line in told(report):
        click.echo(line)
    if report.verdict is None:
        click.echo(f"not finished; to go on: {shlex.join(['confpred', *sys.argv[1:]])}")
        return 128 + interrupts.signal
    return 0 if report.published is not None else NOT_BETTER


def told(report: Report) -> list[str]:
    """How it ended, line by line."""
    if report.verdict is None:
        return []
    old = f"model {report.old}" if report.old is not None else "PyTorch's operator"
    if report.published is None:
        return [f"not published: against {old}, {report.verdict.why}", f"{old} stays in use"]
    return [
        f"published: against {old}, {report.verdict.why}",
        f"in use from now on: {report.published}",
    ]

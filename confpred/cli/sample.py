"""``confpred sample``."""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from confpred.cli.inputs import FILE, FOLDER
from confpred.cli.outputs import check_folder
from confpred.data.suites import Suite, join, read_suite
from confpred.errors import InvalidInput, MissingExtra
from confpred.families.registry import families_of, kernels_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from confpred.data.measurements import Run
    from confpred.sampler.run import Settings

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@click.command()
@click.option(
    "--suite",
    "suite_files",
    type=FILE,
    required=True,
    multiple=True,
    help="Problem suite (JSON); may be repeated.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder of the measurements."
)
@click.option(
    "--gpus",
    "--devices",
    default="all",
    show_default=True,
    help="GPUs of this machine by their CUDA number, such as 0,1.",
)
@click.option("--budget", help="Begin no problem after this long, such as 90s, 8m or 1.5h.")
@click.option(
    "--family",
    "families",
    multiple=True,
    metavar="NAME",
    help="Measure configs of this family only; may be repeated.  [default: all but libraries']",
)
@click.option(
    "--configs",
    type=click.IntRange(min=1),
    help="Measure a random choice of this many configs a problem and family.  [default: all]",
)
@click.option(
    "--model",
    "model_folder",
    type=FOLDER,
    help="Measure only what this model offers: its portfolio of configs.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Of the order of problems, the choice of configs and the timed rounds.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 1024), help="Compilations at a time.  [default: the cores]"
)
@click.option(
    "--pytorch/--no-pytorch",
    default=True,
    show_default=True,
    help="Time PyTorch's own operator as well.",
)
@click.option(
    "--timeout", default="60s", show_default=True, help="Kill a GPU worker silent for longer."
)
def command(
    suite_files: tuple[Path, ...],
    out: Path,
    gpus: str,
    budget: str | None,
    families: tuple[str, ...],
    configs: int | None,
    model_folder: Path | None,
    seed: int,
    jobs: int | None,
    pytorch: bool,
    timeout: str,
) -> None:
    """Measure configs of a suite's problems on this machine's GPUs.

    What the output folder holds is not measured again, so the same command resumes a run. Ctrl-C
    ends a run after the problems in flight, and a second one at once.
    """
    budget_s = None if budget is None else parse_duration("budget", budget)
    silence_s = parse_duration("timeout", timeout)
    check_folder("out", out)
    suite = join([read_suite(file) for file in suite_files])
    offered = offered_configs(suite, families, model_folder)
    if pytorch and find_spec("torch") is None:
        raise MissingExtra("torch (or --no-pytorch)", "gpu")
    try:
        import rich  # noqa: F401 -- a missing package is reported before any work

        from confpred.sampler.gpus import find_gpus
        from confpred.sampler.run import Settings
    except ImportError as error:
        raise MissingExtra(str(error.name), "gpu") from error

    settings = Settings(
        seed=seed,
        configs=configs,
        offered=offered,
        pytorch=pytorch,
        processes=jobs or len(os.sched_getaffinity(0)),
        budget_s=budget_s,
        silence_s=silence_s,
    )
    sys.exit(sample_and_report(suite, out, find_gpus(gpus), settings))


def offered_configs(
    suite: Suite, families: Sequence[str], model_folder: Path | None
) -> dict[str, NDArray[np.bool_]]:
    """Masks of the configs to measure, by family.

    Args:
        suite: the problems; the families of their operation can be measured.
        families: the only ones to measure; empty for all that are kernels.
        model_folder: a model; only its portfolios are measured. None for whole config tables.

    Raises:
        InvalidInput: there is no such family, or the model has none of its configs.
        ModelError: the model's folder is missing, damaged or foreign.
    """
    from confpred.model.folder import load_model

    problem = suite.entries[0].problem
    known = families_of(problem)
    _check_families(families, known)
    masks = {name: np.ones(len(family.configs), np.bool_) for name, family in known.items()}
    if model_folder is not None:
        masks = {n: model.portfolio for n, model in load_model(model_folder).families.items()}
        _check_families(families, masks)
    named = families or [name for name in kernels_of(problem) if name in masks]
    return {name: masks[name] for name in named}


def _check_families(named: Sequence[str], known: Mapping[str, object]) -> None:
    for name in named:
        if name not in known:
            raise InvalidInput("family", name, " or ".join(known))


def sample_and_report(suite: Suite, out: Path, runs: Mapping[int, Run], settings: Settings) -> int:
    """Sample with progress, Ctrl-C and a summary; returns the exit code.

    Raises:
        ConfpredError: see `confpred.sampler.run.sample`.
    """
    from rich.console import Console

    from confpred.sampler.interrupts import count_interrupts
    from confpred.sampler.progress import show_progress, summary
    from confpred.sampler.run import sample

    with (
        count_interrupts() as interrupts,
        show_progress(Console(stderr=True), settings.budget_s) as show,
    ):
        tally = sample(suite, out, runs, settings, interrupts=lambda: interrupts.count, show=show)
    click.echo(summary(tally, out, len(runs)))
    if not tally.finished:
        click.echo(f"not finished; to go on: {shlex.join(['confpred', *sys.argv[1:]])}")
    return 128 + interrupts.signal if interrupts.count else 0


def parse_duration(field: str, text: str) -> float:
    """Seconds in a text such as ``90s``, ``8m`` or ``1.5h``.

    Raises:
        InvalidInput: the text is no such duration, or it is not more than zero.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise InvalidInput(field, text, "a number above 0 with s, m or h, such as 90s, 8m or 1.5h")
    return seconds

"""Commands that work with measurements: `confpred train`, `evaluate`, `report` and `merge`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.arguments import (
    FILE_OR_FOLDER,
    FOLDER,
    MEASUREMENTS,
    OUTPUT,
    check_files,
    check_folder,
    check_new_folder,
    folds_option,
    force_option,
    needing,
    require_packages,
    seed_option,
)
from confpred.errors import InvalidInput, nearest
from confpred.files import write_whole
from confpred.training import HOLDOUT_FORMAT, MODULES

if TYPE_CHECKING:
    from confpred.data.remote import Folder
    from confpred.training import Said
    from confpred.training.dataset import Dataset
    from confpred.training.holdout import HoldoutVerdict


@click.command("train")
@click.argument("data", nargs=-1, required=True, type=FILE_OR_FOLDER)
@click.option(
    "--out", required=True, type=OUTPUT, help="Folder to make; its name is the model's version."
)
@click.option("--device", help="Device to train for, if the data is of several.")
@seed_option
@click.option(
    "--exclude-network",
    "exclude",
    multiple=True,
    metavar="NAME",
    help="Leave this network's layers out, to try the model on it later; may be repeated.",
)
@click.option(
    "--family",
    "families",
    multiple=True,
    metavar="NAME",
    help="Train this family alone; may be repeated.  [default: all of DATA]",
)
@click.option(
    "--problems",
    type=click.IntRange(min=1),
    help="Train on so many random problems, for a quick trial.  [default: all]",
)
def train(
    data: tuple[Path, ...],
    out: Path,
    device: str | None,
    seed: int,
    exclude: tuple[str, ...],
    families: tuple[str, ...],
    problems: int | None,
) -> None:
    """Train a model from measurements (retrain-predictor).

    DATA are Parquet files of measurements, or folders of them. Rows of other devices than
    --device are used too. The model is first judged on networks held out of its training, which
    calibrates the bound on regret of its answers; then it is trained on everything.

    \b
    confpred train datasets/h100 datasets/h200 --device h100 --out models/h100-2
    confpred train datasets/h200 runs/ --out /tmp/trial --exclude-network resnext101_32x8d
    confpred train datasets/h100 --family grouped_fprop --problems 300 --out /tmp/quick
    confpred predict --model models/h100-2 --device h100 --layer "n=32 c=64 ..."
    """
    require_packages("train", *MODULES)
    check_new_folder("out", out)
    from confpred.training.dataset import read_dataset
    from confpred.training.train import train

    with show_steps() as say:
        say("reading measurements", 0, 1)
        dataset = read_dataset(data, device)
        say("reading measurements", 1, 1)
        regret = train(
            dataset, out, seed=seed, exclude=exclude, families=families, problems=problems, say=say
        )
    click.echo(
        f"{out}: trained on {dataset.device.key}; regret on held-out networks: geomean "
        f"{regret.geomean:.3f}, p95 {regret.p95:.3f}, worst {regret.worst:.3f} "
        f"({regret.problems} problems)"
    )


@click.command("evaluate")
@click.argument("data", nargs=-1, required=True, type=FILE_OR_FOLDER)
@click.option("--device", help="Device to judge for, if the data is of several.")
@click.option(
    "--holdout",
    multiple=True,
    type=FILE_OR_FOLDER,
    help="Measurements of networks that are not in DATA, with every legal config: judged first; "
    "may be repeated.",
)
@click.option(
    "--model",
    "model_folder",
    type=FOLDER,
    help="With --holdout: the model to judge by it.  [default: one trained on DATA]",
)
@click.option(
    "--anchors",
    multiple=True,
    type=FILE_OR_FOLDER,
    help="Control configs of every run, to show the noise across runs; may be repeated.",
)
@folds_option
@click.option(
    "--holdout-only", is_flag=True, help="Judge by the --holdout alone, without cross-validation."
)
@seed_option
@click.option("--json", "json_file", type=OUTPUT, help="Write the figures.")
@click.option("--plot", type=OUTPUT, help="Write a PNG of the regret curves.")
@force_option
def evaluate(
    data: tuple[Path, ...],
    device: str | None,
    holdout: tuple[Path, ...],
    model_folder: Path | None,
    anchors: tuple[Path, ...],
    folds: int,
    holdout_only: bool,
    seed: int,
    json_file: Path | None,
    plot: Path | None,
    force: bool,
) -> None:
    """Judge configs chosen for networks that were not trained on.

    DATA are Parquet files of measurements, or folders of them; models are trained on all devices in
    them, and judged on one. The networks are divided into folds. For each fold, a model and every
    baseline are trained without its layers, at any batch size, and choose configs for them.
    Regret is the measured time of the choice over that of the best config: 1 is perfect. The data
    has some configs of each problem; a hold-out has them all.

    \b
    confpred evaluate datasets/h100 datasets/h200 --device h100
    confpred evaluate datasets/h100 --holdout datasets/holdout/h100
    confpred evaluate datasets/h100 --holdout datasets/holdout/h100 --holdout-only
    confpred evaluate runs/ --folds 8 --json evaluation.json --plot regret.png
    """
    require_packages("train", *MODULES)
    from confpred.training.dataset import data_files, read_dataset

    if model_folder is not None and not holdout:
        raise click.UsageError("--model needs --holdout, which judges it")
    if holdout_only and (plot is not None or not holdout):
        raise click.UsageError("--holdout-only needs --holdout, and draws no --plot")
    read = data_files((*data, *holdout, *anchors), anchors=True)
    check_files({"json": json_file, "plot": plot}, force=force, inputs=read)
    from rich.console import Console

    from confpred.training.dataset import noise_across_runs
    from confpred.training.evaluate import evaluate, plot_regret, print_evaluation, print_noise
    from confpred.training.fit import usual
    from confpred.training.holdout import print_verdict

    console, parts = Console(), {}
    with show_steps() as say:
        say("reading measurements", 0, 1)
        dataset = read_dataset(data, device)
        say("reading measurements", 1, 1)
        verdict = _judge(dataset, holdout, model_folder, seed, say) if holdout else None
    if verdict is not None:
        print_verdict(verdict, console)
        parts["holdout"] = asdict(verdict)
    if anchors:
        noise = noise_across_runs(
            data_files(anchors, anchors=True), dataset.operation, dataset.device.key
        )
        print_noise(noise, console)
        parts["sittings"] = asdict(noise)
    figures = {"format": HOLDOUT_FORMAT, "device": dataset.device.key, "data": dataset.digest}
    evaluation = None
    if not holdout_only:
        with show_steps() as say:
            evaluation = evaluate(dataset, usual(dataset.operation), folds, seed, say)
        print_evaluation(evaluation, console)
        figures = evaluation.to_json()
    if json_file is not None:
        text = json.dumps(figures | parts, indent=1) + "\n"
        write_whole(json_file, lambda file: file.write(text.encode()), replace=force)
    if plot is not None and evaluation is not None:
        plot_regret(evaluation, plot, replace=force)


def _judge(
    dataset: Dataset, holdout: tuple[Path, ...], model_folder: Path | None, seed: int, say: Said
) -> HoldoutVerdict:
    """Judge the model of `model_folder` by `holdout`; by default, a model trained on `dataset`
    without the hold-out's networks and layers."""
    from confpred.model.folder import load_model
    from confpred.training.dataset import read_dataset
    from confpred.training.holdout import check_unseen, judge_holdout, read_holdout, without_holdout
    from confpred.training.train import train

    held = read_holdout(read_dataset(holdout, dataset.device.key), holdout)
    with tempfile.TemporaryDirectory() as folder:
        if model_folder is None:
            model_folder = Path(folder) / "without-the-hold-out"
            dataset = without_holdout(dataset, held.dataset)
            train(dataset, model_folder, seed=seed, say=say)
        model = load_model(model_folder)
        return judge_holdout(model, held, check_unseen(model, dataset, held.dataset), seed, say)


@click.command("report")
@click.argument("sources", nargs=-1, required=True, type=FILE_OR_FOLDER)
@click.option("--out", type=OUTPUT, required=True, help="The HTML file to write.")
@click.option("--device", "--gpu", help="Use the measurements of this device alone.")
@folds_option
@seed_option
@force_option
def report(
    sources: tuple[Path, ...], out: Path, device: str | None, folds: int, seed: int, force: bool
) -> None:
    """Write a report on models or measurements as one HTML page.

    SOURCES are any of these: a model folder, or a folder of them;
    evaluations, as `confpred evaluate --json` writes them (.json); and Parquet files of
    measurements, or folders of them. Measurements of a device without an evaluation are judged
    first, with --folds and --seed as in `confpred evaluate`, which takes minutes.

    The page has the regret by family, direction, dtype, batch, network and device, how often the
    bound holds, the 20 worst layers with their candidates, the most important features of a model,
    the noise of the measurements, and the source of every figure. It is one file: plots, style and
    script are inside it, and it loads nothing from a server.

    \b
    confpred report models datasets/h100 datasets/h200 benchmarks/results/*/evaluation.json \\
      --out report.html
    confpred report runs/ --out report.html
    confpred report models/ --out models.html
    """
    require_packages("train", *MODULES, "jinja2")
    check_files({"out": out}, force=force, inputs=sources)
    from confpred.report.page import judge_here, read_inputs, write_page

    with show_steps() as say:
        inputs = read_inputs(sources, device, judge_here(folds, seed), say)
        write_page(inputs, out, replace=force, say=say)
    layers = sum(len(evaluation.layers) for evaluation in inputs.evaluations)
    click.echo(f"{out}: {len(inputs.files)} files, {layers} judged layers")


@click.command("merge")
@click.argument("folders", type=MEASUREMENTS, nargs=-1, required=True, metavar="FOLDER...")
@click.argument("file", type=OUTPUT)
@click.option("--anchors", is_flag=True, help="Join the control configs (anchors) instead.")
@click.option("--operation", help="Operation of files that name none, such as conv2d.")
@force_option
def merge(
    folders: tuple[Folder, ...], file: Path, anchors: bool, operation: str | None, force: bool
) -> None:
    """Join the measurements in sampler output FOLDERs into FILE, one sorted Parquet file. A FOLDER
    may be a URL, such as s3://bucket/runs.

    If FILE is a folder, or is new and does not end in .parquet, it is a folder of parts: rows that
    no part has yet become a new part, named for the day, and all parts stay as they are.

    Files that pandas, polars or DuckDB have written need --operation, the operation they measure.

    \b
    confpred merge runs/h100 runs/h100.parquet
    confpred merge runs/first runs/second runs/all.parquet --force
    confpred merge runs/h100 datasets/h100
    """
    with needing("data"):
        from confpred.data.parquet import add_part, is_shard_of, merge, shards_in
        from confpred.families.registry import all_operations
    if operation not in (None, *all_operations()):
        raise InvalidInput("operation", operation, nearest(operation, all_operations()))
    named = None if operation is None else all_operations()[operation]
    if file.is_dir() or (file.suffix != ".parquet" and not os.path.lexists(file)):
        check_folder("file", file)
        made = add_part(folders, file, anchors=anchors, operation=named)
        click.echo(f"{made[1]} rows in {made[0]}" if made else f"no rows that {file} lacks")
        return
    shards = (shard for folder in folders for shard in shards_in(folder, anchors=anchors))
    inputs = [shard for shard in shards if isinstance(shard, Path)]
    check_files({"file": file}, force=force, inputs=inputs)
    for folder in folders:
        if is_shard_of(file, folder):
            raise InvalidInput("file", str(file), f"no name of a shard of {folder} itself")
    rows = merge(folders, file, replace=force, anchors=anchors, operation=named)
    click.echo(f"{rows} rows in {file}")


_LINE_SECONDS = 2.0


@contextlib.contextmanager
def show_steps() -> Iterator[Said]:
    """Yield a function to call when a step begins and when a part of it is done; it shows them on
    standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    console = Console(stderr=True)
    began = shown = time.monotonic()
    current = ""

    def log(step: str, done: int, total: int) -> None:
        nonlocal current, shown
        now = time.monotonic()
        if step != current or now >= shown + _LINE_SECONDS:
            current, shown = step, now
            count = f": {done} of {total}" if done else ""
            console.print(f"[{now - began:.0f}s] {step}{count}", markup=False, highlight=False)

    if not console.is_terminal:
        yield log
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, MofNCompleteColumn(), Elapsed(), console=console) as bars:
        tasks = {}

        def say(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield say

"""`confpred evaluate`: how good the model's choices are on networks it has not seen."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.inputs import FILE_OR_FOLDER, FOLDER
from confpred.cli.outputs import check_files, force_option
from confpred.errors import InvalidInput
from confpred.files import write_whole
from confpred.training import HOLDOUT_FORMAT, require_packages

if TYPE_CHECKING:
    from confpred.training import Said
    from confpred.training.dataset import Dataset
    from confpred.training.holdout import Verdict


@click.command()
@click.argument("data", nargs=-1, required=True, type=FILE_OR_FOLDER)
@click.option("--device", help="Device to judge for, where the data is of several.")
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
    help="What every run measured again: the noise across runs; may be repeated.",
)
@click.option("--folds", type=click.IntRange(2, 50), default=5, show_default=True)
@click.option(
    "--holdout-only", is_flag=True, help="Judge by the --holdout alone, without cross-validation."
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a PNG of the regret curves.")
@force_option
def command(
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

    DATA are Parquet files of measurements, or folders of them; models learn from all devices in
    them, and are judged on one. The networks are divided into folds;
    each fold's layers are chosen for by a model, and by every baseline, that has seen none of them
    at any batch size. Regret is the measured time of the choice over that of the best config: 1 is
    perfect. The data has some configs of each problem; a hold-out has them all.

    \b
    confpred evaluate datasets/h100 datasets/h200 --device h100
    confpred evaluate datasets/h100 --holdout datasets/holdout/h100
    confpred evaluate datasets/h100 --holdout datasets/holdout/h100 --holdout-only
    confpred evaluate runs/ --folds 8 --json evaluation.json --plot regret.png
    """
    require_packages()
    from confpred.training.dataset import data_files, read_dataset

    if model_folder is not None and not holdout:
        raise InvalidInput("model", str(model_folder), "a model to be judged by a --holdout")
    if holdout_only and (plot is not None or not holdout):
        raise InvalidInput("holdout-only", True, "with a --holdout, and without --plot")
    read = data_files((*data, *holdout, *anchors))
    check_files({"json": json_file, "plot": plot}, force=force, inputs=read)
    from rich.console import Console

    from confpred.cli.steps import show_steps
    from confpred.training.dataset import across_sittings
    from confpred.training.evaluate import (
        evaluate,
        plot_regret,
        print_evaluation,
        print_sittings,
    )
    from confpred.training.fit import Hyperparameters
    from confpred.training.holdout import print_verdict

    console, found = Console(), {}
    with show_steps() as say:
        say("reading measurements", 0, 1)
        dataset = read_dataset(data, device)
        say("reading measurements", 1, 1)
        verdict = _judge(dataset, holdout, model_folder, seed, say) if holdout else None
    if verdict is not None:
        print_verdict(verdict, console)
        found["holdout"] = asdict(verdict)
    if anchors:
        noise = across_sittings(data_files(anchors), dataset.operation, dataset.device.key)
        print_sittings(noise, console)
        found["sittings"] = asdict(noise)
    figures = {"format": HOLDOUT_FORMAT, "device": dataset.device.key, "data": dataset.digest}
    evaluation = None
    if not holdout_only:
        with show_steps() as say:
            evaluation = evaluate(dataset, Hyperparameters(), folds, seed, say)
        print_evaluation(evaluation, console)
        figures = evaluation.to_json()
    if json_file is not None:
        text = json.dumps(figures | found, indent=1) + "\n"
        write_whole(json_file, lambda file: file.write(text.encode()), replace=force)
    if plot is not None and evaluation is not None:
        plot_regret(evaluation, plot, replace=force)


def _judge(
    dataset: Dataset, holdout: tuple[Path, ...], model_folder: Path | None, seed: int, say: Said
) -> Verdict:
    """Judge the model of `model_folder` by `holdout`, or one that is trained on `dataset` without
    the hold-out's networks and layers.

    Raises:
        ConfpredError: the hold-out cannot be read or is of another device; the model cannot be
            read, or has seen a layer of it.
    """
    from confpred.model.folder import load_model
    from confpred.training.dataset import read_dataset
    from confpred.training.holdout import (
        check_unseen,
        judge_holdout,
        read_holdout,
        without_holdout,
    )
    from confpred.training.train import train

    held = read_holdout(read_dataset(holdout, dataset.device.key), holdout)
    if model_folder is not None:
        model = load_model(model_folder)
        return judge_holdout(model, held, check_unseen(model, dataset, held.dataset), seed, say)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "without-the-hold-out"
        known = without_holdout(dataset, held.dataset)
        train(known, made, seed=seed, say=say)
        model = load_model(made)
        return judge_holdout(model, held, check_unseen(model, known, held.dataset), seed, say)

"""`confpred evaluate`: how good the model's choices are on networks it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import click

from confpred.cli.inputs import FILE_OR_FOLDER
from confpred.cli.outputs import check_files, force_option
from confpred.files import write_whole
from confpred.training import require_packages


@click.command()
@click.argument("data", nargs=-1, required=True, type=FILE_OR_FOLDER)
@click.option("--device", help="Device to judge for, where the data is of several.")
@click.option("--folds", type=click.IntRange(2, 50), default=5, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a PNG of the regret curves.")
@force_option
def command(
    data: tuple[Path, ...],
    device: str | None,
    folds: int,
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
    perfect.

    \b
    confpred evaluate datasets/h100.parquet datasets/h200.parquet --device h100
    confpred evaluate runs/ --folds 8 --json evaluation.json --plot regret.png
    """
    require_packages()
    from confpred.training.dataset import data_files, read_dataset

    check_files({"json": json_file, "plot": plot}, force=force, inputs=data_files(data))
    from rich.console import Console

    from confpred.training.evaluate import evaluate
    from confpred.training.fit import Hyperparameters
    from confpred.training.report import plot_regret, print_evaluation

    evaluation = evaluate(read_dataset(data, device), Hyperparameters(), folds, seed)
    print_evaluation(evaluation, Console())
    if json_file is not None:
        text = json.dumps(evaluation.to_json(), indent=1) + "\n"
        write_whole(json_file, lambda file: file.write(text.encode()), replace=force)
    if plot is not None:
        plot_regret(evaluation, plot, replace=force)

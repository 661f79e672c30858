"""`confpred train`: a new model from measurements."""

from __future__ import annotations

from pathlib import Path

import click

from confpred.cli.inputs import FILE_OR_FOLDER
from confpred.cli.outputs import check_new_folder
from confpred.training import require_packages


@click.command()
@click.argument("data", nargs=-1, required=True, type=FILE_OR_FOLDER)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to make; its name is the model's version.",
)
@click.option("--device", help="Device to train for, where the data is of several.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option(
    "--exclude-network",
    "exclude",
    multiple=True,
    metavar="NAME",
    help="Keep this network's layers out, to try the model on it later; may be repeated.",
)
@click.option(
    "--family",
    "families",
    multiple=True,
    metavar="NAME",
    help="Learn of this family alone; may be repeated.  [default: all of DATA]",
)
@click.option(
    "--problems",
    type=click.IntRange(min=1),
    help="Learn from so many problems, chosen at random, for a quick trial.  [default: all]",
)
def command(
    data: tuple[Path, ...],
    out: Path,
    device: str | None,
    seed: int,
    exclude: tuple[str, ...],
    families: tuple[str, ...],
    problems: int | None,
) -> None:
    """Train a model from measurements (retrain-predictor).

    DATA are Parquet files of measurements, or folders of them. What was measured on other devices
    than --device is learned from too. The model is first judged on networks held out of its
    training, which calibrates the bound on regret that each of its answers carries; then it learns
    from everything.

    \b
    confpred train datasets/h100 datasets/h200 --device h100 --out models/h100-2
    confpred train datasets/h200 runs/ --out /tmp/trial --exclude-network resnext101_32x8d
    confpred train datasets/h100 --family grouped_fprop --problems 300 --out /tmp/quick
    confpred predict --model models/h100-2 --device h100 --layer "n=32 c=64 ..."
    """
    require_packages()
    check_new_folder("out", out)
    from confpred.cli.steps import show_steps
    from confpred.training.dataset import read_dataset
    from confpred.training.train import train

    with show_steps() as say:
        say("reading measurements", 0, 1)
        dataset = read_dataset(data, device)
        say("reading measurements", 1, 1)
        regret = train(
            dataset,
            out,
            seed=seed,
            exclude=exclude,
            families=families,
            problems=problems,
            say=say,
        )
    click.echo(
        f"{out}: trained on {dataset.device.key}; regret on held-out networks: geomean "
        f"{regret.geomean:.3f}, p95 {regret.p95:.3f}, worst {regret.worst:.3f} "
        f"({regret.problems} problems)"
    )

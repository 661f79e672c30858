"""`confpred report`: models, evaluations and measurements as one page."""

from __future__ import annotations

from pathlib import Path

import click

from confpred.cli.inputs import FILE_OR_FOLDER
from confpred.cli.outputs import check_files, force_option
from confpred.report import require_packages
from confpred.training import require_packages as require_training


@click.command()
@click.argument("sources", nargs=-1, required=True, type=FILE_OR_FOLDER)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The HTML file to write."
)
@click.option("--device", "--gpu", help="Use the measurements of this device alone.")
@click.option("--folds", type=click.IntRange(2, 50), default=5, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@force_option
def command(
    sources: tuple[Path, ...], out: Path, device: str | None, folds: int, seed: int, force: bool
) -> None:
    """Write what is known of a model or of measurements as one HTML page.

    SOURCES are any of these, each known by what it is: a model folder, or a folder of them;
    evaluations, as `confpred evaluate --json` writes them (.json); and Parquet files of
    measurements, or folders of them. Measurements of a device without an evaluation are judged
    first, by --folds and --seed as `confpred evaluate` has them, which takes minutes.

    The page has the regret by family, direction, dtype, batch, network and device, how often the
    bound holds, the 20 worst layers with their candidates, the features that a model rests on, the
    noise of the measurements, and where everything comes from. It is one file: plots, style and
    script are inside it, and it asks no server for anything.

    \b
    confpred report models datasets/h100 datasets/h200 benchmarks/results/*/evaluation.json \\
      --out report.html
    confpred report runs/ --out report.html
    confpred report models/ --out models.html
    """
    require_training()
    require_packages()
    check_files({"out": out}, force=force, inputs=sources)
    from confpred.report.inputs import judge_here, read_inputs
    from confpred.report.page import write_page

    inputs = read_inputs(sources, device, judge_here(folds, seed))
    write_page(inputs, out, replace=force)
    layers = sum(len(evaluation.layers) for evaluation in inputs.evaluations)
    click.echo(f"{out}: {len(inputs.files)} files, {layers} judged layers")

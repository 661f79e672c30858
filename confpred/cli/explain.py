"""`confpred explain`: why a layer gets the config that it gets."""

from __future__ import annotations

import json
from pathlib import Path

import click

from confpred.cli.inputs import FOLDER
from confpred.cli.layers import layer_options, plan_option, problems_of
from confpred.cli.outputs import check_files, force_option
from confpred.predict.choice import MAX_TOP


@click.command()
@layer_options
@click.option("--device", "--gpu", required=True, help="Kind of GPU, such as h100.")
@click.option(
    "--top",
    type=click.IntRange(1, MAX_TOP),
    default=5,
    show_default=True,
    help="How many candidates to tell of, the best one included.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the explanations as JSON.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Write a plot of the only layer: PNG, or SVG where the name ends in .svg.",
)
@click.option("--model", type=FOLDER, help="Model folder; default: the newest.")
@plan_option
@force_option
def command(
    layers: tuple[str, ...],
    operation: str,
    network: Path | None,
    device: str,
    top: int,
    as_json: bool,
    plot: Path | None,
    model: Path | None,
    plan: Path | None,
    force: bool,
) -> None:
    """Say why a layer gets the config that it gets. Needs no GPU.

    An explanation has the choice with its source and the bound on its regret; the runners-up with
    their expected times; the roofline, and how much of it is reached; PyTorch's expected time; what
    makes the choice faster than the next best config of its family, and than a middling one; and
    the layers that were measured and are most like this one. `confpred.explain_layer` is the same
    in Python, and `confpred.explain` tells what runs in each layer of a network.

    \b
    confpred explain --gpu h200 \\
      --layer "n=32 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1"
    confpred explain --gpu h200 --plot why.png \\
      --layer "n=33 c=96 h=56 w=56 k=96 r=5 s=5 groups=96 padding=2"
    confpred explain --gpu h100 --network datasets/suites/smoke.json --json

    The factors under "Why not" multiply to the ratio of the two expected times. A factor above 1
    speaks for the choice. Each is the share of one group of features that differ between the two
    configs: the config's own fields, occupancy, waves of blocks, wasted work, memory access, amount
    of work, and the family's own estimate.
    """
    from confpred.predict.explain import explain_layers
    from confpred.predict.predictor import Predictor

    problems = problems_of(layers, operation, network)
    if plot is not None and len(problems) != 1:
        raise click.UsageError(f"--plot shows one layer; {len(problems)} were given")
    check_files({"plot": plot}, force=force, inputs=[network, model, plan])
    if plot is not None:
        from confpred.report import require_packages

        require_packages()
    predictor = Predictor.load(model, plan=plan)
    found = list(explain_layers(problems, device, top=top, predictor=predictor))
    if plot is not None:
        from confpred.report.explained import plot_explanation

        plot_explanation(found[0], plot, replace=force)
    if as_json:
        content = {"explanations": [explanation.to_json() for explanation in found]}
        click.echo(json.dumps(content, indent=1))
    else:
        click.echo("\n\n\n".join(map(str, found)))

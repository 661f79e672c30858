"""`confpred plan`: the choices of a network as one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.inputs import FILE, FOLDER
from confpred.cli.layers import aligned, layer_options, problems_of
from confpred.cli.outputs import check_files, force_option
from confpred.errors import ConfpredError

if TYPE_CHECKING:
    from confpred.predict.choice import Choice
    from confpred.predict.plans import Plan

_HEADINGS = ("layer", "source", "provider", "ms", "config")


@click.group()
def command() -> None:
    """Write, show or check a plan: every choice of a network on a device, in one small file.

    A start from a plan asks no model, and is the same on all machines and ranks. Inside PyTorch,
    `with confpred.record_plan("plan.json"):` around a step writes one. A plan that was made for
    other kernels or for another device is refused, with the reason.

    \b
    confpred plan export --device h100 --network datasets/suites/smoke.json --out plan.json
    confpred plan show plan.json
    confpred plan check plan.json --device h100
    confpred predict --pins plan.json --device h100 \\
      --layer "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1"
    """


@command.command()
@click.option("--device", "--gpu", required=True, help="Kind of GPU, such as h100.")
@layer_options
@click.option("--model", type=FOLDER, help="Model folder; default: the newest.")
@click.option("--pins", type=FILE, help="File of pinned configs, or another plan.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The plan to write.")
@force_option
def export(
    device: str,
    network: Path | None,
    layers: tuple[str, ...],
    operation: str,
    model: Path | None,
    pins: Path | None,
    out: Path,
    force: bool,
) -> None:
    """Choose for all layers of a network, and write the plan. Needs no GPU.

    \b
    confpred plan export --device h100 --network datasets/suites/smoke.json --out plan.json
    confpred plan export --device h200 --out plan.json \\
      --layer "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1" \\
      --layer "n=32 c=96 h=56 w=56 k=96 r=7 s=7 groups=96 padding=3 bias=true"
    """
    from confpred.predict.plans import plan_of, write_plan
    from confpred.predict.predictor import Predictor

    check_files({"out": out}, force=force, inputs=[network, model, pins])
    problems = problems_of(layers, operation, network)
    plan = plan_of(Predictor.load(model, pins=pins).choose_many(problems, device))
    write_plan(out, plan, replace=force)
    click.echo(f"{out}: {_summary(plan)}")


@command.command()
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the choices as predict --json does.")
def show(file: Path, as_json: bool) -> None:
    """Print the choices of a plan, even if it was made for other kernels.

    \b
    confpred plan show plan.json
    confpred plan show plan.json --json
    """
    from confpred.predict.choice import answers_json
    from confpred.predict.plans import read_plan

    plan = read_plan(file, any_kernels=True)
    if as_json:
        click.echo(answers_json([choice] for choice in plan.choices))
        return
    for line in _table(plan):
        click.echo(line)


@command.command()
@click.argument("file", type=FILE)
@click.option("--device", "--gpu", help="The kind of GPU that the plan is to be for, such as h100.")
@click.option("--model", type=FOLDER, help="Model folder to compare with; default: the newest.")
def check(file: Path, device: str | None, model: Path | None) -> None:
    """Say whether a plan can be used here: exit code 0, or 2 and the reason.

    Choices that the model of today would make otherwise are counted; they are no error.

    \b
    confpred plan check plan.json
    confpred plan check plan.json --device h100
    """
    from confpred.predict.plans import plan_of, read_plan
    from confpred.predict.predictor import Predictor

    try:
        plan = read_plan(file, device)
    except ConfpredError as error:
        click.echo(f"confpred: {error}", err=True)
        sys.exit(2)
    problems = [choice.problem for choice in plan.choices]
    today = plan_of(Predictor.load(model).choose_many(problems, plan.device))
    pairs = zip(plan.choices, today.choices, strict=True)
    other = sum(planned.candidate != now.candidate for planned, now in pairs)
    named = today.model or "without a model"
    click.echo(f"{file}: {_summary(plan)}; today's answers ({named}) differ in {other}")


def _summary(plan: Plan) -> str:
    ours = sum(choice.family is not None for choice in plan.choices)
    layers = "1 layer" if len(plan.choices) == 1 else f"{len(plan.choices)} layers"
    return (
        f"{layers} on {plan.device.key}, {ours} by {len(plan.specs())} kernels of confpred, "
        f"{len(plan.choices) - ours} by PyTorch's operator"
    )


def _table(plan: Plan) -> Iterator[str]:
    """The choices in aligned columns, and a last line of what the plan is for."""
    rows = [_HEADINGS, *map(_row, plan.choices)]
    yield from aligned(rows)
    made = f"confpred {plan.confpred}" + (f", model {plan.model}" if plan.model else "")
    yield f"{_summary(plan)}; made by {made}"
    outdated = plan.outdated()
    if outdated is not None:
        yield f"cannot be used here: {outdated}"


def _row(choice: Choice) -> tuple[str, ...]:
    return (
        str(choice.problem),
        choice.source,
        choice.provider,
        "" if choice.predicted_ms is None else f"{choice.predicted_ms:.4f}",
        " ".join(f"{k}={v}" for k, v in (choice.config or {}).items()),
    )

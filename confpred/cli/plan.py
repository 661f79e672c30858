"""`confpred plan`: the choices of a network as a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.inputs import FILE_OR_FOLDER, FOLDER
from confpred.cli.layers import aligned, layer_options, plan_option, problems_of
from confpred.cli.outputs import check_files, check_new_folder, force_option
from confpred.errors import ConfpredError

if TYPE_CHECKING:
    from confpred.predict.choice import Choice
    from confpred.predict.plan import Plan

_HEADINGS = ("layer", "source", "provider", "ms", "config")


@click.group()
def command() -> None:
    """Write, show or check a plan: choices that are taken as they are.

    A plan has the choices of some layers or of all, in one small file. A start from a plan asks no
    model, and is the same on all machines and ranks. Where the compiled kernels go along, the plan
    is a folder, and a start needs no compiler. Inside PyTorch, `confpred.record_plan` and
    `confpred.prepare` write plans, and `confpred.use_plan` follows them. A plan that was made for
    other kernels or for another device is refused, with the reason.

    \b
    confpred plan export --device h100 --network datasets/suites/smoke.json --out plan.json
    confpred plan show plan.json
    confpred plan check plan.json --device h100
    confpred predict --plan plan.json --device h100 \\
      --layer "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1"
    """


@command.command()
@click.option("--device", "--gpu", required=True, help="Kind of GPU, such as h100.")
@layer_options
@click.option("--model", type=FOLDER, help="Model folder; default: the newest.")
@plan_option
@click.option("--kernels", is_flag=True, help="Compile the kernels, and write a folder with them.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The plan to write.")
@force_option
def export(
    device: str,
    network: Path | None,
    layers: tuple[str, ...],
    operation: str,
    model: Path | None,
    plan: Path | None,
    kernels: bool,
    out: Path,
    force: bool,
) -> None:
    """Choose for all layers of a network, and write the plan. Needs no GPU.

    \b
    confpred plan export --device h100 --network datasets/suites/smoke.json --out plan.json
    confpred plan export --device h200 --kernels --out plan \\
      --layer "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1" \\
      --layer "n=32 c=96 h=56 w=56 k=96 r=7 s=7 groups=96 padding=3 bias=true"
    """
    from confpred.predict.plan import plan_of, write_plan
    from confpred.predict.predictor import Predictor

    if kernels:
        check_new_folder("out", out)
    else:
        check_files({"out": out}, force=force, inputs=[network, model, plan])
    problems = problems_of(layers, operation, network)
    made = plan_of(Predictor.load(model, plan=plan).choose_many(problems, device))
    compiled = None
    if kernels:
        from confpred.cuda.compiling import compiled_files  # needs the extra gpu

        compiled = compiled_files(made.specs(), made.arch)
    write_plan(out, made, kernels=compiled, replace=force)
    click.echo(f"{out}: {_summary(made)}")


@command.command()
@click.argument("path", type=FILE_OR_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print the choices as predict --json does.")
def show(path: Path, as_json: bool) -> None:
    """Print the choices of a plan, even if it was made for other kernels.

    \b
    confpred plan show plan.json
    confpred plan show plan.json --json
    """
    from confpred.predict.choice import answers_json
    from confpred.predict.plan import read_plan

    plan = read_plan(path, any_kernels=True)
    if as_json:
        click.echo(answers_json([choice] for choice in plan.choices))
        return
    for line in _table(plan):
        click.echo(line)


@command.command()
@click.argument("path", type=FILE_OR_FOLDER)
@click.option("--device", "--gpu", help="The kind of GPU that the plan is to be for, such as h100.")
@click.option("--model", type=FOLDER, help="Model folder to compare with; default: the newest.")
def check(path: Path, device: str | None, model: Path | None) -> None:
    """Say whether a plan can be used here: exit code 0, or 2 and the reason.

    Choices that the model of today would make otherwise are counted; they are no error.

    \b
    confpred plan check plan.json
    confpred plan check plan.json --device h100
    """
    from confpred.predict.plan import plan_of, read_plan
    from confpred.predict.predictor import Predictor

    try:
        plan = read_plan(path, device)
    except ConfpredError as error:
        click.echo(f"confpred: {error}", err=True)
        sys.exit(2)
    predictor = Predictor.load(model)
    today = [predictor.choose(choice.problem, choice.device) for choice in plan.choices]
    pairs = zip(plan.choices, plan_of(today).choices if today else (), strict=True)
    other = sum(planned.candidate != now.candidate for planned, now in pairs)
    named = " ".join(sorted({c.model for c in today if c.model})) or "without a model"
    click.echo(f"{path}: {_summary(plan)}; today's answers ({named}) differ in {other}")


def _summary(plan: Plan) -> str:
    ours = sum(choice.family is not None for choice in plan.choices)
    layers = "1 layer" if len(plan.choices) == 1 else f"{len(plan.choices)} layers"
    devices = " and ".join(device.key for device in plan.devices) or "no device"
    return (
        f"{layers} on {devices}, {ours} by {len(plan.specs())} kernels of confpred, "
        f"{len(plan.choices) - ours} by PyTorch's operator"
    )


def _table(plan: Plan) -> Iterator[str]:
    """The choices in aligned columns, and a last line of what the plan is for."""
    rows = [_HEADINGS, *map(_row, plan.choices)]
    yield from aligned(rows)
    made = "hand" if plan.confpred is None else f"confpred {plan.confpred}"
    yield f"{_summary(plan)}; made by {made}" + (f", model {plan.model}" if plan.model else "")
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

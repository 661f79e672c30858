"""Commands that choose configs without a GPU: `confpred predict`, `explain` and `plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from confpred.cli.arguments import (
    FILE_OR_FOLDER,
    FOLDER,
    OUTPUT,
    aligned,
    check_files,
    check_new_folder,
    device_option,
    force_option,
    json_option,
    layer_options,
    model_option,
    plan_option,
    predictor_for,
    problems_of,
    require_packages,
)
from confpred.errors import ConfpredError, InvalidInput
from confpred.predict.choice import MAX_TOP, Choice, answers_json
from confpred.problem.limits import Limits

if TYPE_CHECKING:
    from confpred.predict.plan import Plan

_PLAN_HEADINGS = ("layer", "source", "provider", "ms", "config")
_ANSWER_HEADINGS = (
    "rank", "source", "provider", "ms", "PyTorch ms", "measured on", "bound", "confidence",
)  # fmt: skip
#: About guesses, by their source and whether they are launched.
_GUESSES = {
    ("heuristic", False): "an estimate, without a model of such layers; PyTorch's operator runs",
    ("transferred", False): (
        "by the model of another device; PyTorch's operator runs unless it is measured"
    ),
    ("transferred", True): "by the model of another device of this architecture; not measured here",
}


top_option = partial(click.option, "--top", type=click.IntRange(1, MAX_TOP), show_default=True)


@click.command("predict")
@layer_options
@device_option
@top_option(default=1, help="How many configs to name for each layer, best first.")
@click.option(
    "--max-regret",
    type=click.FloatRange(min=1),
    metavar="FACTOR",
    help="Name PyTorch's own operator where the bound on a choice's regret is above this.",
)
@click.option("--workspace-limit", type=click.IntRange(0), help="Most bytes beside the tensors.")
@click.option("--max-error", type=float, help="Largest relative error; default: PyTorch's.")
@click.option("--deterministic", is_flag=True, help="Only configs that repeat to the bit.")
@click.option("--no-tf32", is_flag=True, help="No config that rounds inputs to TF32.")
@json_option(help="Print what the HTTP service would reply.")
@model_option
@plan_option
def predict(
    layers: tuple[str, ...],
    operation: str | None,
    network: Path | None,
    device: str,
    top: int,
    max_regret: float | None,
    workspace_limit: int | None,
    max_error: float | None,
    deterministic: bool,
    no_tf32: bool,
    as_json: bool,
    model: Path | None,
    plan: Path | None,
) -> None:
    """Name the best config of a layer or a network.

    A convolution needs n c h w k r s; stride, padding, dilation, groups, dtype, direction, bias,
    activation, residual and deterministic have defaults, PyTorch's where it has the argument. A
    pair such as padding is one integer, or two joined by x.

    A one-dimensional layer has no h and r. A three-dimensional one has a depth d, and t, the depth
    of its filter; stride and padding may be three integers, depth first. Further fields of these:
    layout=channels_first, where tensors are (N, C, D, H, W); cut=2, where the last two outputs
    are left out, as causal layers do; rank=2, for two dimensions with such fields. A
    bias and an activation of direction=dgrad make it a transposed convolution. Another --operation,
    such as linear_chain, has fields of its own.

    \b
    confpred predict --device h100 \\
      --layer "n=32 c=64 h=56 w=56 k=64 r=3 s=3 groups=8 padding=1"
    confpred predict --device h100 --top 5 \\
      --layer "n=8 c=256 h=28 w=28 k=256 r=3 s=3 groups=32 padding=1 bias=true activation=relu"
    confpred predict --device h100 \\
      --layer "n=8 c=2048 w=4096 k=2048 s=4 groups=2048 padding=3 cut=3 layout=channels_first"
    confpred predict --device h100 \\
      --layer "n=8 c=54 d=16 h=56 w=56 k=54 t=3 r=3 s=3 groups=54 padding=1 stride=1x2x2"
    confpred predict --device h100 --network datasets/suites/smoke.json --json
    """

    limits = Limits(workspace_limit, deterministic, not no_tf32, max_error)
    problems = problems_of(layers, operation, network)
    predictor = predictor_for(problems, model, plan).within(limits)
    answers = [predictor.rank(problem, device, top, max_regret=max_regret) for problem in problems]
    click.echo(answers_json(answers) if as_json else "\n".join(_answer_table(answers)))


def _answer_table(answers: Sequence[Sequence[Choice]]) -> Iterator[str]:
    rows: list[Sequence[str]] = [_ANSWER_HEADINGS]
    heads: list[str] = []  # the line above each row
    configs: list[str] = []  # the line below it
    for choices in answers:
        for rank, choice in enumerate(choices, 1):
            cells = _cells(choice) | {"rank": str(rank)}
            if rank > 1:
                cells |= dict.fromkeys(("bound", "confidence"), "")
            rows.append([cells[heading] for heading in _ANSWER_HEADINGS])
            heads.append(cells["layer"] if rank == 1 else "")
            configs.append(cells["config"])
    first, *lines = aligned(rows)
    yield first
    for line, head, config in zip(lines, heads, configs, strict=True):
        yield from filter(None, (head, line, f"      {config}" if config else ""))
    models = sorted({c.model for choices in answers for c in choices if c.model is not None})
    if any(choices[0].regret_bound is not None for choices in answers):
        yield (
            f"model {' and '.join(models)}: with 95 % confidence a choice is at most its bound "
            "times as slow as the best config"
        )
    guesses = {(c.source, c.is_launched) for c, *_ in answers if c.is_guess}
    yield from (f"{guess[0]}: {_GUESSES[guess]}" for guess in sorted(guesses))
    if any(choices[0].extrapolated for choices in answers):
        yield "out of distribution: no similar layer was measured, so no bound was calibrated"


def _cells(choice: Choice) -> dict[str, str]:
    """Return the columns of a table by their headings."""
    bound, times = choice.regret_bound, (choice.predicted_ms, choice.pytorch_ms)
    predicted, pytorch = ("" if ms is None else f"{ms:.4f}" for ms in times)
    shown = "" if bound is None else f"{bound:.3f}"
    confidence = "none" if choice.confidence is None else f"{choice.confidence * 100:.0f} %"
    return {
        "layer": str(choice.problem),
        "source": choice.source,
        "provider": choice.provider,
        "ms": predicted,
        "PyTorch ms": pytorch,
        "measured on": choice.measured_on or "none",
        "bound": "out of distribution" if choice.extrapolated else shown,
        "confidence": confidence,
        "config": " ".join(f"{k}={v}" for k, v in (choice.config or {}).items()),
    }


@click.command("explain")
@layer_options
@device_option
@top_option(default=5, help="How many candidates to list, the best one included.")
@json_option(help="Print the explanations as JSON.")
@click.option(
    "--plot",
    type=OUTPUT,
    help="Write a plot of the only layer, .png or .svg.",
)
@model_option
@plan_option
@force_option
def explain(
    layers: tuple[str, ...],
    operation: str | None,
    network: Path | None,
    device: str,
    top: int,
    as_json: bool,
    plot: Path | None,
    model: Path | None,
    plan: Path | None,
    force: bool,
) -> None:
    """Explain why a layer gets its config. Needs no GPU.

    An explanation has the choice with its source and the bound on its regret; the runners-up with
    their expected times; the roofline, and how much of it is reached; PyTorch's expected time; what
    makes the choice faster than the next best config of its family, and than an average one; and
    the measured layers that are most similar to this one. `confpred.explain_layer` is the same in
    Python, and `confpred.explain` lists the kernel of each layer of a network.

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

    problems = problems_of(layers, operation, network)
    if plot is not None and len(problems) != 1:
        raise click.UsageError(f"--plot shows one layer; {len(problems)} were given")
    check_files({"plot": plot}, force=force, inputs=[network, model, plan])
    if plot is not None:
        if plot.suffix.lower() not in ("", ".png", ".svg"):
            raise InvalidInput("plot", str(plot), "a name that ends in .png or .svg")
        if not plot.parent.is_dir():
            raise InvalidInput(
                "plot", str(plot), f"a folder that exists, and {plot.parent} is none"
            )
        require_packages("train", "matplotlib")
    predictor = predictor_for(problems, model, plan)
    explanations = list(explain_layers(problems, device, top=top, predictor=predictor))
    if plot is not None:
        from confpred.report.charts import plot_explanation

        plot_explanation(explanations[0], plot, replace=force)
    if as_json:
        content = {"explanations": [explanation.to_json() for explanation in explanations]}
        click.echo(json.dumps(content, indent=1))
    else:
        click.echo("\n\n\n".join(map(str, explanations)))


@click.group("plan")
def plan() -> None:
    """Write, show or check a plan: fixed choices for some layers.

    A plan has the choices of some or all layers of a network, in one small file. A process with a
    plan loads no model, and all machines and ranks choose the same. With the compiled kernels the
    plan is a folder, and a process needs no compiler. Inside PyTorch, `confpred.record_plan` and
    `confpred.prepare` write plans, and `confpred.use_plan` follows them. A plan that was made for
    other kernels or for another device is refused, with the reason.

    \b
    confpred plan export --device h100 --network datasets/suites/smoke.json --out plan.json
    confpred plan show plan.json
    confpred plan check plan.json --device h100
    confpred predict --plan plan.json --device h100 \\
      --layer "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1"
    """


@plan.command()
@device_option
@layer_options
@model_option
@plan_option
@click.option("--kernels", is_flag=True, help="Compile the kernels, and write a folder with them.")
@click.option("--kept", is_flag=True, help="The answers that tuning measured for the device.")
@click.option("--out", type=OUTPUT, required=True, help="The plan to write.")
@force_option
def export(
    device: str,
    network: Path | None,
    layers: tuple[str, ...],
    operation: str | None,
    model: Path | None,
    plan: Path | None,
    kernels: bool,
    kept: bool,
    out: Path,
    force: bool,
) -> None:
    """Choose for all layers of a network, and write the plan. Needs no GPU.

    With --kept the plan has what `confpred.optimize` measured and kept in place of a network.

    \b
    confpred plan export --device h100 --network datasets/suites/smoke.json --out plan.json
    confpred plan export --device h200 --kernels --out plan \\
      --layer "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1" \\
      --layer "n=32 c=96 h=56 w=56 k=96 r=7 s=7 groups=96 padding=3 bias=true"
    """
    from confpred.predict.plan import plan_of, write_plan

    if kernels:
        check_new_folder("out", out)
    else:
        check_files({"out": out}, force=force, inputs=[network, model, plan])
    if kept and (layers or network):
        raise click.UsageError("give either --kept, or --layer or --network")
    if kept:
        made = plan_of(kept_choices(device, operation))
    else:
        problems = problems_of(layers, operation, network)
        made = plan_of(predictor_for(problems, model, plan).choose_many(problems, device))
    compiled = None
    if kernels:
        from confpred.cuda.compiler import compiled_files  # needs the extra gpu

        compiled = compiled_files(made.specs(), made.arch)
    write_plan(out, made, kernels=compiled, replace=force)
    click.echo(f"{out}: {_plan_summary(made)}")


def kept_choices(device: str, operation: str | None) -> list[Choice]:
    """Return the answers that tuning has kept for a device.

    Raises:
        InvalidInput: there are none.
    """
    from confpred.families.registry import operation_named
    from confpred.problem.device import get_device
    from confpred.problem.limits import UNLIMITED

    require_packages("data", "pyarrow")
    from confpred.sampler.kept import answers

    known = get_device(device)
    found = answers(known, operation_named(operation or "conv2d"), UNLIMITED)
    if not found:
        raise InvalidInput("device", known.key, "a device that tuning has measured here")
    return found


@plan.command()
@click.argument("path", type=FILE_OR_FOLDER)
@json_option(help="Print the choices as predict --json does.")
def show(path: Path, as_json: bool) -> None:
    """Print the choices of a plan, even if it was made for other kernels.

    \b
    confpred plan show plan.json
    confpred plan show plan.json --json
    """
    from confpred.predict.plan import read_plan

    plan = read_plan(path, any_kernels=True)
    if as_json:
        click.echo(answers_json([choice] for choice in plan.choices))
    else:
        click.echo("\n".join(_plan_table(plan)))


@plan.command()
@click.argument("path", type=FILE_OR_FOLDER)
@click.option("--device", "--gpu", help="GPU model that the plan must be for, such as h100.")
@click.option("--model", type=FOLDER, help="Model folder to compare with; default: the newest.")
def check(path: Path, device: str | None, model: Path | None) -> None:
    """Check whether a plan can be used here: exit code 0, or 2 and the reason.

    Choices that differ from those of the present model are counted; they are no error.

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
    others = [operation.name for operation in plan.operations[1:]]
    predictor = Predictor.load(model, operation=plan.operation.name, further=others)
    today = [predictor.choose(choice.problem, choice.device) for choice in plan.choices]
    pairs = zip(plan.choices, plan_of(today).choices if today else (), strict=True)
    other = sum(planned.candidate != now.candidate for planned, now in pairs)
    named = " ".join(sorted({c.model for c in today if c.model})) or "without a model"
    click.echo(f"{path}: {_plan_summary(plan)}; today's answers ({named}) differ in {other}")


def _plan_summary(plan: Plan) -> str:
    ours = sum(choice.family is not None for choice in plan.choices)
    layers = "1 layer" if len(plan.choices) == 1 else f"{len(plan.choices)} layers"
    devices = " and ".join(device.key for device in plan.devices) or "no device"
    return (
        f"{layers} on {devices}, {ours} by {len(plan.specs())} kernels of confpred, "
        f"{len(plan.choices) - ours} by PyTorch's operator"
    )


def _plan_table(plan: Plan) -> Iterator[str]:
    cells = map(_cells, plan.choices)
    yield from aligned([_PLAN_HEADINGS, *([row[name] for name in _PLAN_HEADINGS] for row in cells)])
    made = "hand" if plan.confpred is None else f"confpred {plan.confpred}"
    yield f"{_plan_summary(plan)}; made by {made}" + (f", model {plan.model}" if plan.model else "")
    if (outdated := plan.outdated()) is not None:
        yield f"cannot be used here: {outdated}"

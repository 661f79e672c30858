"""`confpred predict`: the best config of a layer or a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from confpred.cli.inputs import FOLDER
from confpred.cli.layers import aligned, layer_options, plan_option, problems_of
from confpred.predict.choice import MAX_TOP, Choice, answers_json
from confpred.problem.limits import Limits

_HEADINGS = (
    "layer", "rank", "source", "provider", "ms", "PyTorch ms", "measured on", "bound", "confidence",
    "config",
)  # fmt: skip


@click.command()
@layer_options
@click.option("--device", "--gpu", required=True, help="Kind of GPU, such as h100.")
@click.option(
    "--top",
    type=click.IntRange(1, MAX_TOP),
    default=1,
    show_default=True,
    help="How many configs to name for each layer, best first.",
)
@click.option(
    "--max-regret",
    type=click.FloatRange(min=1),
    metavar="FACTOR",
    help="Name PyTorch's own operator where the bound on a choice's regret is above this.",
)
@click.option("--workspace-limit", type=click.IntRange(0), help="Most bytes beside the tensors.")
@click.option("--max-error", type=float, help="Largest relative error; default: as PyTorch's own.")
@click.option("--deterministic", is_flag=True, help="Only what repeats to the bit.")
@click.option("--no-tf32", is_flag=True, help="Nothing that rounds float32 inputs to TF32.")
@click.option("--json", "as_json", is_flag=True, help="Print what the HTTP service would reply.")
@click.option("--model", type=FOLDER, help="Model folder; default: the newest.")
@plan_option
def command(
    layers: tuple[str, ...],
    operation: str,
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
    pair such as padding is one integer, or two joined by x. Another operation, of a family named by
    CONFPRED_FAMILIES, has fields of its own.

    \b
    confpred predict --device h100 \\
      --layer "n=32 c=64 h=56 w=56 k=64 r=3 s=3 groups=8 padding=1"
    confpred predict --device h100 --top 5 \\
      --layer "n=8 c=256 h=28 w=28 k=256 r=3 s=3 groups=32 padding=1 bias=true activation=relu"
    confpred predict --device h100 --network datasets/suites/smoke.json --json
    """
    from confpred.predict.predictor import Predictor

    limits = Limits(workspace_limit, deterministic, not no_tf32, max_error)
    problems = problems_of(layers, operation, network)
    predictor = Predictor.load(model, plan=plan).within(limits)
    answers = [predictor.rank(problem, device, top, max_regret=max_regret) for problem in problems]
    if as_json:
        click.echo(answers_json(answers))
    else:
        for line in _table(answers):
            click.echo(line)


def _table(answers: Sequence[Sequence[Choice]]) -> Iterable[str]:
    """The answers in aligned columns, and a last line that says what the bounds are."""
    rows = [_HEADINGS]
    for choices in answers:
        for rank, choice in enumerate(choices, 1):
            rows.append(
                (
                    str(choice.problem) if rank == 1 else "",
                    str(rank),
                    choice.source,
                    choice.provider,
                    _ms(choice.predicted_ms),
                    _ms(choice.pytorch_ms),
                    choice.measured_on or "none",
                    _bound(choice) if rank == 1 else "",
                    _confidence(choice) if rank == 1 else "",
                    " ".join(f"{k}={v}" for k, v in (choice.config or {}).items()),
                )
            )
    yield from aligned(rows)
    models = sorted({c.model for choices in answers for c in choices if c.model is not None})
    if any(choices[0].regret_bound is not None for choices in answers):
        yield (
            f"model {' and '.join(models)}: with 95 % confidence a choice is at most its bound "
            "times as slow as the best config"
        )
    guesses = {choices[0].source for choices in answers if choices[0].is_guess}
    for source in sorted(guesses):
        yield f"{source}: {_GUESSES[source]}"
    if any(choices[0].extrapolated for choices in answers):
        yield "unlike: no layer in the model's data is like this one, so no bound was calibrated"


_GUESSES = {
    "heuristic": "an estimate, as no model knows such layers here; PyTorch's operator runs",
    "transferred": "by the model of another device; PyTorch's operator runs unless it is measured",
}


def _ms(time_ms: float | None) -> str:
    return "" if time_ms is None else f"{time_ms:.4f}"


def _confidence(choice: Choice) -> str:
    return "none" if choice.confidence is None else f"{choice.confidence * 100:.0f} %"


def _bound(choice: Choice) -> str:
    if choice.extrapolated:
        return "unlike"
    return "" if choice.regret_bound is None else f"{choice.regret_bound:.3f}"

"""`confpred predict`: the best config of a layer or a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from confpred.cli.inputs import FILE, FOLDER
from confpred.cli.layers import aligned, layer_options, problems_of
from confpred.predict.choice import MAX_TOP, Choice, answers_json
from confpred.problem.limits import Limits

_HEADINGS = ("layer", "rank", "source", "provider", "ms", "config")


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
@click.option("--workspace-limit", type=click.IntRange(0), help="Most bytes beside the tensors.")
@click.option("--max-error", type=float, help="Largest relative error; default: as PyTorch's own.")
@click.option("--deterministic", is_flag=True, help="Only what repeats to the bit.")
@click.option("--no-tf32", is_flag=True, help="Nothing that rounds float32 inputs to TF32.")
@click.option("--json", "as_json", is_flag=True, help="Print what the HTTP service would reply.")
@click.option("--model", type=FOLDER, help="Model folder; default: the newest.")
@click.option("--pins", "--plan", type=FILE, help="File of pinned configs, or a plan.")
def command(
    layers: tuple[str, ...],
    operation: str,
    network: Path | None,
    device: str,
    top: int,
    workspace_limit: int | None,
    max_error: float | None,
    deterministic: bool,
    no_tf32: bool,
    as_json: bool,
    model: Path | None,
    pins: Path | None,
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
    predictor = Predictor.load(model, pins=pins).within(limits)
    answers = [predictor.rank(problem, device, top) for problem in problems]
    if as_json:
        click.echo(answers_json(answers))
    else:
        for line in _table(answers):
            click.echo(line)


def _table(answers: Sequence[Sequence[Choice]]) -> Iterable[str]:
    """The answers in aligned columns, and a last line with the bound on their regret."""
    rows = [_HEADINGS]
    for choices in answers:
        for rank, choice in enumerate(choices, 1):
            rows.append(
                (
                    str(choice.problem) if rank == 1 else "",
                    str(rank),
                    choice.source,
                    choice.provider,
                    "" if choice.predicted_ms is None else f"{choice.predicted_ms:.4f}",
                    " ".join(f"{k}={v}" for k, v in (choice.config or {}).items()),
                )
            )
    yield from aligned(rows)
    first = answers[0][0]
    if first.regret_bound is not None:
        yield (
            f"model {first.model}: with 95 % confidence at most {first.regret_bound:.3f} times as "
            "slow as the best config"
        )

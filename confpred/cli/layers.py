"""What subcommands that are asked about layers share: their options, and aligned columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from confpred.cli.inputs import FILE, FILE_OR_FOLDER

if TYPE_CHECKING:
    from confpred.problem.record import Record

_OPTIONS = (
    click.option(
        "--layer",
        "layers",
        multiple=True,
        metavar="WORDS",
        help="A layer as field=value words; may be repeated.",
    ),
    click.option(
        "--operation", default="conv2d", show_default=True, help="What the layers of --layer are."
    ),
    click.option("--network", type=FILE, help="A suite file of many layers."),
)

plan_option = click.option(
    "--plan",
    type=FILE_OR_FOLDER,
    help="Plan to follow for the layers that it has: a file, or a folder with kernels.",
)


def layer_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the options that `problems_of` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def problems_of(layers: Sequence[str], operation: str, network: Path | None) -> list[Record]:
    """The layers that were asked about.

    Raises:
        UsageError: both kinds were given, or none.
        InvalidInput, DataError: a layer, the operation or the suite is not valid.
    """
    from confpred.data.suites import read_suite
    from confpred.families.registry import operation_named

    if bool(layers) == (network is not None):
        raise click.UsageError("give either --layer or --network")
    problems: list[Record] = [operation_named(operation).problem.parse(text) for text in layers]
    if network is not None:
        problems = [entry.problem for entry in read_suite(network).entries]
    return problems


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """`rows`, the first of which is the headings, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

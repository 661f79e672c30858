"""``confpred merge``."""

from __future__ import annotations

from pathlib import Path

import click

from confpred.errors import MissingExtra

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("folders", type=_PATH, nargs=-1, required=True, metavar="FOLDER...")
@click.argument("file", type=_PATH)
def command(folders: tuple[Path, ...], file: Path) -> None:
    """Join the measurements in sampler output FOLDERs into one sorted Parquet FILE."""
    try:
        from confpred.sampler.store import merge
    except ImportError as error:
        raise MissingExtra(str(error.name), "gpu") from error
    click.echo(f"{merge(folders, file)} rows in {file}")

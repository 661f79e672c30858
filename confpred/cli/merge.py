"""``confpred merge``."""

from __future__ import annotations

from pathlib import Path

import click

from confpred.cli.inputs import FOLDER
from confpred.cli.outputs import check_files, force_option
from confpred.errors import InvalidInput, MissingExtra


@click.command()
@click.argument("folders", type=FOLDER, nargs=-1, required=True, metavar="FOLDER...")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--anchors", is_flag=True, help="Join what every run has measured again, instead.")
@force_option
def command(folders: tuple[Path, ...], file: Path, anchors: bool, force: bool) -> None:
    """Join the measurements in sampler output FOLDERs into one sorted Parquet FILE.

    \b
    confpred merge runs/h100 runs/h100.parquet
    confpred merge runs/first runs/second runs/all.parquet --force
    """
    try:
        from confpred.data.merging import is_shard_of, merge, shards_in
    except ImportError as error:
        raise MissingExtra(str(error.name), "data") from error
    inputs = [shard for folder in folders for shard in shards_in(folder, anchors=anchors)]
    check_files({"file": file}, force=force, inputs=inputs)
    for folder in folders:
        if is_shard_of(file, folder):
            raise InvalidInput("file", str(file), f"no name of a shard of {folder} itself")
    click.echo(f"{merge(folders, file, replace=force, anchors=anchors)} rows in {file}")

"""``confpred merge``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from confpred.cli.inputs import FOLDER
from confpred.cli.outputs import check_files, check_folder, force_option
from confpred.errors import InvalidInput, MissingExtra


@click.command()
@click.argument("folders", type=FOLDER, nargs=-1, required=True, metavar="FOLDER...")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--anchors", is_flag=True, help="Join what every run has measured again, instead.")
@force_option
def command(folders: tuple[Path, ...], file: Path, anchors: bool, force: bool) -> None:
    """Join the measurements in sampler output FOLDERs into FILE, one sorted Parquet file.

    Where FILE is a folder, or is new and does not end in .parquet, it is a folder of parts: the
    rows that no part has yet become a new part, named for the day, and all parts stay as they are.

    \b
    confpred merge runs/h100 runs/h100.parquet
    confpred merge runs/first runs/second runs/all.parquet --force
    confpred merge runs/h100 datasets/h100
    """
    try:
        from confpred.data.parquet import add_part, is_shard_of, merge, shards_in
    except ImportError as error:
        raise MissingExtra(str(error.name), "data") from error
    if file.is_dir() or (file.suffix != ".parquet" and not os.path.lexists(file)):
        check_folder("file", file)
        made = add_part(folders, file, anchors=anchors)
        click.echo(f"{made[1]} rows in {made[0]}" if made else f"no rows that {file} lacks")
        return
    inputs = [shard for folder in folders for shard in shards_in(folder, anchors=anchors)]
    check_files({"file": file}, force=force, inputs=inputs)
    for folder in folders:
        if is_shard_of(file, folder):
            raise InvalidInput("file", str(file), f"no name of a shard of {folder} itself")
    click.echo(f"{merge(folders, file, replace=force, anchors=anchors)} rows in {file}")

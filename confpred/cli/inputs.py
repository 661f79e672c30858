"""The kinds of files and folders that commands read: click refuses those that are not there, and
names the option."""

from __future__ import annotations

from pathlib import Path

import click

FILE: click.Path = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER: click.Path = click.Path(exists=True, file_okay=False, path_type=Path)
FILE_OR_FOLDER: click.Path = click.Path(exists=True, path_type=Path)

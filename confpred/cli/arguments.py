"""Options and checks that several commands share; a command imports its own modules later."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from confpred.errors import InvalidInput, MissingExtra
from confpred.files import check_writable

if TYPE_CHECKING:
    from confpred.data.remote import Folder
    from confpred.predict.predictor import Predictor
    from confpred.problem.record import Record

# click refuses a missing path, and names the option.
FILE: click.Path = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER: click.Path = click.Path(exists=True, file_okay=False, path_type=Path)
FILE_OR_FOLDER: click.Path = click.Path(exists=True, path_type=Path)
OUTPUT: click.Path = click.Path(path_type=Path)


class _Measurements(click.Path):
    """A folder, or a URL of one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            from confpred.data.remote import folder_at

            value = folder_at(value)
        return super().convert(value, param, ctx) if isinstance(value, str | Path) else value


MEASUREMENTS = _Measurements(exists=True, file_okay=False, path_type=Path)
NEW_MEASUREMENTS = _Measurements(path_type=Path)


def _models_of_gpus(_: Any, __: Any, begun: str) -> list[str]:
    """Return the GPU models that begin with the text typed into a shell."""
    from confpred.problem.device import KNOWN

    return [key for key in KNOWN if key.startswith(begun)]


device_option = click.option(
    "--device", "--gpu", required=True, metavar="MODEL", shell_complete=_models_of_gpus,
    help="GPU model to answer for, such as h100; see confpred devices.",
)  # fmt: skip

folds_option = click.option("--folds", type=click.IntRange(2, 50), default=5, show_default=True)
force_option = click.option(
    "--force", is_flag=True, help="Replace output files that exist; never an input."
)
gpu_option = click.option(
    "--device", default="cuda:0", show_default=True, metavar="CUDA",
    help="GPU of this machine, such as cuda:1.",
)  # fmt: skip

json_option = partial(click.option, "--json", "as_json", is_flag=True)
model_option = click.option("--model", type=FOLDER, help="Model folder; default: the newest.")
plan_option = click.option(
    "--plan",
    type=FILE_OR_FOLDER,
    help="Plan to follow for the layers that it has: a file, or a folder with kernels.",
)
pytorch_option = partial(click.option, "--pytorch/--no-pytorch", default=True, show_default=True)
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True
)
timeout_option = click.option(
    "--timeout", default="60s", show_default=True, help="Kill a GPU worker silent for longer."
)
_LAYER_OPTIONS = (
    click.option("--network", type=FILE, help="A suite file of many layers."),
    click.option(
        "--operation",
        help="Operation of the --layer options.  [default: convolution, of the rank they say]",
    ),
    click.option(
        "--layer",
        "layers",
        multiple=True,
        metavar="WORDS",
        help="A layer as field=value words; may be repeated.",
    ),
)


def layer_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the options that `problems_of` takes."""
    return reduce(lambda made, option: option(made), _LAYER_OPTIONS, command)


def problems_of(layers: Sequence[str], operation: str | None, network: Path | None) -> list[Record]:
    """Return the layers of the options `layer_options`; raise a UsageError if both kinds were
    passed, or none.

    Raises:
        InvalidInput: a layer is not valid, or the layers are of several operations.
    """
    from confpred.data.suites import read_suite
    from confpred.families.registry import operation_named
    from confpred.problem.conv import kind_of
    from confpred.problem.record import texts_of

    if bool(layers) == (network is not None):
        raise click.UsageError("give either --layer or --network")
    if network is not None:
        return [entry.problem for entry in read_suite(network).entries]
    texts = [texts_of(layer) for layer in layers]
    named = operation and operation_named(operation).problem
    problems: list[Record] = [(named or kind_of(fields)).from_texts(fields) for fields in texts]
    for problem in problems:
        if type(problem) is not type(problems[0]):
            allowed = "layers of one operation in a command, such as 2-D convolutions"
            raise InvalidInput("layer", str(problem), allowed)
    return problems


def predictor_for(problems: Sequence[Record], model: Path | None, plan: Path | None) -> Predictor:
    """Return the predictor of the options `--model` and `--plan`, by default the newest models of
    the problems' operation."""
    from confpred.families.registry import operation_of
    from confpred.predict.predictor import Predictor

    return Predictor.load(model, plan=plan, operation=operation_of(problems[0]).name)


def check_files(
    outputs: Mapping[str, Path | None], *, force: bool, inputs: Iterable[Path | None] = ()
) -> None:
    """Check that files can be written, before the command begins to work.

    Args:
        outputs: output files, by option or argument; None for one that was not passed.
        force: existing files may be replaced.
        inputs: files, or folders of files, that the command reads. They are never replaced, even
            if an output is another name of, or a link to, one of them.

    Raises:
        InvalidInput: an output is no file, exists and may not be replaced, is an input, or is
            another output.
        StorageError: the file system would refuse an output.
    """
    read = dict(_identities(inputs))
    written: dict[str, str] = {}
    for field, path in ((field, path) for field, path in outputs.items() if path is not None):
        other = written.setdefault(os.path.realpath(path), field)
        allowed = ""
        if path.is_dir():
            allowed = "a file, and this is a folder"
        elif path.exists() and (source := read.get(_identity(path))) is not None:
            allowed = f"a file that is not an input, and {source} is"
        elif path.exists() and not path.is_file():
            allowed = "a plain file, and this is a device or a pipe"
        elif os.path.lexists(path) and not force:
            allowed = "a new file; it exists, use --force to replace it"
        elif other != field:
            allowed = f"another file than that of {other}"
        if allowed:
            raise InvalidInput(field, str(path), allowed)
        check_writable(path)


def check_new_folder(field: str, path: Path) -> None:
    """Check that a folder can be made; raises as `check_files`."""
    if os.path.lexists(path):
        raise InvalidInput(field, str(path), "a folder that does not exist yet")
    check_writable(path)


def check_folder(field: str, path: Folder) -> None:
    """Check that files can be added to a folder, which is made if it is missing; raises as
    `check_files`. An object store is not checked here."""
    if not isinstance(path, Path):
        return
    if os.path.lexists(path) and not path.is_dir():
        raise InvalidInput(field, str(path), "a folder, and this is a file")
    check_writable(path / field)


def _identities(inputs: Iterable[Path | None]) -> Iterator[tuple[tuple[int, int], Path]]:
    for path in inputs:
        if path is not None and path.exists():
            for file in (*path.iterdir(), path) if path.is_dir() else (path,):
                if file.exists():
                    yield _identity(file), file


def _identity(path: Path) -> tuple[int, int]:
    """Return the device and inode, which all names of a file share."""
    status = path.stat()
    return status.st_dev, status.st_ino


def require_packages(extra: str, *modules: str) -> None:
    """Check that `modules` of `extra` are installed, before any work."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtra(" and ".join(missing), extra)


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Raise an import error in the ``with`` block as a MissingExtra that names `extra`."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(str(error.name), extra) from error


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield `rows`, headings first, as lines with aligned columns.

    rich is not used: installations for predictions lack it, and it cuts long configs to the
    terminal's width.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

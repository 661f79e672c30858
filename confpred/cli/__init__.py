"""The `confpred` command. A subcommand's module is imported only when that subcommand runs."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import click

from confpred.cli.stopping import stop_behind, stop_on_signals
from confpred.errors import ConfpredError, InvalidInput

#: Subcommand -> one-line help. Each lives in the module of its name, as `command`.
COMMANDS = {
    "predict": "Name the best config of a layer or a network.",
    "explain": "Say why a layer gets the config that it gets.",
    "devices": "List the GPUs that are known, and what their models know.",
    "plan": "Write, show or check a plan: choices that are taken as they are.",
    "sample": "Measure configs on this machine's GPUs.",
    "merge": "Join measurements into one file, or add them to a folder.",
    "train": "Train a model from measurements (retrain-predictor).",
    "retrain": "Measure this machine's GPU, train on it, and use the model if it is better.",
    "drift": "Time a few of a model's configs again: does it still hold?",
    "evaluate": "Judge configs chosen for networks that were not trained on.",
    "report": "Write what is known of a model or of measurements as one HTML page.",
    "serve": "Answer config queries over HTTP.",
    "token": "Make an access token for the HTTP service, or revoke one.",
}


#: After how many more objects than were freed Python looks for garbage; it is 700 by default.
_ALLOCATIONS = 50_000


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="confpred")
def cli() -> None:
    """Learned kernel-configuration prediction for convolution on NVIDIA GPUs."""


def main() -> None:
    """Run the command line; expected errors end as one line on stderr and exit code 2 or 1, Ctrl-C
    and SIGTERM as one with 130 and 143."""
    # What is imported and loaded at the start lives on; looking through it for garbage again and
    # again is a tenth of the time of a command that only asks for one prediction.
    gc.set_threshold(_ALLOCATIONS)
    try:
        stop_on_signals()
        cli(standalone_mode=True)
    except BaseException as error:
        stopped = stop_behind(error)
        if stopped is not None:
            click.echo(f"confpred: {stopped}", err=True)
            sys.exit(stopped.exit_code)
        if not isinstance(error, (ConfpredError, OSError)):
            raise
        click.echo(f"confpred: {error}", err=True)  # OSError: standard output may go to a full disk
        sys.exit(2 if isinstance(error, InvalidInput) else 1)

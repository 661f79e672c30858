"""The `confpred` command. A subcommand's module is imported only when that subcommand runs."""

from __future__ import annotations

import gc
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any

import click

from confpred.errors import ConfpredError, DataError, InvalidInput, ModelError, nearest

#: Module of each subcommand, which is a function of its name there, and the one-line help.
COMMANDS = {
    "predict": ("ask", "Name the best config of a layer or a network."),
    "explain": ("ask", "Explain why a layer gets its config."),
    "devices": ("devices", "List the known GPUs and their models."),
    "plan": ("ask", "Write, show or check a plan: fixed choices for some layers."),
    "sample": ("sample", "Measure configs on this machine's GPUs."),
    "merge": ("learn", "Join measurements into one file, or add them to a folder."),
    "train": ("learn", "Train a model from measurements (retrain-predictor)."),
    "retrain": (
        "update",
        "Measure this machine's GPU, train on it, and use the model if it is better.",
    ),
    "submit": ("update", "Send measurements to a service, such as those that tuning has kept."),
    "drift": ("update", "Time a few of a model's configs again, to check the model."),
    "models": ("models", "List, fetch and verify models, here and at a service."),
    "evaluate": ("learn", "Judge configs chosen for networks that were not trained on."),
    "report": ("learn", "Write a report on models or measurements as one HTML page."),
    "export": ("export", "Write a Triton kernel's choices as files that serving engines read."),
    "benchmark": ("benchmark", "Time a network by PyTorch and by confpred on this GPU."),
    "kernel": ("kernel", "Check, time or profile the kernels of a family."),
    "check-family": ("sample", "Check a kernel family of your own against the protocol."),
    "serve": ("serve", "Answer config queries over HTTP."),
    "token": ("serve", "Make an access token for the HTTP service, or revoke one."),
    "exchange": ("serve", "List the uploads of a service, revoke them, or check them again."),
}


#: Allocations beyond deallocations at which Python collects garbage; the default is 700.
_ALLOCATIONS = 50_000


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"{__name__}.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], COMMANDS)
            ctx.fail(f"No such command {args[0]!r}; allowed: {near}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="confpred")
def cli() -> None:
    """Learned kernel-configuration prediction for convolution on NVIDIA GPUs."""


def main() -> None:
    """Run the command line. Expected errors end as one line on stderr with exit code 2 or 1, Ctrl-C
    and SIGTERM with 130 and 143."""
    # Modules imported at the start are never freed. To search them for garbage again and again
    # would take a tenth of the time of a command for one prediction.
    gc.set_threshold(_ALLOCATIONS)
    try:
        stop_on_signals()
        cli(standalone_mode=True)
    except BaseException as error:
        ended = stop_behind(error) or error
        # OSError: standard output may go to a full disk.
        if not isinstance(ended, (Stopped, ConfpredError, OSError)):
            raise
        click.echo(f"confpred: {ended}", err=True)
        wrong = (InvalidInput, DataError, ModelError)  # errors in the command's inputs
        sys.exit(getattr(ended, "exit_code", 2 if isinstance(ended, wrong) else 1))


_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Stopped(BaseException):
    """A signal asked the command to end.

    Attributes:
        exit_code: exit code of the process: 128 plus the signal's number, as shells expect.
    """

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(_WORDS[signal.Signals(number)])


def stop_behind(error: BaseException | None) -> Stopped | None:
    """Return the `Stopped` that is `error`, or that was being raised when a library raised
    `error`."""
    while error is not None and not isinstance(error, Stopped):
        error = error.__cause__ or error.__context__
    return error


def stop_on_signals() -> None:
    """Let the first Ctrl-C or SIGTERM raise `Stopped` in the main thread.

    Further signals are ignored, so that they do not interrupt the cleanup.
    """
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and `&` in a script ask
            signal.signal(number, _stop)


def leave_signals() -> None:
    """Undo `stop_on_signals`, before code that handles these signals itself."""
    usual: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    for number, handler in usual.items():
        if signal.getsignal(number) is _stop:
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _WORDS:
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)

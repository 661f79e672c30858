"""`confpred benchmark`: a network's step by PyTorch and by confpred, on this machine."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from confpred.cli.arguments import aligned, json_option, needing, require_packages
from confpred.errors import ConfpredError, InvalidInput, first_line, nearest

#: Peers that ``--compare`` names.
_PEERS = ("compile", "reduce-overhead", "inductor=False", "freeze")
_DTYPES = ("float16", "bfloat16", "float32")
_HEADINGS = (
    "way", "ms a step", "over eager", "GPU ms", "over eager", "first step, s", "memory, MiB",
    "from float32",
)  # fmt: skip


class _Shape(click.ParamType[Any]):
    """Sizes such as 32x3x224x224."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if not re.fullmatch(r"\d+(x\d+)*", value) or "0" in value.split("x"):
            self.fail(f"{value!r} is no shape, such as 32x3x224x224")
        return tuple(map(int, value.split("x")))


def _peers(_: Any, __: Any, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    for name in names:
        if name not in _PEERS:
            raise click.BadParameter(f"{name!r} is none of them; {nearest(name, _PEERS)}")
    return names


@click.command("benchmark")
@click.argument("network")
@click.option(
    "--shape",
    "shapes",
    type=_Shape(),
    multiple=True,
    metavar="32x3x224x224",
    help="Shape of an input, batch first; may be repeated.  [default: 32x3x224x224]",
)
@click.option("--train", is_flag=True, help="Time a step of training; default: of inference.")
@click.option(
    "--compare",
    callback=_peers,
    default="compile,reduce-overhead",
    show_default=True,
    metavar="WAYS",
    help=f"Ways to compare, of {', '.join(_PEERS)}, joined by commas; eager is always timed.",
)
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default="float16",
    show_default=True,
    help="Dtype of the network in inference, and of autocast in training.",
)
@click.option(
    "--layout",
    type=click.Choice(("channels-last", "channels-first")),
    default="channels-last",
    show_default=True,
    help="Memory layout of four-dimensional inputs and filters.",
)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option(
    "--device", default="cuda:0", show_default=True, help="Device to run on; cpu is for a trial."
)
@json_option(help="Print every figure as JSON.")
def benchmark(
    network: str, shapes: tuple[tuple[int, ...], ...], train: bool, compare: list[str], dtype: str,
    layout: str, rounds: int, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Time NETWORK by PyTorch and by confpred.optimize, in turns.

    NETWORK is timm:NAME, or FILE.py:FUNCTION: the file is run, and its function returns the
    network. Inputs and timm's weights are random. Each way is compared with float32; "again" is
    eager PyTorch once more, so the distance of its ratio from 1 is the noise.

    \b
    confpred benchmark timm:resnet50
    confpred benchmark mine.py:build --shape 32x3x224x224 --train
    """
    with needing("gpu"):
        from confpred.pytorch import ways
    where = ways.device_named(device)
    model = _built(network)
    sizes = shapes or ((32, 3, 224, 224),)
    last = layout == "channels-last"
    subject = ways.subject_on(where, model, sizes, dtype, training=train, channels_last=last)
    names = ("eager", "again", "optimize", *compare)
    measured = ways.measure(
        subject, {name: ways.WAYS[name] for name in names}, rounds=rounds,
        say=lambda way, what: click.echo(f"{way}: {what} ...", err=True),
    )  # fmt: skip
    facts = {
        "network": network, "inputs": sizes, "training": train, "dtype": dtype, "layout": layout,
        **ways.versions(where),
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(facts | {"ways": measured}, indent=2))
        return
    click.echo(f"{'training' if train else 'inference'} of {network} on {facts['device']}, {dtype}")
    for line in aligned([_HEADINGS, *_rows(measured)]):
        click.echo(line)


def _built(network: str) -> Any:
    """Return the network that the argument names."""
    kind, _, name = network.rpartition(":")
    if kind == "timm":
        require_packages("networks", "timm")
        try:
            import timm
        except RuntimeError as error:  # of torchvision, if it is for another PyTorch
            raise ConfpredError(f"timm cannot be imported: {first_line(error)}") from error

        names = timm.list_models()
        if name not in names:
            near = " or ".join(difflib.get_close_matches(name, names, 3)) or "timm.list_models()"
            raise InvalidInput("network", network, f"a network of timm, such as {near}")
        return timm.create_model(name)
    path = Path(kind)
    if not name or path.suffix != ".py" or not path.is_file():
        allowed = "timm:NAME, or FILE.py:FUNCTION with a file that exists"
        raise InvalidInput("network", network, allowed)
    click.echo(f"running {path}", err=True)
    sys.path.insert(0, str(path.parent.resolve()))  # it may import its neighbours
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        functions = {k: v for k, v in vars(module).items() if callable(v)}
        if name not in functions:
            near = nearest(name, functions)
            raise InvalidInput("network", network, f"a function of {path}: {near}")
        return functions[name]()
    except ConfpredError:
        raise
    except Exception as error:
        raise ConfpredError(f"{network} fails: {type(error).__name__}: {error}") from error


def _rows(figures_of: Mapping[str, Mapping[str, Any]]) -> Sequence[Sequence[str]]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    rows = []
    for way, figures in figures_of.items():
        if "error" in figures:
            rows.append((way, figures["error"], *[""] * (len(_HEADINGS) - 2)))
            continue
        ratios = [shown(figures.get(f), ".2f") for f in ("over_eager", "graph_over_eager")]
        rows.append((
            way, shown(figures["ms"], ".3f"), f"{ratios[0]}x",
            shown(figures["graph_ms"], ".3f"), f"{ratios[1]}x" if ratios[1] else "",
            shown(figures["first_s"], ".1f"), shown(figures["peak_mb"], ".0f"),
            shown(figures["difference"], ".1e"),
        ))  # fmt: skip
    return rows

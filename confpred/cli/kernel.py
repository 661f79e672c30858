"""`confpred kernel`: checks, times or profiles the kernels of one family, for who works on them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from confpred.cli.arguments import aligned, gpu_option
from confpred.errors import InvalidInput, LaunchError, nearest
from confpred.families.registry import all_families, config_ids, config_words
from confpred.problem.device import get_device

if TYPE_CHECKING:
    from confpred.families.protocol import Family
    from confpred.problem.device import Device
    from confpred.problem.operation import Launch
    from confpred.problem.record import Record

#: Target of kernels that are compiled on a machine without a GPU.
_COMPILED_FOR = "h100"
#: Everything that Nsight Compute measures, of the first launch of a kernel; sources go along.
_NCU = ("ncu", "--set", "full", "--import-source", "yes", "--launch-count", "1")


@click.command("kernel")
@click.argument("family")
@click.argument("action", type=click.Choice(("check", "time", "profile")))
@click.option("--layer", metavar="WORDS", help="The layer; time and profile need one.")
@click.option(
    "--config", metavar="WORDS", help="A config of the family's table.  [default: the predicted]"
)
@gpu_option
@click.option(
    "--lineinfo", is_flag=True, help="Compile with lines of the source; no cache is used."
)
def kernel(
    family: str, action: str, layer: str | None, config: str | None, device: str, lineinfo: bool
) -> None:
    """Check, time or profile the kernels of FAMILY, such as depthwise_wgrad.

    \b
    confpred kernel grouped_fprop check
    confpred kernel grouped_fprop time --layer "n=64 c=256 k=256 h=56 w=56 r=3 s=3 groups=32"
    confpred kernel grouped_fprop profile --lineinfo --layer "..."

    check compiles kernels for some configs of random layers, or of --layer, and compares what they
    compute with the reference; without a GPU it only compiles. time prints the time of one launch
    and the share that it reaches of the layer's floor. profile runs Nsight Compute (ncu), which
    writes FAMILY.ncu-rep for ncu-ui, or says the command where ncu is not installed.
    """
    own = _family(family)
    problem = None if layer is None else own.operation.problem.parse(layer)
    if action == "check":
        if config is not None or lineinfo:
            raise click.UsageError("--config and --lineinfo are for time and profile")
        _check(own, problem, device)
        return
    if problem is None:
        raise click.UsageError(f"{action} needs a layer: --layer WORDS")
    if action == "profile":
        _profile(own, problem, config, device, lineinfo)
    else:
        _time(own, problem, config, device, lineinfo)


def _family(name: str) -> Family:
    from confpred.families.protocol import LibraryFamily

    kernels = {n: f for n, f in all_families().items() if not isinstance(f, LibraryFamily)}
    if name not in kernels:
        raise InvalidInput("family", name, nearest(name, kernels))
    return kernels[name]


def _gpu(text: str) -> tuple[int, Device]:
    from confpred.cli.sample import find_gpu

    runs, device = find_gpu(text)
    return next(iter(runs)), device


def _check(family: Family, problem: Record | None, text: str) -> None:
    ordinal: int | None
    try:
        ordinal, device = _gpu(text)
    except LaunchError:
        ordinal, device = None, get_device(_COMPILED_FOR)
    from confpred.measure.contract import check_family

    report = check_family(family, device, [problem] if problem else [], ordinal)
    for breach in report.breaches:
        click.echo(f"{family.name}: {breach}")
    if report.breaches:
        sys.exit(1)
    compared = f", {report.runs} results compared with the reference" if report.runs else ""
    compiled = f"{report.kernels} kernels compiled for {device.arch}"
    click.echo(f"{family.name}: ok; {report.problems} layers, {compiled}{compared}")
    for skipped in report.skipped:
        click.echo(f"{family.name}: {skipped}", err=True)


def _row(family: Family, problem: Record, config: str | None, device: Device) -> int:
    """Return the config of these words, or that which a model, or else the estimate, expects to be
    the fastest of the family."""
    from confpred.predict.predictor import Predictor

    rows = np.flatnonzero(family.legal(problem, device))
    if not len(rows):
        allowed = f"a layer that {family.name} has a config for on {device.key}"
        raise InvalidInput("layer", str(problem), allowed)
    if config is not None:
        legal = {words: row for words, row in config_ids(family.name).items() if row in rows}
        if config not in legal:
            raise InvalidInput("config", config, nearest(config, [*legal][:3]))
        return legal[config]
    predictor = Predictor.load(operation=family.operation.name)
    model = predictor.own_model(type(problem), device)
    learned = model.families.get(family.name) if model is not None else None
    if learned is None:
        return int(rows[np.argmin(family.estimate_s(problem, device, rows))])
    return int(learned.rank(problem, device, rows)[0][0])


def _time(family: Family, problem: Record, config: str | None, text: str, lineinfo: bool) -> None:
    from confpred.families.protocol import Candidate
    from confpred.measure.kernels import measure

    ordinal, device = _gpu(text)
    row = _row(family, problem, config, device)
    if lineinfo:
        _compile_with_lines(family.launch(problem, row), device.arch)
    (outcome,) = measure(problem, family, [row], ordinal=ordinal, seed=0, report=lambda _: None)
    if outcome.status != "ok":
        click.echo(f"{family.name}: {outcome.status}: {outcome.message}", err=True)
        sys.exit(1)
    floor_ms = device.roofline_s(problem) * 1e3
    bound = "bytes" if device.memory_s(problem) * 1e3 == floor_ms else "arithmetic"
    facts = {
        "family": f"{family.name} on {device.product}",
        "config": config_words(Candidate(family.name, row)),
        "time": f"{outcome.time_ms:.4f} ms, in half of the replays within {outcome.spread_ms:.4f}",
        "floor": f"{floor_ms:.4f} ms, by {bound}",
        "share": f"{floor_ms / outcome.time_ms:.0%} of the floor",
        "thread": f"{outcome.registers} registers, {outcome.local_bytes} bytes of local memory",
    }
    click.echo("\n".join(aligned([*facts.items()])))


def _compile_with_lines(launch: Launch, arch: str) -> None:
    """Have this process take the kernels of `launch` from a bundle that knows their lines."""
    from confpred.cuda.compiler import bundle_files, nvrtc_version, open_kernels, with_line_info

    folder = Path(tempfile.mkdtemp(prefix="confpred-lines-"))  # stays, for ncu to read
    cubins = {spec: with_line_info(spec, arch, folder) for spec in launch.kernels}
    for name, content in bundle_files(cubins, arch, nvrtc_version()).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    open_kernels(folder, arch, whole=False)


def _profile(
    family: Family, problem: Record, config: str | None, text: str, lineinfo: bool
) -> None:
    installed = shutil.which("ncu") is not None
    device: Any = _gpu(text)[1] if installed else get_device(_COMPILED_FOR)
    launch = family.launch(problem, _row(family, problem, config, device))
    if not launch.kernels:
        raise InvalidInput("family", family.name, "a family with kernels of its own")
    entries = "|".join(dict.fromkeys(spec.entry for spec in launch.kernels))
    timed = ["kernel", family.name, "time", "--layer", str(problem), "--device", text]
    timed += ["--config", config] if config is not None else []
    timed += ["--lineinfo"] if lineinfo else []
    ncu = [*_NCU, "--kernel-name", f"regex:^({entries})$", "--export", family.name]
    if not installed:
        click.echo(shlex.join([*ncu, "confpred", *timed]))
        click.echo("ncu of Nsight Compute is not installed; run this where it is", err=True)
        sys.exit(1)
    command = [*ncu, sys.executable, "-m", "confpred", *timed]
    sys.exit(subprocess.run(command, check=False).returncode)

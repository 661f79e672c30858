"""`confpred sample`, and the checks of commands that measure on a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from confpred.cli.arguments import (
    FILE,
    FOLDER,
    NEW_MEASUREMENTS,
    OUTPUT,
    check_files,
    check_folder,
    needing,
    pytorch_option,
    timeout_option,
)
from confpred.data.suites import (
    MAX_PROBLEMS,
    Suite,
    join,
    read_shapes,
    read_suite,
    suite_of_calls,
)
from confpred.errors import ConfpredError, InvalidInput, MissingExtra, nearest
from confpred.families.registry import (
    all_families,
    families_in,
    families_of,
    operation_of,
    plug_in,
)
from confpred.problem.device import get_device
from confpred.sampler.tasks import BENCHMARK, HEURISTICS

if TYPE_CHECKING:
    from confpred.data.measurements import Run
    from confpred.data.remote import Folder
    from confpred.families.protocol import Family, Rows
    from confpred.problem.device import Device
    from confpred.problem.record import Record
    from confpred.sampler.run import Engine, Sampling
    from confpred.sampler.tasks import Pick


#: Compilers: as many as a Ray cluster has cores.
MANY = 1024
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@click.command("sample")
@click.argument("kernel", required=False)
@click.option(
    "--suite",
    "suite_files",
    type=FILE,
    multiple=True,
    help="Problem suite (JSON); may be repeated.",
)
@click.option("--shapes", type=FILE, help="Calls of KERNEL: a JSON list of objects of its key.")
@click.option("--ranges", help="Ranges of KERNEL's key, such as M=16:8192,N=64:16384,K=4096.")
@click.option(
    "--problems", type=click.IntRange(1, MAX_PROBLEMS), default=60, show_default=True,
    help="Calls to make of --ranges.",
)  # fmt: skip
@click.option(
    "--out",
    type=NEW_MEASUREMENTS,
    required=True,
    help="Folder of the measurements, or its URL, such as s3://bucket/runs.",
)
@click.option(
    "--gpus",
    "--devices",
    default="all",
    show_default=True,
    help="GPUs of this machine by their CUDA number, such as 0,1.",
)
@click.option(
    "--part",
    default="1/1",
    metavar="I/N",
    help="Measure the I-th of N equal shares of the problems.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="GPUs of this machine, or of a Ray cluster.",
)
@click.option("--address", help="Address of the Ray cluster, such as auto; needs --engine ray.")
@click.option("--device", "kind", help="Kind of the cluster's GPUs to sample; needs --engine ray.")
@click.option("--budget", help="Begin no problem after this long, such as 90s, 8m or 1.5h.")
@click.option(
    "--family",
    "families",
    multiple=True,
    metavar="NAME",
    help="Measure configs of this family only; may be repeated.  [default: all but libraries']",
)
@click.option(
    "--configs",
    type=click.IntRange(min=1),
    help="Measure a random choice of this many configs a problem and family.  [default: all]",
)
@click.option(
    "--picked",
    type=click.IntRange(min=1),
    help="Measure so many more configs: the first ones by --model, or random ones without it.",
)
@click.option("--model", "model_folder", type=FOLDER, help="Model for --picked.")
@click.option(
    "--anchors",
    "anchors_file",
    type=FILE,
    help="Configs (JSON) that every GPU measures first, in every run.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed of the order of problems, the choice of configs and the timed rounds.",
)
@click.option(
    "--jobs",
    type=click.IntRange(0, 1024),
    help="Compilations at a time; 0: all kernels are in the cache already.  [default: the cores]",
)
@pytorch_option(help="Time PyTorch's own operator as well.")
@click.option(
    "--cudnn-mode",
    "cudnn_modes",
    type=click.Choice([BENCHMARK, HEURISTICS]),
    multiple=True,
    default=(BENCHMARK,),
    show_default=True,
    help="How cuDNN chooses PyTorch's algorithm; may be repeated.",
)
@click.option(
    "--plan",
    "plan_device",
    metavar="DEVICE",
    help="List what would be measured on DEVICE, such as h200, and end; needs no GPU.",
)
@click.option(
    "--compile",
    "compile_device",
    metavar="DEVICE",
    help="Compile what would be measured on DEVICE into the kernel cache, and end; needs no GPU.",
)
@click.option(
    "--archive",
    type=OUTPUT,
    help="With --compile: write the kernels as a .tar.xz, to be unpacked in another cache.",
)
@timeout_option
@click.option("--submit", metavar="URL", help="Send the measurements to this service.")
def sample(
    kernel: str | None,
    suite_files: tuple[Path, ...],
    shapes: Path | None,
    ranges: str | None,
    problems: int,
    out: Folder,
    gpus: str,
    part: str,
    engine: str,
    address: str | None,
    kind: str | None,
    budget: str | None,
    families: tuple[str, ...],
    configs: int | None,
    picked: int | None,
    model_folder: Path | None,
    anchors_file: Path | None,
    seed: int,
    jobs: int | None,
    pytorch: bool,
    cudnn_modes: tuple[str, ...],
    plan_device: str | None,
    compile_device: str | None,
    archive: Path | None,
    timeout: str,
    submit: str | None,
) -> None:
    """Measure configs of a suite's problems on this machine's GPUs, or on those of a Ray cluster.
    KERNEL is a Triton kernel under `confpred.tuned`, such as mine.py:kernel; give --shapes or
    --ranges with it.

    Rows that the output folder holds are not measured again, so the same command resumes a run.
    Ctrl-C ends a run after the problems in flight, and a second one at once.
    """
    budget_s = None if budget is None else parse_duration("budget", budget)
    silence_s = parse_duration("timeout", timeout)
    share = parse_part(part)
    if engine == "local" and (address or kind):
        name, value = ("address", address) if address else ("device", kind)
        raise InvalidInput(name, value, "an option of --engine ray")
    if engine == "ray" and gpus != "all":
        raise InvalidInput("gpus", gpus, "all with --engine ray, which knows the free ones")
    check_folder("out", out)
    check_files({"archive": archive}, force=False)
    if archive is not None and compile_device is None:
        raise InvalidInput("archive", str(archive), "a file of what --compile has compiled")
    if kernel is not None and (shapes is None) != (ranges is None) and not suite_files:
        family = kernel_at(kernel)
        suite, families = calls_of(family, shapes, ranges, problems, seed), (family.name,)
    elif kernel is None and shapes is None and ranges is None and suite_files:
        suite = join([read_suite(file) for file in suite_files])
    else:
        allowed = "--suite FILE, or KERNEL with --shapes FILE or --ranges"
        raise InvalidInput("suite", None, allowed)
    if model_folder is not None and not picked:
        raise InvalidInput("model", str(model_folder), "a model that picks: give --picked too")
    names = families_of(suite.entries[0].problem)
    for name in families:
        if name not in names:
            raise InvalidInput("family", name, nearest(name, names))
    planned_for = compile_device or plan_device
    check_pytorch(pytorch and planned_for is None)
    with needing("gpu"):
        import rich  # noqa: F401 -- a missing package is reported before any work

        from confpred.sampler.run import Here, Sampling, find_gpus
        from confpred.sampler.tasks import read_anchors

    settings = Sampling(
        seed=seed,
        configs=configs,
        picked=picked or 0,
        families=families,
        pytorch=pytorch,
        cudnn_modes=tuple(dict.fromkeys(cudnn_modes)),
        part=share,
        processes=jobs if jobs is not None else cores() if engine == "local" else MANY,
        budget_s=budget_s,
        silence_s=silence_s,
    )

    def completed(device: Device) -> Sampling:
        """Add the settings that depend on the kind of GPU."""
        return replace(
            settings,
            pick=picker(model_folder, device) if picked and model_folder else None,
            anchors=read_anchors(anchors_file, device) if anchors_file else (),
        )

    if planned_for:
        device = get_device(planned_for)
        compiling = bool(compile_device)
        report_plan(suite, out, device, completed(device), compiling=compiling, archive=archive)
        return
    with contextlib.ExitStack() as stack:
        if engine == "ray":
            if address is None and not os.environ.get("RAY_ADDRESS"):
                # A Ray that starts here listens to the whole network; it reads this at its import.
                os.environ.setdefault("RAY_AUTH_MODE", "token")
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            with needing("ray"):
                from confpred.sampler.fleet import Fleet
            chosen: Engine = stack.enter_context(Fleet(settings, address, kind=kind))
        else:
            chosen = Here(find_gpus(gpus), settings)
        settings = completed(get_device(chosen.device))
        stack.enter_context(submitting(submit, out))
        code = sample_and_report(suite, out, chosen, settings)
    sys.exit(code)


def kernel_at(place: str) -> Family:
    """Return the family of a kernel such as ``mine.py:kernel``, and register it in this process and
    its child processes.

    Raises:
        InvalidInput: there is no such file, it cannot be imported, or it has no kernel under
            `confpred.tuned` of that name.
    """
    name, _, attribute = place.rpartition(":")
    file = Path(name)
    if file.suffix != ".py" or not file.is_file():
        raise InvalidInput("kernel", place, "a file and a kernel in it, such as mine.py:kernel")
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    paths = filter(None, [folder, os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        plug_in(file.stem)
    except ImportError as error:
        allowed = f"a kernel of a file that can be imported ({error})"
        raise InvalidInput("kernel", place, allowed) from error
    family = getattr(getattr(import_module(file.stem), attribute, None), "family", None)
    if family is None:
        allowed = f"a kernel of {name} under confpred.tuned"
        raise InvalidInput("kernel", attribute, allowed)
    return all_families()[family.name]


def calls_of(
    family: Family, shapes: Path | None, ranges: str | None, count: int, seed: int
) -> Suite:
    """Return the calls of a Triton kernel in the file `shapes`, or `count` of `ranges`."""
    if shapes is not None:
        return read_shapes(shapes, family.operation)
    from confpred.triton.ranges import calls_in

    problem: Any = family.operation.problem
    return suite_of_calls(family.name, calls_in(str(ranges), problem, count, seed))


def submitting(url: str | None, out: Folder) -> AbstractContextManager[None]:
    """Return a context in which the shards in `out` are sent to the service at `url`, if there is
    one."""
    if url is None:
        return nullcontext()
    with needing("client"):
        from confpred.client import transfer
    return transfer.submitting(url, out)


def picker(model_folder: Path, device: Device) -> Pick:
    """Return a function that orders a family's configs by the model in a folder."""
    from confpred.model.folder import load_model

    families = load_model(model_folder).families

    def pick(family: Family, problem: Record, rows: Rows) -> Rows | None:
        learned = families.get(family.name)
        return None if learned is None else learned.rank(problem, device, rows, len(rows))[0]

    return pick


def report_plan(
    suite: Suite,
    out: Folder,
    device: Device,
    settings: Sampling,
    *,
    compiling: bool,
    archive: Path | None,
) -> None:
    """Print the planned measurements, after compiling them if `compiling`, and write `archive`."""
    from confpred.sampler import forecast
    from confpred.sampler.progress import duration
    from confpred.sampler.store import measured_in
    from confpred.sampler.tasks import plan

    operation = operation_of(suite.entries[0].problem)
    tasks = plan(suite, device, settings, measured_in(out, operation, device.key))
    kernels = forecast.kernels_of([*settings.anchors, *tasks])
    if compiling:

        def show(done: int) -> None:
            click.echo(f"kernels {done}/{len(kernels)}", err=True)

        threads = settings.processes or None
        refused = forecast.compile_into_cache(kernels, device.arch, threads=threads, show=show)
        for reason in refused:
            click.echo(f"refused: {reason.splitlines()[0]}", err=True)
    planned = forecast.forecast(tasks, kernels, device)
    click.echo(f"{planned.problems} problems on {device.key}, {sum(planned.rows.values())} rows:")
    for provider, rows in sorted(planned.rows.items()):
        click.echo(f"  {rows:7} of {provider}")
    click.echo(
        f"about {duration(planned.measuring_s)} of one GPU\n"
        f"{planned.kernels} kernels, {planned.compiled} of them compiled; the others take about "
        f"{duration(planned.compiling_s)} of one core"
    )
    if archive is not None:
        packed = forecast.write_archive(kernels, device.arch, archive, replace=False)
        click.echo(f"{packed} kernels in {archive}, {archive.stat().st_size / 2**20:.1f} MiB")


def sample_and_report(suite: Suite, out: Folder, engine: Engine, settings: Sampling) -> int:
    """Sample with progress, Ctrl-C and a summary; return the exit code."""
    from rich.console import Console

    from confpred.sampler.progress import count_interrupts, show_progress, summary
    from confpred.sampler.run import sample

    with (
        count_interrupts() as interrupts,
        show_progress(Console(stderr=True), settings.budget_s) as show,
    ):
        tally = sample(suite, out, engine, settings, interrupts=lambda: interrupts.count, show=show)
    click.echo(summary(tally, out, len(engine.gpus)))
    if not tally.finished:
        click.echo(f"not finished; to go on: {shlex.join(['confpred', *sys.argv[1:]])}")
    return 128 + interrupts.signal if interrupts.count else 0


def parse_duration(field: str, text: str) -> float:
    """Return the seconds in a text such as ``90s``, ``8m`` or ``1.5h``."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise InvalidInput(field, text, "a number above 0 with s, m or h, such as 90s, 8m or 1.5h")
    return seconds


def parse_part(text: str) -> tuple[int, int]:
    """Return the numbers of a text such as ``3/16``."""
    match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text.strip(), re.ASCII)
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise InvalidInput("part", text, "I/N with I from 1 to N, such as 3/16")
    return part, parts


def find_gpu(text: str) -> tuple[dict[int, Run], Device]:
    """Return the run of the CUDA device that `text` names, as ``cuda:0`` or ``0``, and the
    device's description. Raises as `confpred.sampler.run.find_gpus`."""
    match = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})", text.strip())
    if match is None:
        raise InvalidInput("device", text, "a GPU of this machine, such as cuda:0")
    ordinal = int(match[1])
    with needing("gpu"):
        import rich  # noqa: F401 -- a missing package is reported before any work

        from confpred.cuda.driver import device_of
        from confpred.sampler.run import find_gpus
    return find_gpus(str(ordinal)), device_of(ordinal)


def check_pytorch(wanted: bool) -> None:
    """Check that PyTorch is installed if its operator is `wanted`."""
    if wanted and find_spec("torch") is None:
        raise MissingExtra("torch (or --no-pytorch)", "gpu")


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


@click.command("check-family")
@click.argument("module")
@click.option("--layer", "layers", multiple=True, metavar="WORDS", help="A problem to check with.")
@click.option("--device", default="h100", show_default=True, help="Kind of GPU, such as h100.")
def check_family(module: str, layers: tuple[str, ...], device: str) -> None:
    """Check the kernel families of MODULE against the protocol: shapes, dtypes, launches and their
    kernels' parameters, and a small run on a GPU of that kind.

    MODULE is on Python's path and defines FAMILY or FAMILIES. Problems are random, unless --layer
    names some. Each line names the member that breaks the protocol; then the exit code is 1.
    """
    sys.path.insert(0, "")
    try:
        families = families_in(module)
    except ImportError as error:
        raise InvalidInput("module", module, f"a module that can be imported ({error})") from error
    if not families:
        raise InvalidInput("module", module, "a module that defines FAMILY or FAMILIES")
    gpu, broken = get_device(device), False
    from confpred.measure.contract import check_family as check

    for family in families:
        called = getattr(family, "name", module)
        operation = getattr(family, "operation", None)
        problems = [operation.problem.parse(words) for words in layers] if operation else []
        report = check(family, gpu, problems, _ordinal_of(gpu))
        for breach in report.breaches:
            click.echo(f"{called}: {breach}")
        if not report.breaches:
            done = f"{report.problems} problems, {report.launches} launches, "
            click.echo(f"{called}: ok; {done}{report.kernels} kernels, {report.runs} runs")
        for skipped in report.skipped:
            click.echo(f"{called}: {skipped}", err=True)
        broken |= bool(report.breaches)
    if broken:
        sys.exit(1)


def _ordinal_of(device: Device) -> int | None:
    """Return the number of this machine's first GPU of that kind; None if there is none."""
    try:
        from confpred.cuda.driver import device_count, device_of

        numbers = (n for n in range(device_count()) if device_of(n).key == device.key)
        return next(numbers, None)
    except (ConfpredError, RuntimeError):
        return None

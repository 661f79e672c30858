"""Whole networks with and without confpred: step times, peak memory, first steps, and losses.

    python benchmarks/networks.py [--networks A,B] [--modes inference,training] [--batches 1,32,128]
                                  [--variants "eager + enable,graph + optimize"] [--jobs 8]
                                  [--budget SECONDS] [--resume] [--out FOLDER]
    python benchmarks/networks.py --first-step [--networks A,B] [--modes inference]
    python benchmarks/networks.py --losses [--networks A,B]
    python benchmarks/networks.py --dense ...           # networks of mostly dense layers, inference
    python benchmarks/networks.py --render              # plot and summary of the recorded result

What is timed: timm's networks with random weights on random images of 224 x 224, channels last.
*Inference* is the model in float16 under ``torch.inference_mode``; *training* is forward under
autocast to float16, cross-entropy, backward, and SGD with momentum (``foreach``), without a
gradient scaler. cuDNN's benchmark mode is on. Each network runs eagerly, as a CUDA graph of the
eager step, and by ``torch.compile`` with its defaults, and each of these without confpred, after
``confpred.enable()``, and after ``confpred.optimize()``.

The protocol. Each network and mode has a process of its own, so that a crash costs only itself; its
error is recorded. All variants of a batch are timed in the same process, in random order in rounds,
each with its own copy of the network, but for eager steps with ``enable``: these are of the very
model that eager PyTorch is, as where steps wait for the host, two copies of one network differ by
up to 5 %. (Rows up to commit 9f6abc8, and of training up to b23f04c, have a copy of their own
there, too.) A turn of a variant is four steps that are not timed, a synchronisation, and then as
many steps as take about ``--turn`` seconds, at least 3, until the device is done with the last: the
wall clock of the host over the number of steps, which is what a user waits. The result is the
median over the rounds; many short turns, because hosts drift. ``confpred.enable()`` holds for a
whole process, so it is switched on only around its own variants' turns. That makes all variants of
ours forget what serves them, which they find again in steps that are not timed; what they compile,
they have compiled before. (Rows up to commit 3d678ae have one such step but for ``enable``, so
``optimize`` beside it was timed while it found.) A ratio is the time without confpred over the time
with it, in the same round, and of the rounds the median: a host that is slow for some seconds is so
for both. (Rows up to commit b45e6cd have the ratio of the medians.) Each way without confpred is
timed as two variants, and what these differ by is the noise. (Rows without ``way_noise`` have that
of eager PyTorch alone.) Each variant's first output, in training the first gradients of all
parameters, is compared with that of float32; a variant that is much further from it than eager
PyTorch in half precision is recorded as an error, without a time. Peak memory is what a step
allocates at most above what the process held before it.

``torch.compile`` takes long to compile, so with ``--jobs`` several processes, each of one batch,
get ready at once, and Inductor compiles in each of them by one thread. While cuDNN's benchmark mode
chooses the algorithms of a process's eager step, and while that process times its variants, all
others are stopped (``SIGSTOP``). Memory for that many networks at once has to be there. But
Inductor chooses the configs of reductions by timing them when a program first runs, which is while
others are at work: two programs of the same kernels then differ by up to 7 %, so compiled rows that
are to be compared with one another take ``--jobs 1``. Set
``TORCHINDUCTOR_CACHE_DIR`` to keep what is compiled for another run. With ``--hold FILE`` nothing
is timed as long as FILE exists: what is compiled beside other work is timed on a quiet machine.

Results are merged: rows that are measured again are replaced, all others kept, and each row names
its run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from network_group import Group
from network_results import VARIANTS, Row, complete, failed, merged, outstanding, pairs, summary
from provenance import RESULTS, provenance, write

#: The result's name, and that of the networks of mostly dense layers.
NAME, DENSE_NAME = "networks", "dense_networks"
HERE = Path(__file__).parent
SUITES = HERE.parent / "datasets" / "suites"
NETWORKS = (
    "efficientnet_b0", "efficientnetv2_rw_s", "convnext_tiny", "convnextv2_nano",
    "mobilenetv3_large_100", "mobilenetv4_conv_medium", "regnety_040", "regnetx_016",
    "resnext50_32x4d", "fastvit_sa12",
)  # fmt: skip
DENSE_NETWORKS = (
    "resnet50", "efficientnet_b0", "convnext_tiny", "regnety_040", "hrnet_w18", "unet", "detector",
)  # fmt: skip
MODES = ("inference", "training")
BATCHES = (1, 32, 128)
STOPPED = "stopped for want of time"
LEAST_S = 30  # less than this left of the budget, and no new process is started


def sampled_networks() -> set[str]:
    """The networks of which a committed suite, and so perhaps the measurements, has a layer; those
    that models are judged by are for no model to learn from."""
    return {
        network
        for path in (*SUITES.glob("*.json"), SUITES / "dense" / "training.json")
        for problem in json.loads(path.read_text())["problems"]
        for network in problem.get("networks", ())
    }


def run_script(
    script: str, task: dict[str, Any], seconds: float, group: Group | None = None
) -> tuple[Any, str]:
    """What a script of this folder wrote for a task, None if nothing, and the end of its errors."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / script), json.dumps(task), str(out)]
        with group.locked() if group else nullcontext():
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            if group:
                group.add(process.pid)
        try:
            errors, code = process.communicate(timeout=seconds)[1], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            errors, code = process.communicate()[1], None
        if group:
            with group.locked():
                group.remove(process.pid)  # which may have ended while the others were stopped
        if errors:
            print(errors[-4000:], file=sys.stderr)
        written = json.loads(out.read_text()) if out.exists() else None
    if code is None:
        return written, STOPPED
    last = (errors.strip().splitlines() or ["no message"])[-1]
    return written, "" if code == 0 else f"exit status {code}: {last[-300:]}"


def tasks(arguments: argparse.Namespace, recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """One task a network and mode, batch by batch, of what is to be timed."""
    found = []
    commit = provenance(gpu=False)["commit"]
    for network in arguments.networks:
        for mode in arguments.modes:
            wanted: dict[tuple[str, ...], list[int]] = {}
            for batch in arguments.batches:
                variants = arguments.variants
                if arguments.resume:
                    variants = outstanding(recorded, commit, network, mode, batch, variants)
                if variants:
                    wanted.setdefault(tuple(variants), []).append(batch)
            for names, batches in wanted.items():
                task = {
                    "network": network,
                    "mode": mode,
                    "variants": list(names),
                    "device": arguments.device,
                    "size": arguments.size,
                    "rounds": arguments.rounds,
                    "turn_s": arguments.turn,
                    "hold": None if arguments.hold is None else str(arguments.hold),
                }
                if arguments.jobs > 1:  # or the batches share a process, which starts once
                    found += [task | {"batches": [batch]} for batch in batches]
                else:
                    found.append(task | {"batches": batches})
    return found


def time_steps(todo: Sequence[dict[str, Any]], jobs: int, deadline: float) -> Iterator[list[Row]]:
    """The rows of each task in turn, as long as there is time."""
    sampled = sampled_networks()

    def one(task: dict[str, Any]) -> list[Row]:
        network, mode = task["network"], task["mode"]
        seconds = deadline - time.time()
        if seconds < LEAST_S:
            print(f"left out for want of time: {network}, {mode}, batches {task['batches']}")
            return []
        task = task | {"deadline": deadline, "group": str(group.path)}
        found, error = run_script("network_steps.py", task, seconds, group)
        rows: list[Row] = []
        for batch in task["batches"]:
            if str(batch) in (found or {}):
                rows += pairs(network, mode, batch, found[str(batch)])
            elif error not in ("", STOPPED):
                rows += failed(network, mode, batch, task["variants"], error)
            else:
                print(f"left out for want of time: {network}, {mode}, batch {batch}")
        return [row | {"sampled": network in sampled} for row in rows]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        group = Group(Path(folder) / "group")
        group.path.touch()
        for future in as_completed([pool.submit(one, task) for task in todo]):
            yield future.result()


def other_rows(arguments: argparse.Namespace, deadline: float) -> Iterator[tuple[str, list[Row]]]:
    """The rows of the first steps or of the losses, a network at a time."""
    script = "network_first_steps.py" if arguments.first_step else "network_losses.py"
    kind = "first_steps" if arguments.first_step else "losses"
    for network in arguments.networks:
        for mode in arguments.modes if arguments.first_step else ("training",):
            if deadline - time.time() < LEAST_S:
                print(f"left out for want of time: {kind} of {network}, {mode}")
                continue
            task = {
                "network": network,
                "mode": mode,
                "device": arguments.device,
                "size": arguments.size,
                "processes": arguments.processes,
                "steps": arguments.steps,
            }
            found, error = run_script(script, task, deadline - time.time())
            if error == STOPPED:
                print(f"left out for want of time: {kind} of {network}, {mode}")
                continue
            row: Row = {"network": network, "mode": mode}
            yield kind, [row | (found or {"error": error})]


def measure(arguments: argparse.Namespace) -> None:
    """Measure, writing the result after each network, so that a run that is cut off loses one."""
    path = arguments.out / f"{arguments.name}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    deadline = time.time() + arguments.budget
    packages = ("torch", "timm") if arguments.device == "cpu" else ("torch", "timm", "cuda-core")
    facts = provenance(*packages, gpu=arguments.device == "cuda")
    if arguments.first_step or arguments.losses:
        found = other_rows(arguments, deadline)
    else:
        todo = tasks(arguments, result)
        found = (("steps", rows) for rows in time_steps(todo, arguments.jobs, deadline))
    for kind, rows in found:
        for row in rows:
            print(json.dumps(row))
        result = merged(result, {kind: rows}, facts)
        write(arguments.name, result, arguments.out)


def show(result: dict[str, Any]) -> None:
    """Print the summary: the time without confpred over the time with it, from batch 32 on."""
    for row in summary(result["steps"]):
        print(
            f"{row['mode']:9s} {row['way']:7s} + {row['with']:8s} {row['count']:3d} rows"
            f"  geomean {row['geomean']:.3f}  worst {row['worst']:.3f}  best {row['best']:.3f}"
        )


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def words_of(allowed: Sequence[str]) -> Any:
        def words(text: str) -> list[str]:
            found = [word.strip() for word in text.split(",")]
            for word in found:
                if word not in allowed:
                    raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
            return found

        return words

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dense", action="store_true", help="networks of mostly dense layers")
    parser.add_argument("--networks", type=words_of((*NETWORKS, *DENSE_NETWORKS)))
    parser.add_argument("--modes", type=words_of(MODES))
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=list(BATCHES)
    )
    parser.add_argument("--variants", type=words_of(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--budget", type=float, default=86400, help="seconds; then nothing starts")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes at once; one at a time is timed"
    )
    parser.add_argument("--hold", type=Path, help="time no steps as long as this file exists")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turn", type=float, default=0.05, help="seconds of a turn")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has")
    parser.add_argument("--first-step", action="store_true", help="time first steps instead")
    parser.add_argument("--losses", action="store_true", help="compare losses instead")
    parser.add_argument("--processes", type=int, default=3, help="of each first step")
    parser.add_argument("--steps", type=int, default=200, help="of each loss curve")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial")
    parser.add_argument("--size", type=int, default=224, help="of images; other sizes are a trial")
    parser.add_argument("--out", type=Path, default=RESULTS, help="as in benchmarks/results/h200")
    arguments = parser.parse_args(words)
    trial = arguments.device == "cpu" or arguments.size != 224
    if trial and RESULTS.resolve() in (arguments.out.resolve(), *arguments.out.resolve().parents):
        parser.error("a trial is written somewhere else: name a folder with --out")
    known = DENSE_NETWORKS if arguments.dense else NETWORKS
    arguments.name = DENSE_NAME if arguments.dense else NAME
    arguments.networks = arguments.networks or list(known)
    arguments.modes = arguments.modes or list(MODES[:1] if arguments.dense else MODES)
    for network in arguments.networks:
        if network not in known:
            parser.error(f"--networks: {network!r} is none of {', '.join(known)}")
    if arguments.dense and "training" in arguments.modes:
        parser.error("--dense: these networks are timed in inference")
    arguments.variants = complete(arguments.variants)
    return arguments


def main() -> None:
    arguments = parsed()
    if not arguments.render:
        with tempfile.TemporaryDirectory() as folder:  # unless the caller keeps one
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
            os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
            if arguments.jobs > 1:
                os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
            measure(arguments)
    result = json.loads((arguments.out / f"{arguments.name}.json").read_text())
    show(result)
    try:
        from network_plot import plot

        plot(result, arguments.out / f"{arguments.name}.png")
    except ImportError:
        print("no matplotlib here: --render draws the plot where there is")


if __name__ == "__main__":
    main()

"""Our choice for dense layers against PyTorch's operators, by kind of network.

    python -m benchmarks.kernels.dense [--model FOLDER] [--minutes 6] [--kind KIND ...]
        [--out FOLDER]
    python -m benchmarks.kernels.dense --render                # the table of the recorded result

The layers are those of ``datasets/suites/dense/``: by default of its hold-out, whose networks and
kinds no model is trained on; with ``--kind`` those of the training suite that networks of such
kinds have, for a model that was trained without them. PyTorch is timed with cuDNN's heuristics and
with its benchmark mode, each in a process of its own, because PyTorch keeps the first algorithm
that it chose for a shape. In each process our choice is timed twice, in the same rounds as
PyTorch's operators, which shows the noise. For a layer with an epilogue, PyTorch's time is that of
its functions one by one, as users write them.

Where the choice is PyTorch's own operator and nothing follows it, both times are the same by
definition. Where something does, ours is its convolution with our epilogue kernel behind it, and is
timed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.kernels.conv_vs_cudnn import MODES, SLOWER, interleaved_ms
from benchmarks.provenance import DATASETS, RESULTS, provenance, write
from confpred.data.suites import read_suite
from confpred.problem.conv2d import CONVOLUTION, DIRECTIONS, Problem

if TYPE_CHECKING:
    import torch

NAME = "dense"
SUITES = DATASETS / "suites" / "dense"
NETWORKS = SUITES.parents[1] / "dense_networks.json"


def kinds() -> dict[str, str]:
    """Return the kind of each network, such as ``classification``."""
    networks = json.loads(NETWORKS.read_text())["networks"]
    return {name: network["kind"] for name, network in networks.items()}


def problems(wanted: Sequence[str]) -> dict[Problem, str]:
    """Return the problems that are timed, with the kind of their networks, in random order, so that
    a run that is cut short leaves a fair sample."""
    kind_of = kinds()
    suite = read_suite(SUITES / ("training.json" if wanted else "holdout.json"))
    found: dict[Problem, str] = {}
    for entry in suite.entries:
        names = [kind_of[name] for name in entry.networks if name in kind_of]
        names = [kind for kind in names if not wanted or kind in wanted]
        if names and isinstance(entry.problem, Problem):
            found[entry.problem] = names[0]
    order = sorted(found, key=str)
    random.Random(0).shuffle(order)
    return {problem: found[problem] for problem in order}


def our_call(problem: Problem) -> tuple[Any, Callable[[Mapping[str, torch.Tensor]], Any] | None]:
    """Return the choice for `problem`, and what it runs, of inputs by name; None for PyTorch's
    operator alone."""
    from confpred.measure.pytorch import as_the_library_calls
    from confpred.pytorch import choosing, loading

    choice = choosing.choose(problem, 0)
    ready = loading.load(choice, 0) if choice is not None and choosing.is_ours(choice) else None
    if ready is None:
        own = as_the_library_calls(CONVOLUTION, problem, 0) if problem.has_epilogue else None
        return choice, own
    run = ready.run

    def call(tensors: Mapping[str, torch.Tensor]) -> Any:
        given = (t.permute(0, 3, 1, 2) if t.dim() == 4 else t for t in tensors.values())
        return run(*given)[0]

    return choice, call


def compare(problem: Problem, evict: Any) -> dict[str, Any]:
    """Return the times of one problem in this process, in milliseconds: PyTorch's, ours, ours
    again."""
    from confpred.cuda import driver
    from confpred.measure import pytorch as operator
    from confpred.measure import timing

    driver.make_current(0)
    facts = driver.device_of(0)
    launches = timing.launches_a_replay(2 * facts.roofline_s(problem))
    copies = operator.copies_for(problem, launches, facts.l2_bytes)
    sets = operator.operands(CONVOLUTION, problem, copies)
    turns = [sets[i % len(sets)] for i in range(launches)]
    theirs = partial(CONVOLUTION.pytorch, problem)
    calls: list[Callable[..., Any]] = [theirs]
    choice, ours = our_call(problem)
    found: dict[str, Any] = {
        "provider": choice.provider if choice else "pytorch",
        "config": choice and choice.config and dict(choice.config),
        "predicted_ms": choice and choice.predicted_ms,
        "launched": ours is not None,
    }
    if ours is not None:
        found["difference"] = difference(ours(sets[0]), theirs(sets[0]), problem)
        calls += [ours, ours]
    names = ("pytorch_ms", "ours_ms", "ours_again_ms")
    return found | dict(zip(names, interleaved_ms(calls, turns, evict), strict=False))


def difference(ours: Any, theirs: Any, problem: Problem) -> float:
    """Relative difference of the two outputs in the 2-norm."""
    if problem.direction != "fprop":
        theirs = theirs[DIRECTIONS.index(problem.direction) - 1]
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def run_mode(mode: str, words: list[str], model: str | None, seconds: float) -> dict[str, Any]:
    """Return the times of as many of the problems as there is time for."""
    import torch

    from confpred.cuda import driver
    from confpred.measure import pytorch as operator
    from confpred.predict.predictor import Predictor
    from confpred.pytorch import choosing

    end = time.time() + seconds
    torch.backends.cudnn.benchmark = mode == "benchmark"
    driver.make_current(0)
    choosing.use_predictor(Predictor.load(model))
    evict = operator.Evictor(driver.device_of(0).l2_bytes)
    times: dict[str, Any] = {}
    for text in words:
        if time.time() > end:
            break
        with torch.inference_mode():
            times[text] = compare(Problem.parse(text), evict)
        choosing.forget()
        torch.cuda.empty_cache()  # the next problem's tensors have other sizes
    return times


def joined(words: str, kind: str, times: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One problem of the result, made from what both processes measured."""
    found = {"problem": words, "kind": kind, "direction": Problem.parse(words).direction}
    found["fused"] = Problem.parse(words).has_epilogue
    first = times["heuristics"]
    found |= {key: first[key] for key in ("provider", "config", "predicted_ms", "launched")}
    for mode, time_of in times.items():
        theirs = time_of["pytorch_ms"]
        ours = (
            statistics.mean((time_of["ours_ms"], time_of["ours_again_ms"]))
            if (time_of["launched"])
            else theirs
        )
        found |= {f"pytorch_{mode}_ms": theirs, f"ours_{mode}_ms": ours}
        found[f"speedup_{mode}"] = theirs / ours
    if first["launched"]:
        both = [t for t in times.values() if t["launched"]]
        found["noise"] = max(abs(t["ours_again_ms"] / t["ours_ms"] - 1) for t in both)
        found["difference"] = max(t["difference"] for t in both)
    return found


def summary(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Speeds over PyTorch by kind of network and whether something follows the convolution, and
    those of all kinds together."""
    parts: dict[tuple[str, bool], list[Mapping[str, Any]]] = defaultdict(list)
    for layer in layers:
        parts[layer["kind"], layer["fused"]].append(layer)
        parts["all", layer["fused"]].append(layer)
    found = []
    for (kind, fused), part in sorted(parts.items()):
        row: dict[str, Any] = {"kind": kind, "fused": fused, "problems": len(part)}
        for mode in MODES:
            speeds = [layer[f"speedup_{mode}"] for layer in part]
            row[mode] = {
                "speedup": statistics.geometric_mean(speeds),
                "worst": min(speeds),
                "slower": sum(speed < 1 / SLOWER for speed in speeds),
            }
        row["launched"] = sum(layer["launched"] for layer in part)
        row["providers"] = {
            name: sum(layer["provider"] == name for layer in part)
            for name in sorted({layer["provider"] for layer in part})
        }
        found.append(row)
    return found


def show(result: Mapping[str, Any]) -> None:
    """Print the table of the result."""
    print(f"{'':34s} {'problems':>8s}  over the default (worst, lost)   over benchmark mode")
    for row in result["summary"]:
        name = f"{row['kind']}{', with epilogue' if row['fused'] else ''}"
        figures = [row[mode] for mode in ("heuristics", "benchmark")]
        told = "   ".join(
            f"{f['speedup']:5.2f}x ({f['worst']:.2f}, {f['slower']})" for f in figures
        )
        print(f"{name:34s} {row['problems']:8d}  {told}")


def measure(model: Path | None, minutes: float, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the whole benchmark in about `minutes`."""
    import torch

    from confpred.cuda import driver
    from confpred.predict.predictor import Predictor

    deadline = time.time() + 60 * minutes
    kind_of = {str(problem): kind for problem, kind in problems(wanted).items()}
    words, runs = list(kind_of), {}
    for left, mode in zip((2, 1), MODES, strict=True):  # processes still to run, this one included
        job = {"words": words, "seconds": (deadline - time.time()) / left}
        job["model"] = None if model is None else str(model)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.kernels.dense", "--mode", mode],
            input=json.dumps(job),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        runs[mode] = json.loads(done.stdout.splitlines()[-1])
        words = list(runs[mode])
    layers = [joined(w, kind_of[w], {mode: runs[mode][w] for mode in MODES}) for w in words]
    known = Predictor.load(model).models.get(driver.device_of(0).key)
    return provenance("torch", gpu=True) | {
        "cudnn": torch.backends.cudnn.version(),
        "model": known.version if known else None,
        "excluded_networks": known.card.data.excluded_networks if known else [],
        "problems_left_out": len(kind_of) - len(layers),
        "summary": summary(layers),
        "layers": sorted(layers, key=lambda layer: str(layer["problem"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a model folder, in place of the package's")
    parser.add_argument("--minutes", type=float, default=6.0, help="stop after about this long")
    known = sorted(set(kinds().values()))
    parser.add_argument(
        "--kind", action="append", default=[], choices=known, help="of the training suite"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode:
        job = json.load(sys.stdin)
        print(json.dumps(run_mode(arguments.mode, job["words"], job["model"], job["seconds"])))
        return
    if arguments.render:
        result = json.loads((arguments.out / f"{NAME}.json").read_text())
    else:
        result = measure(arguments.model, arguments.minutes, arguments.kind)
        print(f"written: {write(NAME, result, arguments.out)}")
    show(result)


if __name__ == "__main__":
    main()

"""The cost of Ray, and of actors that are killed, to the sampler: GPUs are made up.

    python -m benchmarks.host.fleet [--only engines gpus kills merge] [--out FOLDER]
    python -m benchmarks.host.fleet --only real                # needs an NVIDIA GPU

A timer of 20 ms a row is in place of the measurement; Ray, its actors, their children and the files
are real. The driver has one core. A rate is that of the middle of a run, from 10 % to 90 % of its
rows, as processes start before; the rate of the whole run is beside it.

- ``engines``: one GPU of the local engine and of Ray, in turns.
- ``gpus``: eight GPUs and one.
- ``kills``: a random actor is killed every 5 s for 2 minutes. The work that was lost is the rows
  that were measured and not stored, and the seconds in which a GPU measured nothing after its
  actor was killed.
- ``merge``: 300,000 rows of 1,000 shards become one file.
- ``real``: one GPU that is there, of the local engine and of Ray, in turns; kernels of depthwise
  layers, compiled before, are measured as ``confpred sample`` does.

Figures that are there already of parts that are not measured now are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.provenance import DATASETS
from confpred.data.measurements import Measurement, Run
from confpred.data.suites import Entry, Suite
from confpred.measure.timing import Outcome
from confpred.problem.conv2d import CONVOLUTION, Problem

if TYPE_CHECKING:  # an actor's child imports this module and measures nothing with these
    from confpred.sampler.jobs import MeasureJob
    from confpred.sampler.run import Engine, Sampling, Tally

ROW_S = 0.02
CONFIGS = 24  # rows of a unit
TURNS = 3
GPUS = 8
REAL_SUITE = DATASETS / "suites" / "fprop.json"
REAL_FAMILY, REAL_UNITS = "depthwise_fprop", 40
KILL_EVERY_S, KILLS_S = 5.0, 120.0
SHARDS, SHARD_ROWS = 1000, 300
#: A GPU that measures nothing for longer is down.
DOWN_S = 0.5
BUDGETS = {
    "ray_over_local": 0.97,
    "eight_over_one": 7.5,
    "over_lost_work": 1.10,
    "merge_s": 10.0,
}
_LOG = "FLEET_LOG"


def measure(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Wait in place of measuring, and write down each row."""
    outcomes = []
    with Path(os.environ[_LOG], f"{os.getpid()}").open("a") as log:
        for row in job.task.config_ids:
            report(row)
            time.sleep(ROW_S)
            outcomes.append(Outcome(row, "ok", 1.0, 0.0, 3))
            log.write(f"{time.time():.3f} {job.ordinal}\n")
            log.flush()
    return outcomes


def describe(gpus: str) -> dict[int, Run]:
    """Describe a made-up GPU by the number that Ray has given to this process."""
    from confpred.sampler.run import project_version

    number = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    return {number: Run("0", "h100", "made up", "0", "13", project_version())}


def suite(units: int) -> Suite:
    layers = (Problem(n, 64, 14, 14, 64, 3, 3, padding=1, groups=8) for n in range(1, units + 1))
    return Suite("fleet", tuple(map(Entry, layers)))


def settings() -> Sampling:
    from confpred.sampler.run import Sampling

    function = f"{__spec__.name}:measure"
    return Sampling(configs=CONFIGS, processes=0, pytorch=False, measure=function)


@contextmanager
def ray_of(gpus: int, how: Sampling, found: str) -> Iterator[Engine]:
    """Yield the engine of a Ray with so many GPUs, described by the function at the import path
    `found`; this process has one core meanwhile."""
    import ray

    from confpred.sampler.fleet import Fleet

    before = os.sched_getaffinity(0)
    ray.init(
        "local",
        num_gpus=gpus,
        num_cpus=gpus + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        with Fleet(how, describe=found) as engine:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), {min(before)})
            yield engine
    finally:
        os.sched_setaffinity(0, before)
        ray.shutdown()


def run(engine: Engine, what: Suite, how: Sampling, folder: Path) -> dict[str, Any]:
    """Sample, and return the rates of the run and of its middle."""
    from confpred.sampler.run import sample

    units = len(what.entries)
    seen: list[tuple[float, int]] = []

    def show(tally: Tally) -> None:
        if not seen or tally.rows != seen[-1][1]:
            seen.append((tally.elapsed_s, tally.rows))

    tally = sample(what, folder, engine, how, show=show)
    (t0, first), (t1, last) = (
        next(found for found in seen if found[1] >= share * tally.rows) for share in (0.1, 0.9)
    )
    if tally.rows != units * CONFIGS:
        raise RuntimeError(f"{tally.rows} rows of {units * CONFIGS}")
    return {
        "rows": tally.rows,
        "seconds": tally.elapsed_s,
        "rows_per_s": (last - first) / (t1 - t0),
        "whole_run_rows_per_s": tally.rows / tally.elapsed_s,
        "lost": tally.lost,
    }


def engines(folder: Path) -> dict[str, Any]:
    return in_turns(folder, suite(40), settings(), describe("all"), f"{__spec__.name}:describe")


def real(folder: Path) -> dict[str, Any]:
    from confpred.cuda.driver import describe as name_of
    from confpred.data.suites import Suite, read_suite
    from confpred.families.registry import all_families
    from confpred.problem.device import get_device
    from confpred.sampler.fleet import DESCRIBE
    from confpred.sampler.run import Here, Sampling, find_gpus, sample

    family, gpus = all_families()[REAL_FAMILY], find_gpus("0")
    device = get_device(gpus[0].device)
    entries = [
        entry
        for entry in read_suite(REAL_SUITE).entries
        if family.legal(entry.problem, device).sum() > CONFIGS
    ]
    what = Suite("fleet", tuple(entries[:REAL_UNITS]))
    how = Sampling(configs=CONFIGS, processes=0, pytorch=False, families=(REAL_FAMILY,))
    first = replace(how, processes=len(os.sched_getaffinity(0)))
    sample(what, folder / "compiled", Here(gpus, first), first)
    found = in_turns(folder, what, how, gpus, DESCRIBE)
    return found | dict(zip(("device", "driver"), name_of(0), strict=True))


def in_turns(
    folder: Path, what: Suite, how: Sampling, gpus: dict[int, Run], found: str
) -> dict[str, Any]:
    """Return the rates of one GPU by the local engine and by Ray."""
    from confpred.sampler.run import Here

    turns: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    for turn in range(TURNS):
        turns["local"].append(run(Here(gpus, how), what, how, folder / f"local-{turn}"))
        with ray_of(1, how, found) as engine:
            turns["ray"].append(run(engine, what, how, folder / f"ray-{turn}"))
    rates = {name: statistics.median(t["rows_per_s"] for t in each) for name, each in turns.items()}
    whole = {
        name: statistics.median(t["whole_run_rows_per_s"] for t in each)
        for name, each in turns.items()
    }
    return {
        "turns": turns,
        "ray_over_local": rates["ray"] / rates["local"],
        "whole_run_ray_over_local": whole["ray"] / whole["local"],
    }


def gpus(folder: Path) -> dict[str, Any]:
    found = {}
    for count in (1, GPUS):
        with ray_of(count, settings(), f"{__spec__.name}:describe") as engine:
            what = suite(50 * count)
            found[str(count)] = run(engine, what, settings(), folder / f"gpus-{count}")
    one, many = found["1"], found[str(GPUS)]
    return {
        "gpus": found,
        "eight_over_one": many["rows_per_s"] / one["rows_per_s"],
        "whole_run_eight_over_one": many["whole_run_rows_per_s"] / one["whole_run_rows_per_s"],
    }


def actors() -> list[int]:
    """Return the process ids of this user's actors, which Ray names in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.stat().st_uid == os.geteuid() and path.read_bytes().startswith(b"ray::Actor"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def kills(folder: Path) -> dict[str, Any]:
    """Kill actors while a run goes on, and work out what that should cost."""
    import pyarrow.dataset as ds

    for old in Path(os.environ[_LOG]).iterdir():
        old.unlink()
    killed: list[float] = []
    over = threading.Event()
    drawn = random.Random(0)

    def kill() -> None:
        while not over.wait(KILL_EVERY_S) and len(killed) < KILLS_S / KILL_EVERY_S:
            if running := actors():
                os.kill(drawn.choice(running), signal.SIGKILL)
                killed.append(time.time())

    with ray_of(GPUS, settings(), f"{__spec__.name}:describe") as engine:
        thread = threading.Thread(target=kill, daemon=True)
        units = round(GPUS * (KILLS_S + KILL_EVERY_S) / (CONFIGS * ROW_S) * 0.95)
        thread.start()
        found = run(engine, suite(units), settings(), folder / "kills")
        over.set()
    rows = ds.dataset(str(folder / "kills"), format="parquet").to_table(["n", "config"]).to_pylist()
    times = Counter((row["n"], row["config"]) for row in rows)
    begun: dict[str, list[float]] = defaultdict(list)
    for log in Path(os.environ[_LOG]).iterdir():
        for line in log.read_text().splitlines():
            at, _, gpu = line.partition(" ")
            begun[gpu].append(float(at))
    down_s = sum(
        later - at - ROW_S
        for of_gpu in begun.values()
        for at, later in pairwise(sorted(of_gpu))
        if later - at > DOWN_S
    )
    measured = sum(map(len, begun.values()))
    first = min(min(of_gpu) for of_gpu in begun.values())
    seconds = max(max(of_gpu) for of_gpu in begun.values()) - first
    row_s = statistics.median(
        later - at for of_gpu in begun.values() for at, later in pairwise(sorted(of_gpu))
    )
    undisturbed_s = len(rows) * row_s / GPUS
    lost_s = ((measured - len(rows)) * row_s + down_s) / GPUS
    return {
        **found,
        "kills": len(killed),
        "planned_rows": units * CONFIGS,
        "missing_rows": units * CONFIGS - len(times),
        "rows_stored_twice": sum(count - 1 for count in times.values()),
        "measured_rows": measured,
        "row_s": row_s,
        "measuring_s": seconds,
        "undisturbed_s": undisturbed_s,
        "lost_rows_s": (measured - len(rows)) * row_s / GPUS,
        "down_s": down_s / GPUS,
        "over_lost_work": seconds / (undisturbed_s + lost_s),
        "over_undisturbed": seconds / undisturbed_s,
    }


def merging(folder: Path) -> dict[str, Any]:
    import pyarrow as pa

    from confpred.data.parquet import merge, schema, write

    (run,) = describe("all").values()
    shards = folder / "merge"
    shards.mkdir()
    for shard in range(SHARDS):
        rows = [
            Measurement(
                Problem(1 + shard % 97, 64, 14, 14, 64 * (1 + shard // 97), 3, 3, padding=1),
                (),
                "grouped_fprop",
                "f" * 16,
                run,
                Outcome(number, "ok", 0.1 + number, 0.01, 7, 128),
                "2026-01-02T03:04:05+00:00",
            ).to_row()
            for number in range(SHARD_ROWS)
        ]
        write(pa.Table.from_pylist(rows, schema(CONVOLUTION)), shards / f"rows-{shard:05}.parquet")
    seconds, processor = [], []
    for turn in range(TURNS):
        start, used = time.perf_counter(), time.process_time()
        count = merge([shards], folder / f"{turn}.parquet")
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return {
        "rows": count,
        "shards": SHARDS,
        "turns_s": seconds,
        "processor_s": min(processor),
        "merge_s": min(seconds),
    }


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "engines": engines,
    "gpus": gpus,
    "kills": kills,
    "merge": merging,
    "real": real,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS)[:-1])
    parser.add_argument("--out", type=Path, help="folder of the result")
    arguments = parser.parse_args()
    from benchmarks.provenance import RESULTS, ROOT, provenance, write

    out = arguments.out or RESULTS
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    known = json.loads((out / "fleet.json").read_text()) if (out / "fleet.json").exists() else {}
    result = {name: known[name] for name in PARTS if name in known}
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as log, tempfile.TemporaryDirectory() as folder:
            os.environ[_LOG] = log
            result[name] = PARTS[name](Path(folder))
            result[name] |= provenance("ray", "pyarrow", gpu=False) | {"load": os.getloadavg()[0]}
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        write("fleet", {"row_s": ROW_S, "budgets": BUDGETS, **result}, out)


if __name__ == "__main__":
    main()

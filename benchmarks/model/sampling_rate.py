"""How fast the sampler measures once the kernels are compiled.

    python -m benchmarks.model.sampling_rate [--out FOLDER]

Runs ``confpred sample`` twice on the same problems, with a kernel cache of its own: the first run
compiles; the second, into another folder, finds every kernel in the cache. The rate is rows over
the seconds of the second run, start of the processes included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.provenance import DATASETS, RESULTS, provenance, write
from confpred.data.parquet import read
from confpred.data.suites import read_suite, write_suite
from confpred.problem.conv2d import CONVOLUTION

SUITE = DATASETS / "suites" / "fprop.json"
PROBLEMS, CONFIGS = 24, 250
_COMMAND = "from confpred.cli import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    suite = read_suite(SUITE)
    plain = [e for e in suite.entries if e.problem.r == 3 and e.problem.activation == "none"]
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "suite.json"
        write_suite(replace(suite, entries=tuple(plain[:PROBLEMS])), small)
        seconds = []
        for run in ("first", "second"):
            command = [sys.executable, "-c", _COMMAND, "sample", "--suite", str(small)]
            command += ["--out", f"{folder}/{run}", "--configs", str(CONFIGS)]
            start = time.perf_counter()
            environment = os.environ | {"CONFPRED_CACHE_DIR": f"{folder}/kernels"}
            subprocess.run(command, check=True, env=environment)
            seconds.append(time.perf_counter() - start)
        shards = Path(folder, "second").glob("*.parquet")
        rows = sum(read(path, CONVOLUTION).num_rows for path in shards)
    result = provenance("cuda-core", gpu=True) | {
        "problems": PROBLEMS,
        "rows": rows,
        "seconds_with_compiling": seconds[0],
        "seconds": seconds[1],
        "rows_per_s": rows / seconds[1],
    }
    path = write("sampling_rate", result, arguments.out)
    print(f"{rows} rows in {seconds[1]:.1f} s: {result['rows_per_s']:.0f} rows/s; written: {path}")


if __name__ == "__main__":
    main()

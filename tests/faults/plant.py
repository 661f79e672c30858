"""Plant the faults of `faults.toml`, one at a time, and see whether the tests notice.

    python tests/faults/plant.py                         # all of them, before the fast tests
    python tests/faults/plant.py --slow                  # before the slow ones too
    python tests/faults/plant.py --area timing           # those of one area
    python tests/faults/plant.py "the least replay"      # those whose names have these words

The repository is copied to a temporary folder, and nothing is planted in the repository itself. The
tests that are named must pass there before anything is planted. A fault is *caught* when one of the
tests that it names then fails, and *missed* when all pass, or when all that it names are slow and
these do not run. The exit code is 0 where at least 95 % are caught.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
WANTED = 0.95
#: Seconds that the tests of one fault may take; they take ten at most without it.
_PATIENCE_S = 120.0
#: Folders that are installed inside the package and lie beside it in the repository.
_INSIDE = ("kernels", "models", "service")
#: Plugins that no test here needs; they would take longer to import than most tests take.
_QUICKER = ("-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:xdist")
_FAST = ("-m", "not slow")
#: pytest's exit codes.
_PASSED, _FAILED, _NONE_RAN = 0, 1, 5
Result = Literal["caught", "missed", "broken"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to plant.

    Attributes:
        name: what is wrong then, in words.
        area: what it is a fault of.
        file: where it is planted, from the root of the repository.
        old, new: a text that occurs once in the file, and what takes its place.
        tests: what should notice, as pytest names it.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a planted fault.

    Attributes:
        fault: its name.
        result: ``caught``, ``missed``, or ``broken`` where the tests did not run to an end.
        seconds: that the tests took.
        output: the end of what they printed.
    """

    fault: str
    result: Result
    seconds: float
    output: str


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Return the faults in the file at `path`."""
    entries = tomllib.loads(path.read_text())["fault"]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def planted(fault: Fault, text: str) -> str:
    """`text`, the content of the fault's file, with the fault.

    Raises:
        ValueError: the text that the fault takes the place of does not occur exactly once.
    """
    found = text.count(fault.old)
    if found != 1:
        raise ValueError(f"{fault.file} has {found} times, not once: {fault.old!r}")
    return text.replace(fault.old, fault.new)


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the repository at `root`, as the tests need it, while the block lasts."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder)
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        for name in _INSIDE:
            if (copy / name).is_dir():
                (copy / "confpred" / name).symlink_to(copy / name)
        yield copy


def run_tests(
    copy: Path, tests: Sequence[str], patience_s: float, slow: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `tests` in the copy of the repository, up to the first that fails.

    Tests that have not ended after `patience_s` seconds have failed. Those that are marked as slow
    are left out unless `slow`.
    """
    environment = os.environ | {"PYTHONPATH": str(copy)}  # before the installation
    kind = () if slow else _FAST
    command = [sys.executable, "-m", "pytest", "-x", "-q", *_QUICKER, *kind, *tests]
    try:
        return subprocess.run(
            command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False, timeout=patience_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        told = f"the tests did not end within {patience_s:.0f} s"
        return subprocess.CompletedProcess(command, _FAILED, told)


def plant(copy: Path, fault: Fault, patience_s: float = _PATIENCE_S, slow: bool = False) -> Outcome:
    """Plant `fault` in the copy, run its tests (see `run_tests`), and take it out again."""
    begun = time.monotonic()
    path = copy / fault.file
    sound = path.read_text()
    written = path.stat().st_mtime_ns
    path.write_text(planted(fault, sound))
    # Bytecode is known by its source's second and size: no two faults of a file share a second.
    second = written + (1 + zlib.crc32(fault.name.encode())) * 10**9
    os.utime(path, ns=(second, second))
    try:
        done = run_tests(copy, fault.tests, patience_s, slow)
    finally:
        path.write_text(sound)
        os.utime(path, ns=(written, written))
    results: dict[int, Result] = {_PASSED: "missed", _NONE_RAN: "missed", _FAILED: "caught"}
    result = results.get(done.returncode, "broken")
    return Outcome(fault.name, result, time.monotonic() - begun, done.stdout[-2000:])


def plant_all(
    root: Path,
    faults: Sequence[Fault],
    jobs: int,
    patience_s: float = _PATIENCE_S,
    slow: bool = False,
) -> Iterator[Outcome]:
    """Plant `faults` side by side in `jobs` copies of the repository, and tell of each in turn.

    Args:
        patience_s: seconds that the tests of one fault may take. All tests together, which run
            first without a fault, may take as long for each fault.
        slow: run the tests that are marked as slow too.

    Raises:
        RuntimeError: a test fails before anything is planted.
    """
    copies: SimpleQueue[Path] = SimpleQueue()

    def work(fault: Fault) -> Outcome:
        copy = copies.get()
        try:
            return plant(copy, fault, patience_s, slow)
        finally:
            copies.put(copy)

    with copied(root) as first:
        copies.put(first)
        tests = sorted({test for fault in faults for test in fault.tests})
        sound = run_tests(first, tests, patience_s * len(faults), slow)
        if sound.returncode not in (_PASSED, _NONE_RAN):
            raise RuntimeError(f"the tests fail without a fault:\n{sound.stdout[-4000:]}")
        with ThreadPoolExecutor(jobs) as pool:
            folders = [tempfile.TemporaryDirectory(prefix="faults-") for _ in range(jobs - 1)]
            try:
                for folder in folders:
                    copy = Path(folder.name, "copy")
                    shutil.copytree(first, copy, symlinks=True)
                    for name in _INSIDE:
                        link = copy / "confpred" / name
                        if link.is_symlink():
                            link.unlink()
                            link.symlink_to(copy / name)
                    copies.put(copy)
                yield from pool.map(work, faults)
            finally:
                pool.shutdown(cancel_futures=True)
                for folder in folders:
                    folder.cleanup()


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    faults = read_faults()
    areas = sorted({fault.area for fault in faults})
    parser.add_argument("words", nargs="*", help="only faults whose names have one of these words")
    parser.add_argument("--area", choices=areas, help="only faults of this area")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (default: 1)")
    parser.add_argument("--slow", action="store_true", help="run tests that are slow too")
    parser.add_argument("--json", type=Path, help="write what became of each to this file")
    told = parser.parse_args()
    chosen = [
        fault
        for fault in faults
        if told.area in (None, fault.area)
        and (not told.words or any(words in fault.name for words in told.words))
    ]
    if not chosen:
        parser.error("no fault is of that area and name")
    begun = time.monotonic()
    outcomes = []
    print(f"running the tests of {len(chosen)} faults before any is planted ...", flush=True)
    for outcome in plant_all(ROOT, chosen, max(1, told.jobs), slow=told.slow):
        outcomes.append(outcome)
        print(f"{outcome.result:7} {outcome.seconds:6.1f} s  {outcome.fault}", flush=True)
        if outcome.result == "broken":
            print(outcome.output)
    caught = sum(outcome.result == "caught" for outcome in outcomes)
    share, seconds = caught / len(outcomes), time.monotonic() - begun
    print(f"{caught} of {len(outcomes)} faults caught ({share:.1%}) in {seconds:.0f} s")
    if told.json is not None:
        content = {"seconds": seconds, "outcomes": [asdict(outcome) for outcome in outcomes]}
        told.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if share >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())

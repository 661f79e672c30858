"""Commands that write: checked before they work, whole or not at all, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import confpred, worked
from sampler_rows import ROW, fill, other
from shared import room_for
from slow import slow_but

from confpred.cli import Stopped
from confpred.concurrency import stops_held
from confpred.data.parquet import merge, shards_in
from confpred.errors import StorageError
from confpred.files import write_whole

LAYER = "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1"
PRECIOUS = b"precious"


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert one line that has all `words` after those of progress, and no traceback."""
    assert done.returncode in (1, 2), done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("confpred: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return a folder of two shards."""
    fill(tmp_path / "ra", [ROW])
    shutil.copy(shards_in(tmp_path / "ra")[0], tmp_path / "ra" / "rows-first.parquet")
    fill(tmp_path / "ra", [other(n) for n in range(2, 300)])
    assert len(shards_in(tmp_path / "ra")) == 2
    return tmp_path / "ra"


Writer = Callable[[Path], tuple[object, ...]]


@pytest.fixture(params=["merge", "evaluate json", "evaluate plot", "plan export"])
def writer(request: pytest.FixtureRequest, shards: Path, few_measurements: Path) -> Writer:
    """Return the words of a command that writes a file, given that file."""
    words: dict[str, tuple[object, ...]] = {
        "merge": ("merge", shards),
        "evaluate json": ("evaluate", few_measurements, "--json"),
        "evaluate plot": ("evaluate", few_measurements, "--plot"),
        "plan export": ("plan", "export", "--device", "h100", "--layer", LAYER, "--out"),
    }
    return lambda out: (*words[request.param], out)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command gets as far as the import of what does the work."""
    for module in ("evaluate", "train"):
        monkeypatch.setitem(sys.modules, f"confpred.training.{module}", None)


def test_what_cannot_be_written_is_told_at_once(
    writer: Writer, tmp_path: Path, begun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file", "out"):
        (tmp_path / name).write_bytes(PRECIOUS)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for out, reason in (
        (tmp_path, "a file, and this is a folder"),
        (tmp_path / "pipe", "a plain file"),
        (tmp_path / "file" / "out", "Not a directory"),
        (Path("/proc/out"), "cannot write /proc/out"),
        (tmp_path / ("x" * 242 + ".parquet"), "File name too long"),
    ):
        if out == tmp_path and writer(out)[0] == "merge":
            continue  # it adds a part to a folder
        refused(confpred(*writer(out), "--force"), reason)
    refused(confpred(*writer(Path("out"))), "='out' is not allowed", "--force")
    refused(confpred(*writer(tmp_path / "link")), "--force")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "out").read_bytes() == PRECIOUS
    assert (tmp_path / "pipe").is_fifo()


def test_force_replaces_what_exists(shards: Path, few_measurements: Path, tmp_path: Path) -> None:
    merged, figures, plot = outputs = [tmp_path / name for name in ("merged", "json", "plot")]
    for out in outputs:
        out.write_bytes(PRECIOUS)
    worked("merge", shards, merged, "--force")
    evaluation = ("evaluate", few_measurements, "--folds", 2, "--json", figures, "--plot", plot)
    worked(*evaluation, "--force")
    assert [out.read_bytes()[:4] for out in outputs] == [b"PAR1", b'{\n "', b"\x89PNG"]


@pytest.mark.parametrize("command", ["merge", "plan export"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    command: str, shards: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    out = folder / "out"
    out.write_bytes(PRECIOUS)
    export = ("plan", "export", "--device", "h100", "--layer", LAYER, "--out")
    words = ("merge", shards) if command == "merge" else export
    with room_for(100):
        done = confpred(*words, out, "--force")
    refused(done, f"cannot write {out}: File too large")
    assert out.read_bytes() == PRECIOUS
    assert [path.name for path in folder.iterdir()] == ["out"]


def inputs(tmp_path: Path, file: Path) -> Iterator[Path]:
    """Other names of a file."""
    yield file
    yield file.parent / ".." / file.parent.name / file.name
    for make, name in ((os.symlink, "symbolic"), (os.link, "hard")):
        make(file, tmp_path / name)
        yield tmp_path / name


def test_merge_never_overwrites_its_shards(shards: Path, tmp_path: Path) -> None:
    shard = shards_in(shards)[0]
    before = shard.read_bytes()
    for name in inputs(tmp_path, shard):
        for force in (), ("--force",):
            refused(confpred("merge", shards, name, *force), "file that is not an input")
    refused(confpred("merge", shards, shards / "rows-all.parquet"), "shard of")
    assert len(shards_in(shards)) == 2
    assert shard.read_bytes() == before


def test_merge_into_a_folder_adds_a_part_and_changes_none(shards: Path, tmp_path: Path) -> None:
    parts = tmp_path / "datasets" / "h100"
    done = confpred("merge", shards, parts)
    (part,) = parts.iterdir()
    assert (done.returncode, done.stdout) == (0, f"299 rows in {part}\n")
    before = part.read_bytes()
    done = confpred("merge", shards, parts, "--force")
    assert (done.returncode, done.stdout) == (0, f"no rows that {parts} lacks\n")
    assert list(parts.iterdir()) == [part]
    assert part.read_bytes() == before
    refused(confpred("merge", parts, part, "--force"), "file that is not an input")
    refused(confpred("merge", parts, shards), "without a sampler's shards")


def test_other_commands_never_overwrite_their_inputs(
    few_measurements: Path, tmp_path: Path, repository: Path
) -> None:
    data = shutil.copy(few_measurements, tmp_path / "data.parquet")
    suite = shutil.copy(repository / "datasets" / "suites" / "smoke.json", tmp_path / "suite.json")
    os.symlink(tmp_path, tmp_path / "folder")
    export = ("plan", "export", "--device", "h100", "--network", suite, "--force", "--out")
    for words in (
        ("evaluate", data, "--force", "--json", data),
        ("evaluate", tmp_path, "--force", "--plot", tmp_path / "folder" / "data.parquet"),
        (*export, suite),
    ):
        before = Path(str(words[-1])).read_bytes()
        refused(confpred(*words), "is not allowed; allowed: a file that is not an input")
        assert Path(str(words[-1])).read_bytes() == before


def test_two_outputs_are_two_files(few_measurements: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = confpred("evaluate", few_measurements, "--json", out, "--plot", tmp_path / "." / "out")
    refused(done, "plot=", "another file than that of json")


def test_a_file_that_appears_meanwhile_is_left_alone(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(StorageError, match="File exists"):
        write_whole(out, lambda file: out.write_bytes(PRECIOUS), replace=False)
    assert out.read_bytes() == PRECIOUS
    with pytest.raises(StorageError, match="File exists"):
        merge([shards], out, replace=False)
    assert out.read_bytes() == PRECIOUS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "ra"]
    write_whole(tmp_path / "new", lambda file: file.write(PRECIOUS), replace=False)
    assert (tmp_path / "new").stat().st_nlink == 1


@pytest.mark.parametrize("command", ["train", "sample"])
def test_folders_are_checked_at_once(
    command: str, few_measurements: Path, tmp_path: Path, repository: Path, begun: None
) -> None:
    (tmp_path / "file").write_bytes(PRECIOUS)
    suite = repository / "datasets" / "suites" / "smoke.json"
    first = ("train", few_measurements) if command == "train" else ("sample", "--suite", suite)
    for out, reason in (
        (tmp_path / "file", "out='"),
        (tmp_path / "file" / "out", "Not a directory"),
        (Path("/proc/out"), "cannot write /proc/out"),
        # Not even an empty one: a model's version is its folder's name.
        *([(tmp_path, "a folder that does not exist yet")] if command == "train" else []),
    ):
        refused(confpred(*first, "--out", out), reason)
    assert (tmp_path / "file").read_bytes() == PRECIOUS


def helpers_of(pid: int) -> list[int]:
    """Return the processes of a session that are not zombies."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = status.read_text().rpartition(") ")[2].split()[:4]
        except OSError:
            continue
        if int(session) == pid and state != "Z" and int(status.parent.name) != pid:
            found.append(int(status.parent.name))
    return found


def wait_until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


#: Has the helper processes work for longer than any test waits: the training itself may be over
#: before a signal comes.
LONG = """
import time
from confpred.training import cross_validate
def of_fold(*_):
    time.sleep(600)
cross_validate._of_fold = of_fold
"""


@pytest.mark.parametrize(
    ("number", "to_all", "code", "word"),
    slow_but(
        [(signal.SIGINT, True, 130, "interrupted")],
        [
            (signal.SIGKILL, False, -signal.SIGKILL, None),
            (signal.SIGINT, True, 130, "interrupted"),  # as the terminal sends it
            (signal.SIGTERM, False, 143, "terminated"),
        ],
        "helper processes start",
    ),
)
def test_helper_processes_end_with_train(
    measurements: Path, tmp_path: Path, number: int, to_all: bool, code: int, word: str | None
) -> None:
    program = f"{LONG}\nfrom confpred.cli import main; main()"
    command = [sys.executable, "-c", program, "train", measurements, "--out", tmp_path / "model"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until(lambda: len(helpers_of(process.pid)) > 1)
        (os.killpg if to_all else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == code, said
        if word is not None:
            progress, _, last = said.removesuffix("\n").rpartition("\n")
            assert last == f"confpred: {word}"
            assert all(line.startswith("[") for line in progress.splitlines())
        wait_until(lambda: not helpers_of(process.pid))
        assert list(tmp_path.iterdir()) == []
    finally:
        for left in (process.pid, *helpers_of(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_waits_until_the_processes_run(number: signal.Signals) -> None:
    """Also where a thread has taken the signal, which then is not blocked."""

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    before = signal.signal(number, stop)
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    started = []

    def start() -> None:
        with stops_held():
            os.kill(os.getpid(), number)
            time.sleep(0.1)
            started.append(True)

    try:
        with pytest.raises(Stopped):
            start()
        assert started
        assert signal.getsignal(number) is stop
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        waiting.set()
        thread.join()
        signal.signal(number, before)


def test_a_stop_that_a_library_stumbles_over_is_still_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """joblib does, where a signal comes while it starts a thread."""

    def command(**_: object) -> None:
        try:
            raise Stopped(signal.SIGTERM)
        finally:
            raise RuntimeError("the pool is not there yet")

    # The moment between two of joblib's lines cannot be hit from outside.
    monkeypatch.setattr("confpred.cli.cli", command)
    done = confpred()
    assert (done.returncode, done.stderr) == (143, "confpred: terminated\n")

"""The kernel cache's size: limited; what was not used for longest goes first; many processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from confpred.cuda.cache import KernelCache
from confpred.errors import InvalidInput

KIB = 1024
PAYLOAD = bytes(10 * KIB - 32)  # an entry of 10 KiB with its checksum


def key(index: int) -> str:
    return hashlib.sha256(str(index).encode()).hexdigest()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def age(folder: Path, index: int, seconds: float) -> None:
    """Let the entry's last use be that long ago."""
    (path,) = folder.rglob(f"{key(index)}.cubin")
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_the_cache_stays_below_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, 100 * KIB)
    for index in range(10):
        cache.put(key(index), PAYLOAD)
        age(tmp_path, index, 1000 - index)
    assert cache.get(key(0)) == PAYLOAD  # a use, which counts more than when it was made
    for index in range(10, 13):
        cache.put(key(index), PAYLOAD)
        assert size(tmp_path) <= 100 * KIB
    kept = {index for index in range(13) if cache.get(key(index)) == PAYLOAD}
    assert {0, 9, 10, 11, 12} <= kept
    assert not {1, 2, 3} & kept


def test_what_is_being_written_is_left_alone_and_what_was_abandoned_is_not(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, 50 * KIB)
    cache.put(key(0), PAYLOAD)
    (folder,) = tmp_path.iterdir()
    fresh = folder / f".{key(1)}.cubin.abcd1234.tmp"
    old = folder / f".{key(2)}.cubin.abcd1234.tmp"
    foreign = folder / "notes.txt"
    for path in (fresh, old, foreign):
        path.write_bytes(PAYLOAD)
        os.utime(path, (0, 0) if path != fresh else None)
    for index in range(3, 12):
        cache.put(key(index), PAYLOAD)
    assert fresh.exists()
    assert foreign.exists()
    assert not old.exists()


def test_a_folder_that_nobody_may_see_stops_no_sweep(tmp_path: Path, monkeypatch) -> None:
    cache = KernelCache(tmp_path, 4 * 10 * KIB)
    for index in range(4):
        cache.put(key(index), PAYLOAD)

    class Unknown:
        """An entry whose kind a file system does not tell when it lists a folder, and refuses to
        tell when it is asked."""

        name, path = "00", str(tmp_path / "00")

        def __fspath__(self) -> str:
            return self.path

        def is_dir(self, follow_symlinks: bool) -> bool:
            raise PermissionError(13, "Permission denied", self.path)

    scandir = os.scandir

    def listed(folder: Path) -> contextlib.AbstractContextManager:
        entries = [Unknown()] * (folder == tmp_path)
        return contextlib.nullcontext([*entries, *scandir(folder)])

    monkeypatch.setattr(os, "scandir", listed)  # a file system as described
    cache.put(key(4), PAYLOAD)
    assert size(tmp_path) <= cache.most


def test_many_processes_keep_the_limit_together(tmp_path: Path) -> None:
    program = (
        "import sys, hashlib\n"
        "from pathlib import Path\n"
        "from confpred.cuda.cache import KernelCache, default_folder\n"
        "cache = KernelCache(default_folder())\n"
        "for index in range(40):\n"
        "    key = hashlib.sha256(f'{sys.argv[1]} {index}'.encode()).hexdigest()\n"
        "    cache.put(key, bytes(100_000))\n"
        "    assert cache.get(key) in (bytes(100_000), None)  # others may be that much faster\n"
    )
    settings = {"CONFPRED_CACHE_DIR": str(tmp_path), "CONFPRED_CACHE_MIB": "2"}
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(i)], env=os.environ | settings)
        for i in range(3)
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert 2**20 < size(tmp_path) <= 2 * 2**20 + 3 * 2**17 + 3 * 100_032
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_limit_is_a_gibibyte_unless_a_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CONFPRED_CACHE_MIB", raising=False)
    assert KernelCache(tmp_path).most == 2**30
    monkeypatch.setenv("CONFPRED_CACHE_MIB", "20")
    assert KernelCache(tmp_path).most == 20 * 2**20


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "much", "1e3", "٣"])
def test_another_limit_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CONFPRED_CACHE_MIB", value)
    with pytest.raises(InvalidInput, match=r"CONFPRED_CACHE_MIB=.* a whole number of MiB"):
        KernelCache(Path("anywhere"))

"""Committed measurements are parts that are added and never written again.

Git stores a changed Parquet file whole, so that a row that is added to one costs the whole file.
``datasets/parts.sha256`` has the digest of each part, in the form of ``sha256sum``, and only grows.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

LIST = "datasets/parts.sha256"


def test_every_part_is_as_it_was_when_it_was_added(repository: Path) -> None:
    folder = (repository / LIST).parent
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.parquet")
    }
    lines = [line.split("  ") for line in (repository / LIST).read_text().splitlines()]
    listed = {name: digest for digest, name in lines}
    assert len(listed) == len(lines), "a part is listed once"
    new = sorted(found.keys() - listed)
    assert not new, f"in datasets/: sha256sum {' '.join(new)} >> parts.sha256"
    assert found == listed, "a part was changed or is gone: put it back, and add a new one"


def test_nothing_but_parts_is_there(repository: Path) -> None:
    for path in (repository / LIST).parent.rglob("*.parquet"):
        assert path.name.startswith("part-"), path


def test_no_line_was_ever_taken_from_the_list(repository: Path) -> None:
    """As far as the checkout has its history; a copy of the files alone has none. A line that was
    taken is there again."""
    if not (repository / ".git").exists():
        return
    log = ("log", "--format=", "--patch", "--no-renames", "--unified=0", "--", LIST)
    done = subprocess.run(["git", "-C", repository, *log], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    removed = [line for line in done.stdout.splitlines() if line.startswith("-")]
    taken = {line[1:] for line in removed if not line.startswith("---")}
    assert taken - set((repository / LIST).read_text().splitlines()) == set()

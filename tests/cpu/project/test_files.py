"""Files appear whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from shared import closed

from confpred.errors import StorageError
from confpred.files import whole_in, write_folder, write_whole


def fail(file: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_appears_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_whole(path, lambda file: file.write(b"one"))
    write_whole(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_what_is_private_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    write_whole(path, lambda file: file.write(b"one"), private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(StorageError, match=f"cannot write {path}: No space left on device"):
        write_whole(path, fail)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_error_of_the_writer_is_its_own(tmp_path: Path) -> None:
    def wrong(file: object) -> None:
        raise ValueError("no number")

    with pytest.raises(ValueError, match="no number"):
        write_whole(tmp_path / "file", wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    made = tmp_path / "made" / "model"
    write_folder(made, {"a.txt": "one", "b.txt": "zwölf", "deep/er/c": b"\x7fELF"})
    assert {p.relative_to(made).as_posix(): p.read_bytes() for p in made.rglob("*.*")} == {
        "a.txt": b"one",
        "b.txt": "zwölf".encode(),
    }
    assert (made / "deep" / "er" / "c").read_bytes() == b"\x7fELF"
    assert stat.S_IMODE(made.stat().st_mode) == 0o755


def test_a_folder_replaces_none_and_leaves_nothing(tmp_path: Path) -> None:
    there = tmp_path / "model"
    write_folder(there, {"a.txt": "one"})
    with pytest.raises(StorageError, match="cannot write"):
        write_folder(there, {"a.txt": "two"})
    with pytest.raises(StorageError, match="cannot write"):
        write_folder(tmp_path / "other", {"a": "a file", "a/b": "in it"})
    assert (there / "a.txt").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_is_being_written_is_not_whole(tmp_path: Path) -> None:
    def look(file: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        assert whole_in(tmp_path) == [tmp_path / "a"]

    write_whole(tmp_path / "a", lambda file: None)
    write_whole(tmp_path / "b", look)
    assert whole_in(tmp_path) == [tmp_path / "a", tmp_path / "b"]


def test_a_folder_that_is_not_there_has_nothing_and_a_closed_one_is_an_error(
    tmp_path: Path,
) -> None:
    write_whole(tmp_path / "a", lambda file: None)
    assert whole_in(tmp_path / "b") == whole_in(tmp_path / "a") == []
    with closed(tmp_path), pytest.raises(PermissionError):
        whole_in(tmp_path)

"""Kept answers whose files or folders cannot be read are as if they were not there."""

from __future__ import annotations

import errno
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sampler_rows import LAYER, ROW, fill
from shared import closed

from confpred.cuda import driver
from confpred.families.registry import family_named
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import get_device
from confpred.problem.limits import UNLIMITED
from confpred.pytorch.run import choosing
from confpred.sampler import kept
from confpred.sampler.tasks import task_of

DEVICE = get_device("h100")
LAYERS = [replace(LAYER, n=n, bias=False, activation="none") for n in (1, 2)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of two files, a layer each: the times of PyTorch's operator and of a
    kernel."""
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "describe", lambda _: ("H100", "580.1"))  # no GPU is here
    monkeypatch.setattr(kept, "unread", Counter())  # by this test: other tests keep graphs
    folder = choosing.kept_folder(DEVICE, CONVOLUTION)
    own = task_of(LAYERS[0], (), family_named(ROW.provider), [0])
    outcome = replace(ROW.outcome, config_id=0)
    digests = {"pytorch": "", own.provider: own.source_digest}
    rows = [replace(ROW, provider=p, source_digest=d, outcome=outcome) for p, d in digests.items()]
    fill(folder, *([replace(row, problem=layer) for row in rows] for layer in LAYERS))
    yield folder
    choosing._times.cache_clear()


def answered() -> list[int]:
    """Return the batch sizes of the layers with a kept answer."""
    answers = choosing.kept_answers(LAYERS, DEVICE, CONVOLUTION, UNLIMITED)
    return [choice.problem.n for choice in answers.values()]


def test_a_file_that_cannot_be_read_for_a_moment_stays_and_is_read_later(folder, caplog) -> None:
    first, _ = shards = sorted(folder.glob("rows-*"))
    contents = [shard.read_bytes() for shard in shards]
    with closed(first):
        assert [answered() for _ in range(3)] == [[2]] * 3
        (said,) = caplog.messages
        assert said.startswith(f"{first} is not a whole file of measurements: Permission denied")
    assert answered() == [1, 2]
    assert sorted(folder.iterdir()) == [folder / ".lock", *shards]
    assert [shard.read_bytes() for shard in shards] == contents


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT])
def test_so_does_one_that_fails_while_it_is_read(folder, monkeypatch, number) -> None:
    first, second = sorted(folder.glob("rows-*"))
    open_file = Path.open

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(number, "such as a network's disk")

    def opened(path: Path, *how: Any) -> Any:
        return Failing(bytes(99)) if path == first else open_file(path, *how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)  # a disk as described
        assert answered() == [2]
    assert answered() == [1, 2]
    assert {first, second} <= {*folder.iterdir()}


@pytest.mark.parametrize("above", range(5))
def test_folders_that_nobody_may_see_have_no_answers(folder, caplog, above) -> None:
    with closed([folder, *folder.parents][above]):
        assert answered() == answered() == []
        assert kept.folders_of(DEVICE.key, CONVOLUTION) in ([], [folder])
        assert kept.answers(DEVICE, CONVOLUTION, UNLIMITED) == []
        assert kept.times_in(folder, CONVOLUTION) == {}
    assert len(caplog.messages) == len({*caplog.messages})
    assert answered() == [1, 2]


def test_a_folder_that_goes_meanwhile_is_the_oldest(folder, monkeypatch) -> None:
    gone = folder.with_name("gone")
    shards = [gone / "rows-a.parquet", *folder.glob("rows-*")]
    monkeypatch.setattr(kept, "shards_of", lambda *_: shards)  # another process removes one
    assert kept.folders_of(DEVICE.key, CONVOLUTION) == [folder, gone]

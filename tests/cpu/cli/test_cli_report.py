"""``confpred report`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command_line import confpred, named, worked
from pages import inputs_of

from confpred.report.page import page


def report(*words: object) -> subprocess.CompletedProcess[str]:
    return confpred("report", *words)


@pytest.fixture(scope="module")
def evaluation_file(few_measurements: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation") / "evaluation.json"
    path.write_text(json.dumps(inputs_of(few_measurements).evaluations[0].figures))
    return path


def test_the_command_writes_the_librarys_page(
    few_measurements, model_folder, evaluation_file, tmp_path
):
    out = tmp_path / "new" / "report.html"
    done = worked("report", evaluation_file, few_measurements, model_folder, "--out", out)
    sources = (evaluation_file, few_measurements, model_folder)
    assert out.read_text() == page(inputs_of(*sources))
    assert done.stdout.startswith(f"{out}: 3 files, ")


def test_a_model_or_an_evaluation_alone_makes_a_page(model_folder, evaluation_file, tmp_path):
    for number, source in enumerate((model_folder, model_folder.parent, evaluation_file)):
        out = tmp_path / f"{number}.html"
        worked("report", source, "--out", out)
        assert ('id="importances"' in out.read_text()) == (source != evaluation_file)


def test_what_is_wrong_is_named(measurements, evaluation_file, model_folder, tmp_path):
    out, foreign = tmp_path / "report.html", tmp_path / "foreign.json"
    foreign.write_text("{}")
    for words, message in (
        ((), "Missing argument"),
        (("missing",), "Path 'missing' does not exist"),
        ((foreign,), "is not an evaluation"),
        ((tmp_path,), "holds no .parquet files"),
        ((evaluation_file, measurements), "give the files that were judged"),
        ((measurements, "--device", "a100"), "no measurements of a100"),
    ):
        named(report(*words, "--out", out), message)
        assert not out.exists()
    done = report(model_folder)
    assert "Missing option '--out'" in done.stderr
    out.write_text("mine")
    assert "it exists, use --force to replace it" in report(model_folder, "--out", out).stderr
    assert out.read_text() == "mine"
    done = report(evaluation_file, "--out", evaluation_file, "--force")
    assert "a file that is not an input" in done.stderr

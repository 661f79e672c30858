"""`confpred evaluate --holdout` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import synthetic


def test_the_command_judges_a_model_by_the_hold_out_first(measurements, model_folder, tmp_path):
    held_file = synthetic.write_holdout(tmp_path / "held.parquet", "net0")
    anchors_file = synthetic.write_anchors(tmp_path / "anchors.parquet", held_file)
    out = tmp_path / "evaluation.json"
    words = ["--holdout", held_file, "--model", model_folder, "--anchors", anchors_file]
    done = confpred("evaluate", measurements, *words, "--folds", 2, "--json", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("hold-out:") < done.stdout.index("problems judged in 2 folds")
    assert "all that the model was trained on" in done.stdout
    content = json.loads(out.read_text())
    assert content["holdout"]["model"] == model_folder.name
    assert content["sittings"]["runs"] == 3
    assert "noise across 3 runs" in done.stdout
    assert content["methods"]["model"]["geomean"] >= 1


@pytest.mark.slow(reason="the command trains and judges")
def test_without_a_model_one_is_trained_on_the_rest(few_measurements, tmp_path):
    """The hold-out's networks are among the data, and are left out of it."""
    table, out = pq.read_table(few_measurements), tmp_path / "evaluation.json"
    named = pc.match_substring(table["networks"], "net1")
    held = tmp_path / "held.parquet"
    pq.write_table(table.filter(named), held)
    done = confpred("evaluate", few_measurements, "--holdout", held, "--folds", 2, "--json", out)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert content["holdout"]["model"] == "without-the-hold-out"
    assert content["holdout"]["checked"] == "all that the model was trained on"
    assert (
        content["holdout"]["problems"]
        == table.filter(named)
        .group_by(["n", "c", "h", "w", "k", "groups", "bias"])
        .aggregate([])
        .num_rows
    )


def test_the_hold_out_alone_needs_no_cross_validation(measurements, model_folder, tmp_path):
    held = synthetic.write_holdout(tmp_path / "held.parquet", "net0")
    words = [measurements, "--holdout", held, "--model", model_folder, "--holdout-only"]
    done = confpred("evaluate", *words, "--json", tmp_path / "verdict.json")
    assert done.returncode == 0, done.stderr
    assert "hold-out:" in done.stdout
    assert "folds" not in done.stdout
    assert re.search(r"^\[\d+s\] judging by fewer configs", done.stderr, re.MULTILINE)
    content = json.loads((tmp_path / "verdict.json").read_text())
    assert content["format"] == "confpred-holdout/1"
    assert content["holdout"]["model"] == model_folder.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--holdout-only",), "with a --holdout, and without --plot"),
        (("--holdout-only", "--holdout", "DATA", "--plot", "a.png"), "and without --plot"),
        (("--model", "MODEL"), "a model to be judged by a --holdout"),
    ],
)
def test_options_that_do_not_go_together_are_refused(measurements, model_folder, words, message):
    files = {"DATA": measurements, "MODEL": model_folder}
    done = confpred("evaluate", measurements, *(files.get(word, word) for word in words))
    assert done.returncode == 2
    assert message in done.stderr


def confpred(*words: object) -> subprocess.CompletedProcess[str]:
    program = "from confpred.cli import main; main()"
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)

"""`confpred evaluate --holdout` as a user meets it."""

from __future__ import annotations

import json
import re

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import synthetic
from command_line import confpred, named, worked


@pytest.mark.slow(reason="the command trains and judges")
def test_the_command_judges_a_model_by_the_hold_out_first(measurements, model_folder, tmp_path):
    held_file = synthetic.write_holdout(tmp_path / "held.parquet", "net0")
    anchors_file = synthetic.write_anchors(tmp_path / "anchors.parquet", held_file)
    out = tmp_path / "evaluation.json"
    words = ["--holdout", held_file, "--model", model_folder, "--anchors", anchors_file]
    done = worked("evaluate", measurements, *words, "--folds", 2, "--json", out)
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
    worked("evaluate", few_measurements, "--holdout", held, "--folds", 2, "--json", out)
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
    done = worked("evaluate", *words, "--json", tmp_path / "verdict.json")
    assert "hold-out:" in done.stdout
    assert "folds" not in done.stdout
    assert re.search(r"^\[\d+s\] judging by fewer configs", done.stderr, re.MULTILINE)
    content = json.loads((tmp_path / "verdict.json").read_text())
    assert content["format"] == "confpred-holdout/1"
    assert content["holdout"]["model"] == model_folder.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--holdout-only",), "--holdout-only needs --holdout, and draws no --plot"),
        (("--holdout-only", "--holdout", "DATA", "--plot", "a.png"), "draws no --plot"),
        (("--model", "MODEL"), "--model needs --holdout, which judges it"),
    ],
)
def test_options_that_do_not_go_together_are_refused(measurements, model_folder, words, message):
    files = {"DATA": measurements, "MODEL": model_folder}
    given = (files.get(word, word) for word in words)
    named(confpred("evaluate", measurements, *given), message, 2)

"""A hold-out judges a model by all that could be chosen, and only one that has not seen it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import synthetic

from benchmarks import tables
from confpred.errors import DataError
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.model.folder import load_model
from confpred.predict.choice import Choice
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import get_device
from confpred.training import holdout
from confpred.training.dataset import Timings, noise_across_runs, read_dataset
from confpred.training.holdout import (
    EITHER,
    Coverage,
    Spread,
    check_unseen,
    judge_holdout,
    read_holdout,
    without_holdout,
)

H100 = get_device("h100")
LAYER = Problem(8, 64, 14, 14, 64, 3, 3, padding=1, groups=8)


@pytest.fixture(scope="module")
def held_file(tmp_path_factory) -> Path:
    """All that was made up of net0, which `model_folder` has not seen."""
    return synthetic.write_holdout(tmp_path_factory.mktemp("held") / "held.parquet", "net0")


@pytest.fixture(scope="module")
def anchors_file(held_file) -> Path:
    """Return the first two of its configs, timed in three runs; the third is 2 % slower."""
    return synthetic.write_anchors(held_file.with_name("anchors.parquet"), held_file)


def test_noise_across_runs_is_that_of_the_same_config(held_file, anchors_file):
    noise = noise_across_runs([anchors_file], CONVOLUTION, "h100")
    assert (noise.runs, noise.repeated) == (3, 2)
    off = np.log([1.0, 1.0, 1.02])
    assert noise.deviation == pytest.approx(off.std(ddof=1))
    assert noise.largest == pytest.approx(np.log(1.02) * 2 / 3)
    with pytest.raises(DataError, match="no config of h100 was timed in two runs"):
        noise_across_runs([held_file], CONVOLUTION, "h100")


@pytest.fixture(scope="module")
def held(held_file):
    return read_holdout(read_dataset([held_file]), [held_file])


def test_the_modes_of_cudnn_are_kept_apart(held):
    assert held.pytorch_ms.keys() == {"benchmark", "heuristics"}
    for problem, ms in held.pytorch_ms["benchmark"].items():
        assert held.dataset.pytorch_ms[problem] == ms
        assert held.pytorch_ms["heuristics"][problem] == pytest.approx(2 * ms)
    assert set(held.sittings.values()) == {2}


def test_a_model_that_has_seen_a_layer_is_refused(measurements, held, model_folder, tmp_path):
    data, model = read_dataset([measurements]), load_model(model_folder)
    assert check_unseen(model, data, held.dataset) == "all that the model was trained on"
    with pytest.raises(DataError, match="has seen network net"):
        check_unseen(model, data, data)
    unnamed = replace(
        held.dataset, timings=tuple(replace(t, networks=()) for t in data.timings[:1])
    )
    with pytest.raises(DataError, match=r"has seen the layer of n="):
        check_unseen(model, data, unnamed)
    # Its training data is not at hand: then the problems that it remembers decide.
    other = replace(data, timings=data.timings[:5])
    assert "has the best configs of" in check_unseen(model, other, held.dataset)
    with pytest.raises(DataError, match="has seen the layer"):
        check_unseen(model, other, data)


def test_training_data_is_freed_of_the_hold_out(measurements, held):
    data = read_dataset([measurements])
    left = without_holdout(data, held.dataset)
    layers = {t.problem.layer() for t in held.dataset.timings}
    assert left.timings
    assert not layers & {t.problem.layer() for t in left.timings}
    assert not any("net0" in t.networks for t in left.timings)
    assert left.pytorch_ms.keys() == {t.problem for t in left.timings} & data.pytorch_ms.keys()
    with pytest.raises(DataError, match="all of the training data"):
        without_holdout(held.dataset, held.dataset)


@pytest.fixture(scope="module")
def verdict(held, model_folder):
    return judge_holdout(load_model(model_folder), held, "nothing", seed=0)


def test_the_verdict_is_of_every_problem(held, verdict):
    assert verdict.problems == len(held.dataset.timings)
    # The hold-out has a part of the legal configs, so that all choices may be unmeasured.
    assert verdict.problems - verdict.unmeasured <= verdict.whole.problems <= verdict.problems
    assert verdict.whole.problems > verdict.problems // 2
    assert (verdict.networks, verdict.configs) == (1, held.dataset.rows)
    assert 0 < verdict.complete < 1
    assert verdict.sittings == verdict.problems
    assert 1 <= verdict.whole_first["8"] <= verdict.whole_first["3"] <= verdict.whole.geomean
    assert 1 <= verdict.first["3"] <= verdict.first["1"] == pytest.approx(verdict.ours.geomean)
    assert 1 <= verdict.weighted < 2
    assert verdict.origins == {"networks that are new": verdict.ours}
    assert set(verdict.thinned) == {"20", "40", "48", "80"}
    # An oracle of few configs is a slower one, and hides regret.
    assert verdict.speed["heuristics"] >= verdict.speed["benchmark"] == verdict.speed[EITHER]
    assert verdict.bounds["all"].problems <= verdict.problems
    regrets = [row[2] for row in verdict.worst]
    assert regrets == sorted(regrets, reverse=True)
    assert regrets[0] == verdict.whole.worst


def test_the_same_seed_gives_the_same_verdict(held, verdict, model_folder):
    again = judge_holdout(load_model(model_folder), held, "nothing", seed=0)
    assert asdict(again) == asdict(verdict)


def test_the_published_tables_are_of_the_verdict(verdict):
    result = {
        "holdout": json.loads(json.dumps(asdict(verdict))),
        "sittings": {"deviation": 0.004, "runs": 3},
    }
    names = ("holdout", "holdout-answers")
    made = {name: tables.TABLES[name][1](result, {"methods": {}}) for name in names}
    whole = verdict.whole
    row = f"| with PyTorch's operator | {whole.problems} | {whole.geomean:.3f} | {whole.p95:.3f} |"
    assert row in made["holdout"]
    assert f"| regret weighted by time | {verdict.weighted:.3f} |" in made["holdout-answers"]
    assert "| standard deviation between runs | 0.40%, 3 runs |" in made["holdout-answers"]
    assert {tables.TABLES[name][1]({}, {}) for name in names} == {""}


def test_another_device_is_refused(held, model_folder):
    model = load_model(model_folder)
    other = replace(held, dataset=replace(held.dataset, device=replace(model.device, key="h200")))
    with pytest.raises(DataError, match="hold-out is of conv2d on h200"):
        judge_holdout(model, other, "nothing", seed=0)


def measured(times, ranking, pytorch):
    """Return a problem of one family with these milliseconds by config, the model's ranking (None
    stands for PyTorch's operator), and PyTorch's milliseconds by mode."""
    rows = np.array(sorted(times))
    ms = np.array([times[row] for row in rows])
    candidates = {Candidate("grouped_fprop", row): t for row, t in times.items()}
    if pytorch:
        candidates[PYTORCH_OPERATOR] = pytorch["benchmark"]
    choices = tuple(
        Choice(
            LAYER,
            "h100",
            "predicted",
            PYTORCH_OPERATOR if row is None else Candidate("grouped_fprop", row),
            regret_bound=None if place else 1.2,
        )
        for place, row in enumerate(ranking)
    )
    timings = (Timings(LAYER, ("net",), "grouped_fprop", rows, ms, ms, H100),)
    return holdout._Ranked(LAYER, ("net",), timings, candidates, pytorch, choices)


def test_an_answer_of_ours_is_judged_by_the_best_of_all():
    pytorch = {"benchmark": 0.8, "heuristics": 1.6}
    judged = holdout._judge(measured({3: 2.0, 4: 1.0, 5: 1.25}, [5, 3, None, 4], pytorch))
    assert (judged.answer.config_id, judged.time_ms, judged.bound) == (5, 1.25, 1.2)
    assert judged.ours == pytest.approx((1.25, 1.0, 1.0))
    assert judged.whole == pytest.approx((1.25 / 0.8, 1.0, 1.0))
    expected = {"benchmark": 0.64, "heuristics": 1.28, EITHER: 0.64}
    assert judged.speed == pytest.approx(expected)
    assert not judged.unmeasured


def test_pytorchs_operator_is_an_answer_that_is_never_slower_than_itself():
    pytorch = {"benchmark": 2.0, "heuristics": 1.0}
    judged = holdout._judge(measured({3: 1.5}, [None, 3], pytorch))
    assert judged.answer == PYTORCH_OPERATOR
    assert judged.whole == pytest.approx((2.0 / 1.5, 1.0, 1.0))
    assert judged.ours == (1.0, 1.0, 1.0)
    assert set(judged.speed.values()) == {1.0}
    assert judged.best_ours_ms == 1.5


def test_a_first_choice_that_could_not_be_timed_is_counted():
    judged = holdout._judge(measured({3: 1.5, 4: 1.0}, [7, 3, 4], {}))
    assert judged.unmeasured
    assert judged.bound is None
    assert judged.ours[0] == 1.5
    assert holdout._judge(measured({3: 1.5}, [7, 8], {})) is None


def test_summaries_have_the_figures_of_their_names():
    spread = Spread.of([1.0, 1.0, 1.25, 2.0])
    assert spread.geomean == pytest.approx((1.25 * 2) ** 0.25)
    assert (spread.worst, spread.efficiency_min) == (2.0, 0.5)
    assert spread.efficiency_mean == pytest.approx(0.825)
    assert spread.far == 0.5
    bounds = Coverage.of([(1.0, 1.1), (1.2, 1.1), (1.1, 1.1)])
    assert (bounds.problems, bounds.covered, bounds.median) == (3, pytest.approx(2 / 3), 1.1)

"""Regret is worked out right, the model beats the baselines, and the command reports it."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest
from command_line import confpred, named, worked
from synthetic import SMALL

from confpred.errors import install_command
from confpred.model.rank import PytorchModel
from confpred.model.trees import Trees
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.training.calibrate import fit_pytorch, margins
from confpred.training.cross_validate import best_ms, family_models
from confpred.training.dataset import Timings, read_dataset
from confpred.training.evaluate import MODEL, Evaluation, Summary, baselines, evaluate
from confpred.training.fit import fit_families
from confpred.training.regret import TOPS

H100 = get_device("h100")


@pytest.fixture(scope="module")
def evaluation(measurements) -> Evaluation:
    return evaluate(read_dataset([measurements]), SMALL, folds=3, seed=0)


def test_random_choice_is_judged_by_its_expectation():
    times = np.array([3.0, 1.0, 2.0, 7.0])
    problem = Problem.parse("n=4 c=64 h=14 w=14 k=64 r=3 s=3 groups=8 padding=1")
    t = Timings(problem, (), "grouped_fprop", np.arange(4), times, times, H100)
    judged = baselines()["random"]([], H100, 0)(t)
    for k, regret in zip(TOPS, judged.regret, strict=True):
        subsets = list(itertools.combinations(times, min(k, len(times))))
        assert regret == pytest.approx(np.mean([min(s) for s in subsets]) / times.min())


def test_the_fixed_config_is_the_best_of_the_training_problems():
    def timings(n, rows, ms):
        problem = Problem(n, 64, 14, 14, 64, 3, 3, padding=1, groups=8)
        times = np.array(ms)
        return Timings(problem, (), "grouped_fprop", np.array(rows), times, times, H100)

    train = [timings(n, [0, 1, 2], [1.5, 1.0, 1.1]) for n in (1, 2)]
    train += [timings(n, [0, 2], [1.9, 1.0]) for n in (3, 4)]
    judge = baselines()["fixed config"](train, H100, 0)
    # Config 2 serves all four, at 1.1 twice; config 1 serves two, and counts as 2 on the others.
    assert judge(timings(9, [0, 1, 2], [1.0, 2.0, 3.0])).regret[0] == 3.0
    assert judge(timings(9, [0, 1], [1.0, 2.0])).regret[0] == 2.0


def test_summary_is_of_the_first_choice():
    regret = np.column_stack([np.linspace(1, 2, 101), np.ones(101), np.ones(101)])
    summary = Summary.of(regret, [10] * 101)
    assert summary.geomean == pytest.approx(np.exp(np.mean(np.log(regret[:, 0]))))
    assert (summary.p90, summary.p95, summary.worst) == pytest.approx((1.9, 1.95, 2.0))
    assert summary.top == {"1": pytest.approx(summary.geomean), "3": 1.0, "8": 1.0}
    assert (summary.problems, summary.candidates) == (101, 10)


def test_the_model_is_ahead_of_every_baseline(evaluation):
    geomean = {name: summary.geomean for name, summary in evaluation.summaries().items()}
    assert set(geomean) == {MODEL, *baselines()}
    assert geomean[MODEL] == min(geomean.values())
    assert geomean[MODEL] < min(geomean[name] for name in baselines() if name != "roofline")
    assert geomean[MODEL] < geomean["roofline"] < geomean["random"]


def test_every_problem_of_a_network_is_judged_once(evaluation):
    judged = [t.problem for t in evaluation.timings]
    expected = {t.problem for t in evaluation.dataset.timings if t.networks}
    assert len(judged) == len(expected)
    assert set(judged) == expected
    for scores in evaluation.scores.values():
        assert len(scores) == len(judged)
        assert all(s.regret[0] >= s.regret[1] >= s.regret[2] >= 1 for s in scores)
    assert evaluation.noise == pytest.approx((0.01, 0.01))  # as the measurements were made up


def test_choosing_among_operators_is_better_than_always_one(evaluation):
    whole = evaluation.whole
    chosen = whole.regret["the predicted fastest"]
    ours, theirs = whole.regret["always ours"], whole.regret["always PyTorch's"]
    assert ours.problems == theirs.problems == chosen.problems
    assert theirs.worst == pytest.approx(3.0, rel=0.05)  # as they were made up
    assert chosen.geomean < min(ours.geomean, theirs.geomean)
    assert whole.speed == pytest.approx(theirs.geomean / chosen.geomean)
    wide = [p for p in evaluation.dataset.pytorch_ms if p.group_width == 32]
    assert 0 < whole.pytorch <= len(wide)
    assert whole.slower <= 0.1 * chosen.problems
    assert whole.worst_speed < 1 / 1.05 or whole.slower == 0


def test_the_whole_choice_is_made_with_a_margin(evaluation):
    """As the predictor places PyTorch's operator: with the margin that the other folds' answers
    have."""
    data, found = evaluation.dataset, []
    predicted = dict(zip(evaluation.timings, evaluation.scores[MODEL], strict=True))
    for number, fold in enumerate(evaluation.folds):
        models = family_models(fit_families(fold.train, data.device, SMALL, evaluation.seed))
        pytorch_ms = data.pytorch_everywhere
        ours_ms = best_ms(models, fold.train, pytorch_ms.keys())
        fitted = fit_pytorch(ours_ms, pytorch_ms, data.operation, H100, SMALL, evaluation.seed)
        model = PytorchModel(data.operation, Trees(fitted), {})
        for t in fold.test:
            (expected,) = model.log_ratios([t.problem], data.device)
            best = float(t.time_ms.min())
            mine, theirs = predicted[t].regret[0] * best, data.pytorch_ms[t.problem]
            actual = np.log(theirs * predicted[t].ahead / mine)
            row = (t.problem.kind, expected, mine, theirs, min(theirs, best))
            found.append((number, actual, *row))
    chosen = []
    for number in range(len(evaluation.folds)):
        others = [row for row in found if row[0] != number]
        actual = np.array([row[1] for row in others])
        known = margins([row[2] for row in others], np.array([row[3] for row in others]), actual)
        for _, _, kind, expected, mine, theirs, best in (row for row in found if row[0] == number):
            chosen.append((mine if expected >= known[kind] else theirs) / best)
    whole = evaluation.whole.regret["the predicted fastest"]
    assert whole.geomean == pytest.approx(np.exp(np.log(chosen).mean()))


@pytest.mark.slow(reason="folds are trained and judged in other processes")
def test_command_prints_writes_and_plots(few_measurements, tmp_path):
    figures, plot = tmp_path / "figures.json", tmp_path / "regret.png"
    # This module is found first, also by the processes that judge, as if XGBoost were not
    # installed.
    (tmp_path / "xgboost.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("--folds", 2, "--json", figures, "--plot", plot)
    done = worked("evaluate", few_measurements, *words, env=os.environ | {"PYTHONPATH": path})
    assert "XGBoost, raw ms: not installed (this needs xgboost" in done.stdout
    content = json.loads(figures.read_text())
    assert content["methods"][MODEL]["geomean"] >= 1
    assert "XGBoost, raw ms" not in content["methods"]
    for name, summary in content["methods"].items():
        (line,) = [line for line in done.stdout.splitlines() if f"│ {name} " in line]
        assert f"{summary['geomean']:.3f}" in line
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("missing.parquet",), "'DATA...': Path 'missing.parquet' does not exist"),
        ((), "Missing argument"),
        (("DATA", "--folds", 1), "1 is not in the range"),
        (("DATA", "--device", "tpu"), "device='tpu' is not allowed"),
        (("DATA", "--device", "a100"), "no measurements of a100"),
    ],
)
def test_command_names_what_is_wrong(measurements, words, message):
    done = confpred("evaluate", *(measurements if word == "DATA" else word for word in words))
    named(done, message)


def test_command_names_a_missing_package(measurements):
    # A fresh process: here it is imported.
    done = confpred("evaluate", measurements, prelude="import sys; sys.modules['joblib'] = None")
    named(done, f"this needs joblib: {install_command('train')}", 1)

"""The page holds what its inputs say, and nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from pages import inputs_of

from confpred.families.protocol import Candidate
from confpred.families.registry import config_words
from confpred.model.folder import load_model
from confpred.predict.explain import explain_layer
from confpred.problem.conv2d import Problem
from confpred.report import charts
from confpred.report.judged import importances, noise_by_family, noise_by_time, worst_layers
from confpred.report.page import WORST, Inputs, page

_VOID = {"meta", "link", "br", "path", "use"}


class Elements(HTMLParser):
    """A page taken apart; elements that are not closed in their order are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.count: dict[str, int] = {}
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src", "xlink:href"):
                self.links.append(value or "")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def inputs(few_measurements: Path, model_folder: Path) -> Inputs:
    return inputs_of(few_measurements, model_folder)


@pytest.fixture(scope="module")
def text(inputs: Inputs) -> str:
    return page(inputs)


def test_the_page_is_whole_and_needs_nothing_else(text):
    found = Elements(text)
    assert len(found.ids) == len(set(found.ids))
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert all(link.startswith("#") for link in found.links)
    assert "default-src 'none'" in text
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text)
    assert found.count["svg"] >= 5
    assert set(re.findall(r'"#?(?:section )?id="(\w+)"', text)) <= set(found.ids)


def test_every_part_is_there(text, inputs):
    found = Elements(text)
    for section in (
        "regret", "groups", "calibration", "worst", "importances", "noise-of-measurements",
        "provenance",
    ):  # fmt: skip
        assert section in found.ids
    words = " ".join(found.text)
    for heading in ("family", "direction", "dtype", "batch size", "network"):
        assert f"By {heading}" in words or f"By kernel {heading}" in words
    for file in inputs.files:
        assert file.sha256 in words
    assert inputs.models[0].digest in words
    (evaluation,) = inputs.evaluations
    assert f"{evaluation.figures['methods']['model']['geomean']:.3f}" in words
    networks = {name for layer in evaluation.layers for name in layer.networks}
    assert all(name in words for name in networks)


def test_names_from_files_are_no_markup(inputs):
    (evaluation,) = inputs.evaluations
    layers = tuple(replace(x, networks=("<b>bold</b>",)) for x in evaluation.layers)
    changed = replace(inputs, evaluations=(replace(evaluation, layers=layers),))
    found = page(changed)
    assert "<b>" not in found
    assert "&lt;b&gt;bold&lt;/b&gt;" in found


def test_the_worst_layers_are_told_with_what_was_measured(inputs):
    (evaluation,) = inputs.evaluations
    dataset = inputs.datasets["h100"]
    worst = worst_layers(evaluation, dataset, WORST)
    assert len(worst) == min(WORST, len(evaluation.layers))
    regrets = sorted((layer.regret for layer in evaluation.layers), reverse=True)
    assert [w.layer.regret for w in worst] == regrets[:WORST]
    for w in worst:
        (t,) = [t for t in dataset.timings if t.problem == w.layer.problem]
        assert w.count == len(t.rows)
        (chosen,) = [m for m in w.measured if m.chosen]
        assert chosen.time_ms / t.time_ms.min() == pytest.approx(w.layer.regret)
        assert chosen.rank == 1 + (t.time_ms < chosen.time_ms).sum()
        first = w.measured[0]
        best = Candidate(t.family, int(t.rows[t.time_ms.argmin()]))
        assert (first.rank, first.config) == (1, config_words(best))
        assert w.pytorch_ms == dataset.pytorch_ms[t.problem]


def test_a_hold_out_comes_first(inputs):
    (evaluation,) = inputs.evaluations
    spread = {
        "problems": 11, "geomean": 1.021, "p95": 1.071, "worst": 1.412, "efficiency_mean": 0.977,
        "efficiency_p10": 0.94, "efficiency_min": 0.708, "far": 0.03,
    }  # fmt: skip
    verdict = {
        "model": "made-up", "problems": 11, "ours": spread, "whole": spread | {"worst": 2.345},
        "families": {"grouped_fprop": spread}, "speed": {"benchmark": 1.9},
        "slower": {"benchmark": 2},
        "bounds": {"pytorch": {"problems": 4, "covered": 0.75, "median": 1.234}},
        "worst": [["n=3 and more", "net<7>", 2.345, "pytorch"]],
    }  # fmt: skip
    figures = {**evaluation.figures, "holdout": verdict}
    found = page(replace(inputs, evaluations=(replace(evaluation, figures=figures),)))
    Elements(found)
    assert found.index('id="holdout"') < found.index('id="regret"')
    for text in ("2.345", "1.234", "75.0%", "net&lt;7&gt;", "1.900 times; slower on 2"):
        assert text in found
    assert 'id="holdout"' not in page(inputs)


def test_without_measurements_the_worst_layers_have_no_candidates(inputs):
    (evaluation,) = inputs.evaluations
    alone = replace(inputs, datasets={}, runs=())
    assert not any(w.measured for w in worst_layers(evaluation, None, 3))
    assert "Give the measurements as well" in page(alone)


def test_importance_is_how_far_choices_move(inputs, model_folder):
    (model,) = inputs.models
    (found,) = importances(model).values()
    moved = [importance.moved for importance in found]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > 0.01
    assert importances(load_model(model_folder)) == importances(model)
    # A feature that no tree asks for moves nothing.
    text = (model_folder / "grouped_fprop.order.txt").read_text()
    used = {int(i) for line in re.findall(r"split_feature=(.*)", text) for i in line.split()}
    names = model.families["grouped_fprop"].pool.feature_names
    assert all((names.index(i.feature) in used) == (i.moved > 0) for i in found)
    assert {i.theme for i in found} >= {"layer", "config", "waves"}


def test_noise_is_the_relative_spread(inputs):
    timings = inputs.datasets["h100"].timings
    (family,) = noise_by_family(timings)
    assert (family.median, family.p95) == pytest.approx((0.01, 0.01))  # as it was made up
    by_time = noise_by_time(timings)
    assert sum(n.configs for n in by_time) == family.configs
    times = np.concatenate([t.time_ms for t in timings])
    assert by_time[0].configs == (times <= float(by_time[0].name.split()[-2])).sum()


def test_a_tiny_layers_marks_are_inside_the_plot() -> None:
    problem = Problem.parse("n=1 c=2 h=3 w=3 k=2 r=1 s=1 groups=2")
    axes = charts._figure(explain_layer(problem, "h100")).axes[-1]
    low, high = axes.get_ylim()
    marks = [line.get_ydata()[0] for line in axes.lines if line.get_marker() in "os"]
    assert len(marks) == 2
    assert all(low < mark < high for mark in marks)

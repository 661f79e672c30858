"""Whether a model still holds: what is drawn, and the verdicts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import recorded_jobs
from recorded_jobs import ms

from confpred.cli.update import drift_lines
from confpred.data.measurements import Run
from confpred.errors import DataError
from confpred.model.folder import Best, Model, load_model
from confpred.retraining.drift import Drift, draw, time_again
from confpred.sampler.run import Sampling

RUN = Run("0a1b", "h100", "NVIDIA H100 80GB HBM3", "580.1", "13.0", "test")


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Model:
    """Return a model whose expectations are what the recorded GPU takes."""
    found = load_model(model_folder)
    parse, measured = found.operation.problem.parse, {}
    for words, best in found.measured.items():
        candidate = best.candidate
        time_ms = ms(parse(words), candidate.provider, candidate.config_id)
        measured[words] = Best(candidate, time_ms)
    versions = {"driver": ["580.1"], "cudnn": ["9.19.0"]}
    card = replace(found.card, measured_with=versions)
    return replace(found, measured=measured, card=card)


def timed(model: Model, **changes) -> Drift:
    settings = Sampling(processes=1, compile=recorded_jobs.COMPILE, measure=recorded_jobs.MEASURE)
    options = {"count": 24, "seed": 0, "cudnn": "9.19.0"} | changes
    run = replace(RUN, driver=options.pop("driver", RUN.driver))
    return time_again(model, {0: run}, settings, **options)


def test_times_that_are_as_expected_are_ok(model: Model) -> None:
    found = timed(model)
    assert (found.state, found.holds) == ("ok", True)
    assert found.ratio == pytest.approx(1)
    assert found.far == 0
    assert len(found.retimed) == 24
    assert {each.provider for each in found.retimed} == {"grouped_fprop", "pytorch"}
    plain = json.loads(json.dumps(found.to_json()))
    assert (plain["format"], plain["state"], plain["holds"]) == ("confpred-drift/1", "ok", True)
    assert plain["retimed"][0]["ratio"] == pytest.approx(1)
    assert drift_lines(found)[0].startswith(
        f"ok: model {model.version} on h100: 24 configs take 1.000"
    )


@pytest.mark.parametrize(("slow", "state"), [(1.3, "drifted"), (0.7, "drifted"), (0.95, "ok")])
def test_other_times_are_a_drift_and_a_few_percent_are_not(
    model: Model, monkeypatch: pytest.MonkeyPatch, slow: float, state: str
) -> None:
    monkeypatch.setenv("RECORDED", json.dumps({"slow": slow}))
    found = timed(model)
    assert (found.state, found.holds) == (state, state == "ok")
    assert found.ratio == pytest.approx(slow)
    assert found.far == (state == "drifted")
    assert drift_lines(found)[-1].endswith("confpred retrain") == (state == "drifted")


def test_another_driver_or_cudnn_is_named_and_the_times_decide(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = timed(model, driver="590.2", cudnn="9.20.1")
    assert (found.state, found.holds) == ("driver or cuDNN changed", True)
    assert found.versions == (
        "the driver is 590.2, and the model's measurements are of 580.1",
        "cuDNN is 9.20.1, and the model's measurements are of 9.19.0",
    )
    monkeypatch.setenv("RECORDED", json.dumps({"slow": 1.3}))
    assert timed(model, driver="590.2").state == "drifted"


def test_other_kernels_come_before_all_else(model: Model) -> None:
    families = model.card.families.items()
    others = {name: replace(entry, source_digests=["2"]) for name, entry in families}
    stale = replace(model, card=replace(model.card, families=others))
    found = timed(stale)
    assert (found.state, found.holds) == ("kernels changed", False)
    assert found.kernels == stale.stale
    assert "the measurements are of 2" in found.why


def test_too_few_times_tell_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECORDED", json.dumps({"fail": "grouped_fprop"}))
    with pytest.raises(DataError, match="only"):
        timed(model, count=8)
    with pytest.raises(DataError, match="no measured config"):
        timed(replace(model, measured={}))


def test_what_is_drawn_is_random_repeatable_and_of_every_provider(model: Model) -> None:
    drawn = draw(model, 12, 0, pytorch=True)
    assert draw(model, 12, 0, pytorch=True) == drawn != draw(model, 12, 1, pytorch=True)
    counts = Counter(candidate.provider for _, candidate, _ in drawn)
    assert counts == {"grouped_fprop": 6, "pytorch": 6}
    for problem, candidate, expected in drawn:
        assert model.measured[str(problem)] == Best(candidate, expected)
    assert {c.provider for _, c, _ in draw(model, 12, 0, pytorch=False)} == {"grouped_fprop"}
    assert len(draw(model, 10_000, 0, pytorch=True)) == len(model.measured)


@pytest.mark.parametrize(
    ("now", "count"),
    [
        ({"driver": "580.1", "cudnn": "9.19.0"}, 0),
        ({"driver": "580.2", "cudnn": "9.19.0"}, 1),
        ({"driver": "580.2", "cudnn": "9.19.1"}, 2),
        ({"driver": "580.1", "cudnn": ""}, 0),  # PyTorch without cuDNN
    ],
)
def test_changes_are_those_of_recorded_versions(model: Model, now: dict, count: int) -> None:
    assert len(model.card.changes(**now)) == count
    assert replace(model.card, measured_with={}).changes(**now) == ()

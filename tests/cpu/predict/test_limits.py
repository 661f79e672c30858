"""Limits of the caller: what they hold, and that every choice keeps within them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command_line import worked
from fastapi.testclient import TestClient

import confpred
from confpred.errors import InvalidInput
from confpred.families.protocol import within
from confpred.families.registry import all_families
from confpred.predict.choice import MAX_TOP, Choice
from confpred.predict.plan import plan_of
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import Launch
from confpred.pytorch.run import choosing
from confpred.service import Settings
from confpred.service.app import create_app

A100, H100 = get_device("a100"), get_device("h100")
FPROP = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
WGRAD = replace(FPROP, direction="wgrad")
NONE = Limits(workspace_bytes=0)


def needed(choice: Choice) -> int:
    """Bytes of workspace that a choice of ours needs; PyTorch's operator counts as none."""
    if choice.family is None:
        return 0
    launch = all_families()[choice.provider].launch(choice.problem, choice.candidate.config_id)
    return launch.workspace_bytes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("workspace_bytes", value) for value in (-1, 1.5, True, 2**63)),
        ("deterministic", 1),
        ("tf32", None),
        *(("max_error", value) for value in (0, 1, float("nan"), "1e-3", True)),
        ("workspace", 5),
    ],
)
def test_bad_limits_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        Limits.from_json({name: value})
    assert caught.value.field == (name if hasattr(UNLIMITED, name) else "limits")


def test_limits_survive_json() -> None:
    limits = Limits(2**20, deterministic=True, tf32=False, max_error=0.01)
    assert Limits.from_json(json.loads(json.dumps(limits.to_json()))) == limits
    assert Limits.from_json({}) == UNLIMITED
    for wrong in (None, [], 5, "none"):
        with pytest.raises(InvalidInput, match="an object of workspace_bytes"):
            Limits.from_json(wrong)


def test_a_launch_keeps_within_limits_or_not() -> None:
    plain = Launch((), scratch_bytes=70, zeroed_bytes=30)
    assert Limits(workspace_bytes=100).allow(FPROP, plain)
    assert not Limits(workspace_bytes=99).allow(FPROP, plain)
    assert UNLIMITED.allow(FPROP, plain)
    assert not Limits(max_error=1e-5).allow(FPROP, plain)  # float16 is not that exact
    rough = Launch((), error=0.01)
    assert not UNLIMITED.allow(FPROP, rough)
    assert Limits(max_error=0.01).allow(FPROP, rough)
    assert not Limits(max_error=0.009).allow(FPROP, rough)


def test_no_choice_needs_more_than_the_limit() -> None:
    predictor = Predictor({})
    free = predictor.rank(WGRAD, A100, MAX_TOP)
    most = max(map(needed, free))
    assert most > 1
    for limits in (NONE, Limits(workspace_bytes=most - 1)):
        kept = predictor.within(limits).rank(WGRAD, A100, MAX_TOP)
        assert kept
        assert all(needed(choice) <= limits.workspace_bytes for choice in kept)
        order = [c.candidate for c in free if needed(c) <= limits.workspace_bytes]
        assert [c.candidate for c in kept][: len(order)] == order


def test_without_limits_it_is_the_predictor_itself() -> None:
    predictor = Predictor({})
    assert predictor.within(UNLIMITED) is predictor
    limited = predictor.within(NONE)
    assert limited is predictor.within(NONE)
    assert limited.within(NONE) is limited
    for size in range(1, 12):  # more than are kept
        assert predictor.within(Limits(workspace_bytes=size)).choose(FPROP, A100)


def test_limits_of_a_predictor_hold_within_further_ones(big: Choice) -> None:
    both = Predictor({}).within(NONE).within(Limits(deterministic=True, tf32=False))
    assert both.limits == Limits(workspace_bytes=0, deterministic=True, tf32=False)
    assert both.within(UNLIMITED) is both
    tight, wide = Limits(8, max_error=0.01), Limits(64, max_error=0.1)
    assert tight & wide == wide & tight == tight
    assert UNLIMITED & wide == wide & UNLIMITED == wide
    assert needed(both.following(plan_of([big])).choose(WGRAD, A100)) == 0


def test_what_must_repeat_is_asked_as_such() -> None:
    (choice, *_) = Predictor({}).within(Limits(deterministic=True)).rank(WGRAD, A100, 3)
    assert choice.problem == replace(WGRAD, deterministic=True)
    family = all_families()[choice.provider]
    assert family.legal(choice.problem, A100)[choice.config_id]
    (other,) = Predictor({}).within(Limits(deterministic=True)).rank(FPROP, A100, 1)
    assert other.problem == FPROP  # it repeats in any case


@pytest.fixture(scope="module")
def big() -> Choice:
    """Return a pin that needs much."""
    return replace(max(Predictor({}).rank(WGRAD, A100, MAX_TOP), key=needed), source="pinned")


def test_a_pin_that_needs_too_much_is_passed_over(big: Choice) -> None:
    pinned = Predictor({}, plan_of([big]))
    assert pinned.choose(WGRAD, A100).source == "pinned"
    limited = pinned.within(NONE).choose(WGRAD, A100)
    assert limited.source in ("heuristic", "fallback")
    assert needed(limited) == 0
    enough = Limits(workspace_bytes=needed(big))
    assert pinned.within(enough).choose(WGRAD, A100) == pinned.choose(WGRAD, A100)


def test_predictions_and_measured_bests_keep_within(model_folder: Path) -> None:
    predictor = Predictor.load(model_folder)
    limits = Limits(workspace_bytes=0, tf32=False)
    free, kept = predictor.choose(FPROP, H100), predictor.within(limits).choose(FPROP, H100)
    assert kept.candidate == free.candidate  # its kernels need nothing
    assert kept.regret_bound is None  # which was calibrated without limits
    strict = predictor.within(Limits(max_error=1e-9))
    assert strict.choose(FPROP, H100) == Choice(FPROP, "h100", "fallback")
    measured = Problem.parse(next(iter(predictor.models["h100"].measured)))
    assert predictor.choose(measured, H100).source == "measured"
    assert strict.choose(measured, H100).source == "fallback"


def test_a_family_may_answer_for_itself() -> None:
    from confpred.cudnn.family import FAMILY
    from confpred.cudnn.table import table

    problem = replace(FPROP, groups=1, direction="dgrad", dtype="float32")
    rows = np.flatnonzero(FAMILY.legal(problem, H100))
    exact = within(FAMILY, problem, rows, Limits(tf32=False))
    assert 0 < len(exact) < len(rows)
    assert not any(FAMILY.launch(problem, int(row)).tf32 for row in exact)
    every = np.arange(len(FAMILY.configs))  # also those that no problem is offered
    repeatable = within(FAMILY, problem, every, Limits(deterministic=True))
    assert repeatable.tolist() == np.flatnonzero(table().notes["repeatable"]).tolist()
    assert len(repeatable) < len(every)


def test_the_service_keeps_within_limits() -> None:
    predictor = Predictor({})
    with TestClient(create_app(Settings(), predictor)) as client:
        body = {"device": "a100", "problem": WGRAD.to_json(), "top": 5}
        free = client.post("/v1/predict", json=body).json()
        limited = client.post("/v1/predict", json={**body, "limits": {"workspace_bytes": 0}}).json()
        expected = predictor.within(NONE).rank(WGRAD, A100, 5)
        assert limited["choices"] == [[choice.to_json() for choice in expected]]
        assert limited != free
        assert client.post("/v1/predict", json={**body, "limits": {}}).json() == free
        reply = client.post("/v1/predict", json={**body, "limits": {"max_error": 2}})
        assert reply.status_code == 422
        assert reply.json()["error"]["field"] == "limits.max_error"
        schema = client.get("/openapi.json").json()["components"]["schemas"]["Limits"]
        assert set(schema["properties"]) == set(UNLIMITED.to_json())


def providers(*words: str) -> set[str]:
    """Return whose candidates the command names."""
    done = worked("predict", "--json", *words)
    return {choice["provider"] for choice in json.loads(done.stdout)["choices"][0]}


def test_the_command_keeps_within_limits() -> None:
    words = ["--device", "h100", "--top", "32"]
    words += ["--layer", "n=1 c=256 h=13 w=17 k=36 r=3 s=3 padding=1 bias=true"]
    assert "im2col" in providers(*words)
    assert "im2col" not in providers(*words, "--workspace-limit", "1000")


def test_a_bound_on_the_error_admits_strassen() -> None:
    words = ["--operation", "linear_chain", "--device", "h100", "--top", "9"]
    words += ["--layer", "batch=512 inputs=2048 hidden=2048 outputs=2048 layers=4"]
    assert providers(*words) == {"linear_epilogue", "pytorch"}
    bounded = providers(*words, "--max-error", "0.01")
    assert bounded == {"linear_epilogue", "linear_strassen", "pytorch"}


def test_limits_hold_for_the_choices_of_a_call(
    big: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choosing._predictors, "conv2d", Predictor({}, plan_of([big])))
    monkeypatch.setattr(choosing.driver, "device_of", lambda _: A100)  # here is no GPU to ask
    for constraints in (choosing.ANY, choosing.Constraints(Limits(workspace_bytes=2**40))):
        assert choosing.choose(WGRAD, 0, constraints).source == "pinned"
    assert needed(choosing.choose(WGRAD, 0, choosing.Constraints(NONE))) == 0
    monkeypatch.setitem(choosing._predictors, "conv2d", Predictor({}, plan_of([big])).within(NONE))
    assert needed(choosing.choose(WGRAD, 0)) == 0


def test_pytorchs_switch_forbids_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    single = replace(FPROP, dtype="float32")
    # Users set this switch; monkeypatch sets it back.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert choosing.limits_for(single, UNLIMITED).tf32
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not choosing.limits_for(single, UNLIMITED).tf32
    assert choosing.limits_for(FPROP, UNLIMITED).tf32  # there is none in half precision


def test_what_are_no_limits_is_refused() -> None:
    x, weight, wrong = torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3), 2**20
    for call in (
        lambda: Predictor({}).within(wrong),  # type: ignore[arg-type]
        lambda: confpred.enable(limits=wrong),  # type: ignore[arg-type]
        lambda: confpred.conv2d(x, weight, limits=wrong),  # type: ignore[arg-type]
        lambda: confpred.linear_chain(x, [weight], limits=wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput, match="limits=1048576 is not allowed"):
            call()


def test_conv2d_takes_limits_of_its_own() -> None:
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    right = F.conv2d(x, weight, padding=1).relu()
    found = confpred.conv2d(x, weight, padding=1, activation="relu", limits=NONE)
    assert torch.equal(found, right)
    weight.requires_grad_()
    confpred.conv2d(x, weight, limits=NONE).sum().backward()
    assert weight.grad is not None

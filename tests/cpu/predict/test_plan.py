"""Plans: what is read is what was written, and what is for something else is refused with why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared import closed

import confpred
from confpred.errors import DataError, InvalidInput
from confpred.families.kernel_text import source_digest
from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR, Candidate, config_dict
from confpred.families.registry import all_families, operation_of
from confpred.model.folder import NewestModels
from confpred.predict import plan as plan_module
from confpred.predict.choice import Choice
from confpred.predict.plan import plan_of, plan_text, read_plan, write_plan
from confpred.predict.predictor import Predictor
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.norm_of_groups import Norm

H100 = get_device("h100")
GROUPED = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1x2")
DEPTHWISE = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 groups=64 padding=1")
GRADIENT = replace(DEPTHWISE, direction="wgrad", deterministic=True)
DENSE = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 bias=true activation=relu")


def legal(provider: str, problem: Problem, place: int = 0) -> Candidate:
    rows = np.flatnonzero(all_families()[provider].legal(problem, H100))
    return Candidate(provider, int(rows[place]))


MODEL = {"regret_bound": 1.2, "model": "made-up-1"}
CHOICES = [
    Choice(
        *(GROUPED, "h100", "predicted", legal("grouped_fprop", GROUPED), 0.25),
        pytorch_ms=0.5,
        **MODEL,
    ),
    Choice(DENSE, "h100", "fallback"),
    Choice(DEPTHWISE, "h100", "pinned", legal("depthwise_fprop", DEPTHWISE, -1), 0.5),
    Choice(GRADIENT, "h100", "measured", legal("depthwise_wgrad", GRADIENT), 1.5e-3, **MODEL),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "plan.json"
    write_plan(found, plan_of(CHOICES))
    return found


def test_what_is_read_is_what_was_written(path: Path) -> None:
    plan = plan_of(CHOICES)
    assert read_plan(path) == plan
    assert read_plan(path, "NVIDIA H100 80GB HBM3") == plan
    assert plan_text(read_plan(path)) == path.read_text()
    assert [c.candidate for c in plan.choices] == [c.candidate for c in CHOICES]
    assert [c.predicted_ms for c in plan.choices] == [0.25, None, 0.5, 1.5e-3]
    assert [c.pytorch_ms for c in plan.choices] == [0.5, None, None, None]
    assert plan.model == "made-up-1"
    assert plan.confpred == confpred.__version__
    assert plan.devices == (H100,)
    assert plan.kernels["grouped_fprop"] == source_digest("grouped_rows.cu")
    assert set(plan.kernels) == {"grouped_fprop", "depthwise_fprop", "depthwise_wgrad"}
    assert len(path.read_bytes()) < 450 * len(CHOICES), "small, and a choice a line"
    assert len(path.read_text().splitlines()) == len(CHOICES) + 2


def test_a_plan_of_all_sources_of_kernels() -> None:
    two = next(
        row
        for row in np.flatnonzero(all_families()["depthwise_wgrad"].legal(GRADIENT, H100)).tolist()
        if len(all_families()["depthwise_wgrad"].launch(GRADIENT, row).steps) == 2
    )
    plan = plan_of([Choice(GRADIENT, "h100", "measured", Candidate("depthwise_wgrad", two))])
    files = ("depthwise_wgrad.cu", "depthwise_wgrad_sum.cu")
    assert plan.kernels == {"depthwise_wgrad": "+".join(map(source_digest, files))}
    assert [spec.file for spec in plan.specs()] == list(files)


def test_the_last_choice_of_a_problem_counts_and_a_guess_is_pytorchs() -> None:
    other = replace(CHOICES[0], candidate=legal("grouped_fprop", GROUPED, -1))
    plan = plan_of([*CHOICES, other, other])
    assert len(plan.choices) == len(CHOICES)
    assert plan.choices[0].candidate == other.candidate
    (guess,) = plan_of([replace(CHOICES[0], source="heuristic")]).choices
    assert (guess.source, guess.predicted_ms) == ("heuristic", None)
    assert guess.candidate == PYTORCH_OPERATOR, "a kernel that no model knows is never launched"
    near = replace(CHOICES[0], source="transferred", donor="h200", is_near=True)
    (launched,) = plan_of([near]).choices
    assert launched == replace(near, donor=None, is_near=False, regret_bound=None)


def test_a_plan_is_for_several_devices_too_and_not_empty(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"choices=\[\] is not allowed; .* at least one choice"):
        plan_of([])
    both = plan_of([*CHOICES, *(replace(choice, device="h200") for choice in CHOICES[1:])])
    write_plan(tmp_path / "both.json", both)
    assert read_plan(tmp_path / "both.json", "h200") == both
    assert both.devices == (H100, get_device("h200"))
    predictor = Predictor.load(plan=tmp_path / "both.json")
    assert predictor.choose(GRADIENT, "h200").source == "pinned"
    assert predictor.choose(GROUPED, "h200").source == "predicted"
    with pytest.raises(InvalidInput, match=r"device='h100 and h200' is not .*: a100"):
        read_plan(tmp_path / "both.json", "a100")


def test_a_plan_of_several_operations(tmp_path: Path) -> None:
    volume = ConvNd(2, 8, 9, 8, 3, d=4, h=9, t=3, r=3, groups=8)
    flat = replace(volume, d=1, t=1, layout="channels_first")  # its sizes name no depth
    norm = Norm(2, 81, 64, 8)
    further = [Choice(problem, "h100", "fallback") for problem in (flat, volume, norm)]
    plan = plan_of([*CHOICES, *further])
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert [operation.name for operation in plan.operations] == ["conv2d", "conv", "norm"]
    lines = json.loads(path.read_text())["choices"]
    own = json.loads(plan_text(plan_of(CHOICES)))["choices"]
    assert lines[: len(own)] == own, "those of the plan's operation are as in a plan of them alone"
    assert [line.get("operation") for line in lines[len(own) :]] == ["conv", "conv", "norm"]
    for choice in further:
        name = operation_of(choice.problem).name
        assert Predictor.load(plan=path, operation=name).choose(choice.problem, "h100") == replace(
            choice, source="pinned"
        )


def test_a_predictor_repeats_a_plan_without_a_model(path: Path) -> None:
    models = NewestModels()
    predictor = Predictor(models, read_plan(path, "h100"))
    answers = predictor.choose_many([c.problem for c in CHOICES], "h100")
    assert models._values == {}, "none was loaded"
    assert [a.candidate for a in answers] == [c.candidate for c in CHOICES]
    assert {a.source for a in answers} == {"pinned"}
    assert [a.predicted_ms for a in answers] == [c.predicted_ms for c in CHOICES]
    assert [a.pytorch_ms for a in answers] == [c.pytorch_ms for c in CHOICES]
    for choice, answer in zip(CHOICES, answers, strict=True):
        ranked = predictor.rank(choice.problem, "h100", 3)
        assert ranked[0] == answer
        assert choice.candidate not in [c.candidate for c in ranked[1:]]
    other = replace(GROUPED, n=25)
    assert predictor.choose(other, "h100") == Predictor.load().choose(other, "h100")
    assert predictor.choose(GROUPED, "h200").source == "predicted"
    assert plan_of(answers).kernels == read_plan(path).kernels


def test_a_plan_for_another_device_is_refused(path: Path) -> None:
    for read in (lambda: read_plan(path, "h200"), lambda: Predictor.load(plan=path, device="h200")):
        with pytest.raises(InvalidInput, match=r"plan\.json: device='h100'.* allowed: h200"):
            read()


def test_a_plan_for_other_kernels_is_refused(path: Path) -> None:
    now = source_digest("depthwise.cu")
    path.write_text(path.read_text().replace(now, "f" * 16))
    message = rf"plan\.json was made for other kernels of depthwise_fprop: .* ffff.*, .* {now[:8]}"
    with pytest.raises(DataError, match=message):
        read_plan(path)
    with pytest.raises(DataError, match=message):
        Predictor.load(plan=path)
    assert len(read_plan(path, any_kernels=True).choices) == len(CHOICES)
    assert "depthwise_fprop" in (read_plan(path, any_kernels=True).outdated() or "")


def test_a_plan_is_cut_and_extended_by_hand(path: Path) -> None:
    """Digests are compared for what a plan still launches, and for families that it names."""
    content = json.loads(path.read_text())
    del content["choices"][2]
    content["kernels"]["depthwise_fprop"] = "f" * 16
    path.write_text(json.dumps(content))
    assert len(read_plan(path).choices) == len(CHOICES) - 1
    predictor = Predictor.load(plan=path)
    assert predictor.choose(DEPTHWISE, "h100").source != "pinned"
    assert predictor.choose(GROUPED, "h100").source == "pinned"
    content["kernels"] = dict.fromkeys(content["kernels"].keys() - {"grouped_fprop"}, "f" * 16)
    content["choices"] = content["choices"][:1]
    path.write_text(json.dumps(content))
    assert len(read_plan(path).choices) == 1


def test_a_person_writes_the_least(tmp_path: Path) -> None:
    """A choice without a time gets the one that the model expects."""
    (line,) = json.loads(plan_text(plan_of(CHOICES[:1])))["choices"]
    del line["source"], line["predicted_ms"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": plan_module.FORMAT, "choices": [line]}))
    plan = read_plan(path, "h100")
    assert [(c.source, c.candidate, c.predicted_ms) for c in plan.choices] == [
        ("pinned", CHOICES[0].candidate, None)
    ]
    assert (plan.kernels, plan.model, plan.confpred) == ({}, None, None)
    (answer,) = Predictor.load(plan=plan).choose_many([GROUPED], "h100")
    assert (answer.source, answer.candidate) == ("pinned", CHOICES[0].candidate)
    assert answer.predicted_ms is not None
    assert answer.predicted_ms > 0
    path.write_text(json.dumps({"format": plan_module.FORMAT, "choices": []}))
    assert read_plan(path, "h200").choices == ()


FORMER = Path(__file__).parent / "former_plans"


@pytest.mark.parametrize("name", ["first_pins.json", "pins.json", "network.json", "bundle"])
def test_files_of_former_releases_are_read(name: str, tmp_path: Path) -> None:
    """Files that confpred wrote before this format; kernels may have changed since."""
    plan = read_plan(FORMER / name, "h100", any_kernels=True)
    found = {(c.problem, c.device): c.candidate.provider for c in plan.choices}
    other = "h200" if "pins" in name else "h100"
    wanted = {
        (replace(GROUPED, stride=(1, 1)), "h100"): "grouped_fprop",
        (DEPTHWISE, other): "depthwise_fprop",
        (replace(GROUPED, stride=(3, 3), padding=(1, 1)), "h100"): PYTORCH,
    }
    if name == "bundle":
        del wanted[replace(GROUPED, stride=(1, 1)), "h100"]
    assert found == wanted
    sources = [choice.source for choice in plan.choices]
    assert sources[-1] == ("pinned" if "pins" in name else "fallback")
    assert (plan.model == "h100-2026.11.24") == ("pins" not in name)
    write_plan(tmp_path / "now.json", plan)
    assert read_plan(tmp_path / "now.json", any_kernels=True) == plan
    assert json.loads((tmp_path / "now.json").read_text())["format"] == plan_module.FORMAT


def test_wrong_files_of_former_releases_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    first = (FORMER / "first_pins.json").read_text()
    path.write_text(first.replace('"config": null', '"config": {"block_n": 1}'))
    with pytest.raises(InvalidInput, match="provider is missing"):
        read_plan(path)
    path.write_text('{"format": "confpred-pins/1"}')
    with pytest.raises(DataError, match='"pins" must be a list'):
        read_plan(path)


def test_former_files_for_other_kernels_are_refused(tmp_path: Path) -> None:
    now = source_digest("depthwise.cu")
    content = json.loads((FORMER / "network.json").read_text())
    content["kernels"] = {"depthwise_fprop": now, "grouped_fprop": source_digest("grouped_rows.cu")}
    path = tmp_path / "network.json"
    path.write_text(json.dumps(content))
    assert len(read_plan(path, "h100").choices) == 3
    path.write_text(path.read_text().replace(now, "0" * 16))
    with pytest.raises(DataError, match=r"network\.json was made for other kernels of depthwise"):
        read_plan(path)
    with pytest.raises(InvalidInput, match=r"network\.json: device='h100' is not .*: h200"):
        read_plan(path, "h200", any_kernels=True)


Change = Callable[[dict[str, Any]], object]
ILLEGAL = int(np.flatnonzero(~all_families()["grouped_fprop"].legal(GROUPED, H100))[0])


def of_choice(**fields: object) -> Change:
    return lambda content: content["choices"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format="confpred-plan/4"), r"is not a plan"),
        (lambda c: c.update(operation="gemm"), r"operation='gemm'"),
        (lambda c: c.update(kernel={}), r"field='kernel' is not .*: kernels"),
        (of_choice(device="tpu"), r"choices\[0\]\.device='tpu'"),
        (of_choice(device=None), r"choices\[0\]\.device is missing"),
        (lambda c: c.update(model=7), r"model=7"),
        (lambda c: c.update(confpred=""), r"confpred=''"),
        (lambda c: c.update(kernels=[]), r'"kernels" must be an object'),
        (lambda c: c.update(kernels={"grouped_fprop": 7}), r'"kernels" must be an object'),
        (lambda c: c.update(choices={}), r'"choices" must be a list'),
        (lambda c: c["choices"].append(7), r"choices\[4\] must be an object of device, problem"),
        (lambda c: c["choices"].append(c["choices"][0]), r"choices\[4\] is of the same problem as"),
        (lambda c: c["choices"][1].pop("provider"), r"choices\[1\] must be an object"),
        (of_choice(operation="gemm"), r"choices\[0\]\.operation='gemm'"),
        (of_choice(operation="conv", problem={"n": 1}), r"choices\[0\]\.c is missing"),
        (of_choice(sources=1), r"choices\[0\]\.field='sources' is not .*: source"),
        (of_choice(problem={"n": 1}), r"choices\[0\]\.c is missing"),
        (of_choice(problem=None), r"choices\[0\]\.problem is missing"),
        (of_choice(provider="gemm"), r"choices\[0\]\.provider='gemm'"),
        (of_choice(provider=["x"]), r"choices\[0\]\.provider="),
        (of_choice(provider=PYTORCH), r"choices\[0\]\.config=.* where the provider is pytorch"),
        (of_choice(provider="grouped_fprob"), r"choices\[0\]\.provider=.*: grouped_fprop or"),
        (of_choice(config="best"), r"choices\[0\]\.config='best'"),
        (of_choice(config={"block_n": 10**30}), r"choices\[0\]\.config="),
        (
            of_choice(config={"block_n": 1}),
            r"choices\[0\]\.config=.* a config of grouped_fprop; the nearest is block_n=1 block_q=",
        ),
        (of_choice(source="predict"), r"choices\[0\]\.source='predict' is not .*: predicted"),
        (of_choice(source=[]), r"choices\[0\]\.source="),
        (of_choice(predicted_ms=-1.0), r"choices\[0\]\.predicted_ms=-1\.0"),
        (of_choice(pytorch_ms=-1.0), r"choices\[0\]\.pytorch_ms=-1\.0"),
        (of_choice(predicted_ms="1"), r"choices\[0\]\.predicted_ms='1'"),
        (of_choice(predicted_ms=float("nan")), r"choices\[0\]\.predicted_ms=nan"),
        (
            of_choice(config=config_dict(all_families()["grouped_fprop"], ILLEGAL)),
            r"choices\[0\]\.config=.* legal for the problem",
        ),
    ],
)
def test_what_is_wrong_is_named(path: Path, change: Change, message: str) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises((InvalidInput, DataError), match=rf"plan\.json.*{message}"):
        read_plan(path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "{}", "\x00"])
def test_a_damaged_file_is_named(path: Path, text: str) -> None:
    path.write_text(text)
    for read in (read_plan, lambda p: Predictor.load(plan=p)):
        with pytest.raises(DataError, match=r"plan\.json is not"):
            read(path)
    whole = plan_text(plan_of(CHOICES))
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="is not JSON"):
        read_plan(path)
    path.unlink()
    with pytest.raises(DataError, match="cannot read"):
        read_plan(path)


def test_a_plan_that_nobody_may_see_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "plan"
    path.mkdir(parents=True)
    with closed(path.parent):
        for ask in (read_plan, confpred.use_plan):
            with pytest.raises(DataError, match=f"cannot read {path}: Permission denied"):
                ask(path)

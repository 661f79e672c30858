"""``confpred plan`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command_line import confpred, named, worked

from confpred.data.suites import read_suite
from confpred.families.registry import operation_named
from confpred.predict.plan import plan_of, plan_text, read_plan, write_plan
from confpred.predict.predictor import Predictor

LAYER = "n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1"
STRIDED = LAYER + " stride=3"


def plan(*words: object) -> subprocess.CompletedProcess[str]:
    return confpred("plan", *words)


@pytest.fixture(scope="module")
def exported(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ("--layer", LAYER, "--layer", STRIDED, "--model", model_folder)
    done = worked("plan", "export", "--device", "h100", *words, "--out", path)
    assert done.stdout == (
        f"{path}: 2 layers on h100, 1 by 1 kernels of confpred, 1 by PyTorch's operator\n"
    )
    return path


def test_a_network_is_exported_as_the_library_chooses(model_folder, repository, tmp_path) -> None:
    suite, path = repository / "datasets" / "suites" / "smoke.json", tmp_path / "plan.json"
    words = ("--network", suite, "--model", model_folder, "--out", path)
    worked("plan", "export", "--device", "h100", *words)
    problems = [entry.problem for entry in read_suite(suite).entries]
    expected = plan_of(Predictor.load(model_folder).choose_many(problems, "h100"))
    assert path.read_text() == plan_text(expected)


def test_show_has_a_line_a_choice(exported, model_folder) -> None:
    done = worked("plan", "show", exported)
    head, first, second, last = done.stdout.splitlines()
    assert head.split() == ["layer", "source", "provider", "ms", "config"]
    assert first.startswith(LAYER.split(" groups")[0])
    assert first[head.index("source") :].startswith("predicted  grouped_fprop")
    assert second[head.index("source") :].rstrip() == "fallback   pytorch"
    assert last.startswith("2 layers on h100, 1 by 1 kernels")
    assert f"model {model_folder.name}" in last
    answers = json.loads(plan("show", exported, "--json").stdout)
    assert answers == {"choices": [[c.to_json()] for c in read_plan(exported).choices]}


def test_check_counts_what_todays_model_would_choose_otherwise(exported, model_folder) -> None:
    done = plan("check", exported, "--device", "h100", "--model", model_folder)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.endswith(f"today's answers ({model_folder.name}) differ in 0")
    changed = exported.with_name("changed.json")
    content = json.loads(exported.read_text())
    content["choices"][0] |= {"provider": "pytorch", "config": {}}
    changed.write_text(json.dumps(content))
    done = worked("plan", "check", changed, "--model", model_folder)
    assert done.stdout.endswith("differ in 1\n")


def test_a_plan_of_several_operations_is_shown_and_checked(tmp_path) -> None:
    further = {"conv2d": LAYER, "conv": f"{LAYER} d=8 t=3", "norm": "n=2 p=784 c=64 groups=8"}
    choices = [
        Predictor.load(operation=name).choose(operation_named(name).problem.parse(words), "h200")
        for name, words in further.items()
    ]
    path = tmp_path / "plan.json"
    write_plan(path, plan_of(choices))
    assert "n=2 p=784 c=64" in worked("plan", "show", path).stdout
    assert worked("plan", "check", path).stdout.endswith("differ in 0\n")
    done = worked("predict", "--plan", path, "--device", "h200", "--layer", further["conv"])
    assert "pinned" in done.stdout


def test_other_kernels_are_shown_and_do_not_pass(exported) -> None:
    old = exported.with_name("old.json")
    content = json.loads(exported.read_text())
    content["kernels"]["grouped_fprop"] = "0" * 16
    old.write_text(json.dumps(content))
    done = plan("check", old)
    assert done.returncode == 2
    assert "old.json was made for other kernels of grouped_fprop: their digest is 00000000, " in (
        done.stderr
    )
    done = plan("show", old)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("cannot be used here: made for other kernels of")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("export", "--device", "h100", "--out", "x"), 2, "give either --layer or --network"),
        (("export", "--layer", LAYER, "--out", "x"), 2, "Missing option '--device'"),
        (("export", "--device", "h100", "--layer", LAYER), 2, "Missing option '--out'"),
        (("export", "--device", "h100", "--layer", LAYER, "--out", "/dev/null/x"), 1, "/dev/null"),
        (("export", "--device", "h100", "--kernels", "--layer", LAYER, "--out", "."), 2, "out='.'"),
        (("export", "--pins", "none", "--out", "x"), 2, "Did you mean '--plan'?"),
        (("show", "none.json"), 2, "Path 'none.json' does not exist"),
        (("check", "none.json"), 2, "Path 'none.json' does not exist"),
        (("check", "/dev/null"), 2, "is not JSON"),
        (("explain",), 2, "No such command 'explain'"),
    ],
)
def test_what_is_wrong_is_named(words, code, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    named(plan(*words), message, code)
    assert list(tmp_path.iterdir()) == []


def test_check_of_another_device(exported) -> None:
    done = plan("check", exported, "--device", "h200")
    named(done, "plan.json: device='h100' is not allowed; allowed: h200", 2)


def test_predict_follows_a_plan(exported, model_folder) -> None:
    words = ("--device", "h100", "--model", model_folder, "--layer", LAYER, "--json")
    done = worked("predict", "--plan", exported, *words)
    ((answer,),) = json.loads(done.stdout)["choices"]
    assert answer["source"] == "pinned"
    assert answer["config"] == dict(read_plan(exported).choices[0].config)


def test_kernels_go_along(exported, model_folder, tmp_path) -> None:
    path = tmp_path / "prepared"
    words = ("--layer", LAYER, "--model", model_folder, "--plan", exported, "--out", path)
    done = worked("plan", "export", "--device", "h100", "--kernels", *words)
    assert len(list((path / "kernels").rglob("*.cubin"))) == 1
    assert [c.source for c in read_plan(path, "h100").choices] == ["pinned"]
    for words in (("show", path), ("check", path, "--device", "h100", "--model", model_folder)):
        done = worked("plan", *words)
        assert "1 layer on h100, 1 by 1 kernels of confpred" in done.stdout
    done = confpred("predict", "--plan", path, "--device", "h100", "--layer", LAYER)
    assert "pinned" in done.stdout

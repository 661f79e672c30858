"""A plan and its kernels in one folder: a start in another process asks neither a model nor a
compiler."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from shared import python

import confpred
from confpred.cuda import compiler, driver
from confpred.cuda.compiler import compiled_files
from confpred.cuda.epilogue import epilogue_kernel
from confpred.errors import CompileError, DataError, InvalidInput, StorageError
from confpred.families.protocol import Candidate
from confpred.families.registry import all_families
from confpred.predict.choice import Choice
from confpred.predict.plan import Plan, plan_of, read_plan, write_plan
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.operation import KernelSpec
from confpred.pytorch.run import choosing

DEPTHWISE = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 groups=64 padding=1")
DENSE = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 bias=true activation=relu")
EXTRA = epilogue_kernel(64, "float16", bias=True, residual=False, activation="relu")
START = """
import sys

import torch

from confpred.cuda import compiler, driver
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.pytorch.run import choosing

def refuse(*_):
    sys.exit("the compiler is asked")

compiler._compile = compiler.nvrtc_version = refuse
torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
driver.device_of = lambda ordinal: get_device("h100")
choosing.use_plan(sys.argv[1])
predictor = choosing.current_predictor()
import confpred.model.folder
confpred.model.folder.load_model = lambda folder: sys.exit(f"{folder} is loaded")
choice = predictor.choose(Problem.parse(sys.argv[2]), "h100")
from confpred.families.registry import all_families
launch = all_families()[choice.provider].launch(choice.problem, choice.config_id)
assert all(compiler.compile_kernel(step.kernel, "sm_90a").cached for step in launch.steps)
print(choice.source, choice.provider, choice.config_id)
"""


def plan() -> Plan:
    legal = all_families()["depthwise_fprop"].legal(DEPTHWISE, get_device("h100"))
    ours = Candidate("depthwise_fprop", int(np.argmax(legal)))
    predicted = Choice(DEPTHWISE, "h100", "predicted", ours, 0.01)
    return plan_of([predicted, Choice(DENSE, "h100", "fallback")])


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    for bundle in compiler._opened:
        compiler.close_kernels(bundle)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "made"
    write_plan(folder, plan(), kernels=compiled_files([*plan().specs(), EXTRA, EXTRA], "sm_90a"))
    return folder


def test_the_folder_is_whole_and_small(made: Path) -> None:
    files = sorted(path.name for path in made.iterdir())
    assert files == ["kernels", "manifest.json", "plan.json"]
    assert len(list(made.rglob("*.cubin"))) == 2
    assert read_plan(made) == read_plan(made / "plan.json") == plan()
    assert str(made) not in (made / "manifest.json").read_text()


def test_another_process_starts_without_a_compiler_or_a_model(made: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(made, tmp_path / "elsewhere")
    cache = tmp_path / "cache"
    done = python("-c", START, moved, DEPTHWISE, CONFPRED_CACHE_DIR=str(cache))
    row = plan().choices[0].config_id
    assert (done.stdout, done.stderr) == (f"pinned depthwise_fprop {row}\n", "")
    assert not cache.exists()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has the process believe that its current CUDA device is of a kind: it has none."""

    def believe(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(driver, "device_of", lambda ordinal: get_device(name))

    monkeypatch.setattr(choosing, "_predictors", {})
    yield believe
    choosing.forget()


def test_what_is_undone_is_followed_no_more(made: Path, device: Callable[[str], None]) -> None:
    device("h100")
    former = Predictor({})
    choosing.use_predictor(former)
    undo = confpred.use_plan(made)
    assert choosing.current_predictor().choose(DEPTHWISE, "h100").source == "pinned"
    assert [kernels.folder for kernels in compiler._opened] == [made]
    with confpred.enabled(plan=made):
        pass
    assert [kernels.folder for kernels in compiler._opened] == [made]
    undo()
    assert choosing.current_predictor() is former
    assert compiler._opened == ()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1), (1, 1, 0)])
@pytest.mark.parametrize("former", [Predictor({}), None])
def test_plans_are_undone_in_any_order(
    tmp_path: Path, device: Callable[[str], None], order: Sequence[int], former: Predictor | None
) -> None:
    device("h100")
    if former is not None:
        choosing.use_predictor(former)
    layers = [replace(DEPTHWISE, n=n) for n in (3, 5)]
    undos = []
    for layer in layers:
        write_plan(
            path := tmp_path / "plan.json", plan_of(Predictor({}).choose_many([layer], "h100"))
        )
        undos.append(confpred.use_plan(path))
    for place in order[:-1]:
        undos[place]()
        chosen = choosing.current_predictor().choose_many(layers, "h100")
        assert [choice.source == "pinned" for choice in chosen] == [place == 1, place == 0]
    undos[order[-1]]()
    assert choosing._predictors == ({} if former is None else {"conv2d": former})


def test_a_predictor_that_is_used_after_a_plan_stays(
    tmp_path: Path, device: Callable[[str], None]
) -> None:
    device("h100")
    write_plan(
        path := tmp_path / "plan.json", plan_of(Predictor({}).choose_many([DEPTHWISE], "h100"))
    )
    undo, own = confpred.use_plan(path), Predictor({})
    choosing.use_predictor(own)
    undo()
    assert choosing.current_predictor() is own


def test_layers_that_a_plan_lacks_are_chosen_as_without_it(
    made: Path, tmp_path: Path, device: Callable[[str], None]
) -> None:
    """By the predictor in force, and by a plan that is followed already."""
    device("h100")
    choosing.use_predictor(Predictor({}))
    planned, other = (replace(DEPTHWISE, n=n) for n in (DEPTHWISE.n + 1, DEPTHWISE.n + 2))
    write_plan(tmp_path / "plan.json", plan_of(Predictor({}).choose_many([planned], "h100")))
    with confpred.enabled(plan=tmp_path / "plan.json"), confpred.enabled(plan=made):
        chosen = choosing.current_predictor().choose_many([DEPTHWISE, planned, other], "h100")
    assert [choice.source for choice in chosen] == ["pinned", "pinned", "heuristic"]


def test_without_a_gpu_the_choices_are_followed_alone(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where there is a GPU, too
    monkeypatch.setattr(choosing, "_predictors", {})
    undo = confpred.use_plan(str(made))
    assert choosing.current_predictor().choose(DEPTHWISE, "h100").source == "pinned"
    assert compiler._opened == ()
    undo()
    assert choosing._predictors == {}


def test_a_plan_for_something_else_is_refused_and_not_opened(
    made: Path, tmp_path: Path, device: Callable[[str], None]
) -> None:
    device("h200")
    with pytest.raises(InvalidInput, match=r"plan\.json: device='h100' is not allowed.* h200"):
        confpred.use_plan(made)
    device("h100")
    with pytest.raises(DataError, match="cannot read"):
        confpred.use_plan(tmp_path / "none")
    moved = shutil.copytree(made, tmp_path / "moved")
    for name in ("manifest.json", "plan.json"):
        text = (moved / name).read_text()
        digest = compiler.source_digest("depthwise.cu")
        assert digest in text
        (moved / name).write_text(text.replace(digest, "0" * 16))
        other = rf"{name} was made (from other sources|for other)"
        with pytest.raises(DataError, match=other):
            confpred.use_plan(moved)
        (moved / name).write_text(text)
    (moved / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json"):
        confpred.use_plan(moved)
    assert compiler._opened == ()
    assert choosing._predictors == {}


def test_a_folder_of_a_former_release_is_followed(
    made: Path, tmp_path: Path, device: Callable[[str], None]
) -> None:
    device("h100")
    former = shutil.copytree(Path(__file__).parent / "former_plans" / "bundle", tmp_path / "former")
    shutil.copytree(made / "kernels", former / "kernels")
    (then,) = json.loads((former / "manifest.json").read_text())["sources"].values()
    for path in former.glob("*.json"):  # as if the kernels had never changed
        path.write_text(path.read_text().replace(then, compiler.source_digest("depthwise.cu")))
    undo = confpred.use_plan(former)
    assert choosing.current_predictor().choose(DEPTHWISE, "h100").source == "pinned"
    assert [kernels.folder for kernels in compiler._opened] == [former]
    undo()


def test_kernels_are_of_one_architecture() -> None:
    other = Choice(DENSE, "a100", "fallback")
    with pytest.raises(InvalidInput, match=r"device='sm_80 and sm_90a' is not .* one architecture"):
        print(plan_of([*plan().choices, other]).arch)


def test_nothing_is_left_of_what_fails(made: Path, tmp_path: Path) -> None:
    broken = KernelSpec("epilogue.cu", "epilogue", (("DTYPE", "DTYPE_FLOAT16"),))
    with pytest.raises(CompileError):
        write_plan(tmp_path / "made", plan(), kernels=compiled_files([broken], plan().arch))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="made"):
        write_plan(made, plan(), kernels={})

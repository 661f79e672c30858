"""PyTorch's cache of compiled graphs: what was kept runs as what was compiled."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hazards import HAZARDS, compare
from layers import H100
from network_blocks import as_chosen
from slow import slow_but
from torch import Tensor, nn
from torch._dynamo.utils import counters

import confpred
from confpred.cuda import driver
from confpred.errors import ModelError
from confpred.families import registry
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.limits import Limits
from confpred.problem.norm_of_groups import NORM
from confpred.pytorch import backend, graph_cache
from confpred.pytorch.run import choosing, graphs

LAST = torch.channels_last
pytestmark = pytest.mark.keeps_graphs


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def on_h100(captured: Any, launches: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captures as on an H100, whose model the package has; choices are still given."""
    monkeypatch.setattr(choosing, "device_of", lambda ordinal: H100)  # no GPU is here
    monkeypatch.setattr(driver, "describe", lambda _: (H100.product, "580.1"))  # nor its driver
    monkeypatch.setattr(graph_cache, "_ordinals", lambda inputs: {0})  # of tensors of the CPU
    monkeypatch.setattr(backend, "compile_ahead", as_chosen)  # kernels need a GPU
    return captured


def network(training: bool = False) -> nn.Module:
    """Convolutions alone: Inductor calls PyTorch's operators and compiles no program in C++."""
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 16, 3, groups=8), nn.Conv2d(16, 16, 3, groups=16)
    return nn.Sequential(*layers).to(memory_format=LAST).train(training)


def image() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 8, 9, 9).contiguous(memory_format=LAST)


def results(model: nn.Module, **options: Any) -> list[Tensor]:
    """Return results of an optimized copy of `model`, and gradients in training."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    confpred.optimize(model, inductor=True, **options)
    with torch.set_grad_enabled(model.training):
        out = model(image())
    if not model.training:
        return [out]
    out.square().sum().backward()
    return [out, *(p.grad for p in model.parameters() if p.grad is not None)]


def hits() -> tuple[int, int]:
    """Return how many graphs were kept, and how many found, since the last call."""
    counted = counters.pop("aot_autograd", {})
    return counted.get("autograd_cache_saved", 0), counted.get("autograd_cache_hit", 0)


@pytest.mark.parametrize("training", slow_but((False,), (False, True), "it compiles C++"))
def test_a_kept_graph_is_found_and_right(training: bool) -> None:
    model = network(training)
    first = results(model)
    assert hits() == (1, 0)
    second = results(model)
    assert hits() == (0, 1)
    plain = copy.deepcopy(model)
    out = plain(image())
    out.square().sum().backward()
    eager = [out, *(p.grad for p in plain.parameters())]
    for a, b, c in zip(first, second, eager[: len(first)], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(b, c)


@pytest.mark.parametrize("training", [False, True])
def test_layers_and_choices_are_as_they_were(on_h100: Any, training: bool) -> None:
    model, seen = network(training), []
    for expected in ((1, 0), (0, 1)):
        asked = len(on_h100.asked)
        with choosing.watch_choices(seen.append):
            results(model)
        assert hits() == expected
        assert (len(on_h100.asked) > asked) == (expected == (1, 0))  # a kept graph asks nobody
    captures = [on_h100.passes[i].told for i in range(len(on_h100.passes))]
    half = len(captures) // 2
    for first, second in zip(captures[:half], captures[half:], strict=True):
        for name in ("device", "static", "written", "visible"):
            assert first[name] == second[name], name


def test_a_graph_of_training_is_kept_where_inputs_are_given(on_h100: Any) -> None:
    for expected in ((1, 0), (0, 1)):
        torch._dynamo.reset()
        confpred.optimize(network(training=True), image(), inductor=True)
        assert hits() == expected


def layers_of(model: nn.Module, x: Tensor) -> tuple[Any, tuple[int, int]]:
    """Return the text of `confpred.status` of a copy of `model` after a call, and `hits`."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    confpred.optimize(model, inductor=True)
    with torch.no_grad():
        model(x)
    found = confpred.status(model)
    return (found.providers, found.left, found.compilers, found.replay), hits()


def test_status_knows_the_layers_of_a_kept_graph(on_h100: Any) -> None:
    (first, kept), (second, again) = layers_of(network(), image()), layers_of(network(), image())
    assert (kept, again) == ((1, 0), (0, 1))
    assert first == second
    assert sum(first[0].values()) == 2


def test_a_filter_that_can_no_longer_be_folded_is_seen(on_h100: Any) -> None:
    """PyTorch's key knows sizes and dtypes of parameters, not their values."""
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8)
    model = nn.Sequential(*layers).half().to(memory_format=LAST).eval()
    lossy = copy.deepcopy(model)
    lossy[1].weight.data[0], lossy[1].running_var[0] = 60000, 1e-4
    (first, kept), (second, again), (third, other) = (
        layers_of(net, image().half()) for net in (model, model, lossy)
    )
    assert (kept, again, other) == ((1, 0), (0, 1), (0, 0))
    assert first == second
    assert first != third


def test_what_inductor_has_lost_is_compiled_again(tmp_path: Path) -> None:
    first = results(network())
    assert hits() == (1, 0)
    shutil.rmtree(tmp_path / "fxgraph")
    torch.testing.assert_close(results(network()), first)
    assert hits()[1] == 0


@pytest.mark.parametrize("options", [{"verify": 1}, {"freeze": True}, {"verify": "network"}])
def test_verified_choices_and_frozen_weights_are_not_kept(options: dict[str, Any]) -> None:
    results(network(), **options)
    assert hits() == (0, 0)


@pytest.mark.passes_fail
@pytest.mark.parametrize("training", [False, True])
def test_a_graph_whose_rewrite_failed_is_not_kept(
    on_h100: Any, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    """The next process says so, too, or has the memory that this one lacks."""

    def fail(graph: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(backend.passes, "drop_copies", fail)  # a step of each pass
        results(network(training))
        assert hits() == (0, 0)
    results(network(training))
    assert hits() == (1, 0)


@pytest.mark.passes_fail
def test_a_damaged_model_costs_a_graph_its_place_in_the_cache_alone(
    on_h100: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaged(dict[str, Any]):
        def values(self) -> Any:
            raise ModelError("it is damaged")

    damaged = Predictor(Damaged({H100.key: None}))
    monkeypatch.setitem(choosing._predictors, CONVOLUTION.name, damaged)
    (providers, *_), kept = layers_of(network(), image())
    assert kept == (0, 0)
    assert providers == {"cudnn": 2}


def test_a_backward_pass_that_nobody_asks_for_is_not_compiled() -> None:
    model = network()
    confpred.optimize(model, inductor=True)
    model(image())
    assert [text.partition(":")[0] for text in confpred.status(model).replay] == ["forward"]
    assert hits() == (0, 0)


def test_the_key_covers_what_choices_depend_on(on_h100: Any, monkeypatch: Any) -> None:
    options, x = backend.Options(), [image()]
    find = lambda o=options, training=False: graph_cache.identity_of(o, x, training)  # noqa: E731
    keys = {find(), find(backend.Options(max_regret=1.1))}
    for name in ("benchmark", "deterministic", "allow_tf32"):
        with torch.backends.cudnn.flags(**{name: not getattr(torch.backends.cudnn, name)}):
            keys.add(find())
    with torch.backends.cudnn.flags(enabled=False):
        keys.add(find())
    limited = choosing.current_predictor().within(Limits(workspace_bytes=0))
    monkeypatch.setitem(choosing._predictors, "conv2d", limited)
    keys.add(find())
    monkeypatch.setattr(graph_cache, "_sources", lambda: "others")  # as after an upgrade
    keys.add(find())
    (other,) = Path("models").glob("h200-*")
    monkeypatch.setitem(choosing._predictors, "conv2d", Predictor.load(other))
    keys |= {find(), find(backend.Options(tune=1))}  # no model of this device
    monkeypatch.setattr(driver, "describe", lambda _: (H100.product, "590.2"))  # after an upgrade
    keys.add(find())
    assert None not in keys
    assert len(keys) == 11
    monkeypatch.setattr(choosing, "ranks", lambda: 2)  # there is one process
    monkeypatch.setattr(choosing, "_settled", lambda _, mine: mine)  # the other one says the same
    assert find() is None


def test_answers_that_tuning_keeps_later_make_another_graph(
    on_h100: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks would look answers up only where they compile: they keep no graph then."""
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path))
    find = lambda: graph_cache.identity_of(backend.Options(), [image()], False)  # noqa: E731
    before = find()
    for version in ("570.1", "580.1"):
        here = choosing.kept_folder(H100, NORM)
        folder = here.parents[1] / here.parent.name.replace("580.1", version) / here.name
        folder.mkdir(parents=True)
        (folder / "rows-1.parquet").touch()
        assert (find() == before) == (version == "570.1")
    assert find() is not None
    monkeypatch.setattr(choosing, "ranks", lambda: 2)  # there is one process
    monkeypatch.setattr(choosing, "_settled", lambda _, mine: mine)  # the other one says the same
    assert find() is None


def test_choices_of_others_are_not_kept(on_h100: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Served(Predictor):
        """Asks a service."""

    served = Served(choosing.current_predictor().models)
    monkeypatch.setitem(choosing._predictors, "conv2d", served)
    assert graph_cache.identity_of(backend.Options(), [image()], False) is None


def test_choices_among_families_of_a_plug_in_are_not_kept(on_h100: Any, monkeypatch: Any) -> None:
    """Its configs may be others in the next process, under the same numbers."""
    find = lambda: graph_cache.identity_of(backend.Options(), [image()], False)  # noqa: E731
    before, families = find(), dict(registry.all_families())
    monkeypatch.setattr(registry, "all_families", lambda: families)  # a module would be imported
    families["softmax"] = SimpleNamespace(operation=SimpleNamespace(name="softmax"))
    assert find() == before is not None
    families["another"] = SimpleNamespace(operation=CONVOLUTION)
    assert find() is None


def test_an_allocator_that_forbids_cuda_graphs_is_seen_in_the_next_process(
    on_h100: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers_of(network(), image())
    monkeypatch.setattr(backend, "make_replayable", graphs.make_replayable)  # as on a GPU
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")  # its own
    (*_, replay), (_, again) = layers_of(network(), image())
    assert again == 1
    assert replay == ("inference: no CUDA graph as the allocator is cudaMallocAsync",)


def test_open_sizes_are_not_kept() -> None:
    model = network()
    confpred.optimize(model, inductor=True, dynamic=True)
    with torch.no_grad():
        model(image())
    assert hits() == (0, 0)


@pytest.mark.slow(reason="Inductor compiles programs in C++")
@pytest.mark.parametrize("name", [
    "gradients_that_arrive_with_other_strides", "many_models_of_one_class",
    "siamese_calls_with_one_backward", "training_and_inference_in_turns",
    "two_adversaries_from_the_first_step", "weights_written_through_data",
])  # fmt: skip
def test_ordinary_programs_compute_the_same_by_kept_graphs(name: str) -> None:
    for _ in range(2):
        counters.clear()
        compare(HAZARDS[name], "cpu", inductor=True)
    assert counters["aot_autograd"]["autograd_cache_hit"] > 0

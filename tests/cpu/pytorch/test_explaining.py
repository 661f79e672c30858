"""`explain`: right without options, whole, and with a reason for what cannot be captured."""

from __future__ import annotations

import pytest
import torch
from network_blocks import Around
from torch import Tensor, nn

import confpred
from confpred.cudnn import plans
from confpred.errors import ConfpredError
from confpred.families.protocol import Candidate
from confpred.predict.choice import Choice
from confpred.problem.conv import ConvNd
from confpred.pytorch import backend
from confpred.pytorch.run import choosing


@pytest.mark.passes_fail
@pytest.mark.parametrize("training", [False, True])
def test_a_graph_that_is_undone_has_no_rows(monkeypatch, training: bool) -> None:
    """PyTorch's operators run; a pass failed after confpred's were put in their place."""

    def fail(graph: torch.fx.Graph) -> None:
        raise ValueError("no such graph")

    model = nn.Conv2d(8, 8, 3, groups=8)
    assert confpred.explain(model, torch.rand(2, 8, 6, 6), training=training).rows
    name = "describe_tensors" if training else "update_in_place"
    monkeypatch.setattr(backend.passes, name, fail)  # a pass that fails
    explanation = confpred.explain(model, torch.rand(2, 8, 6, 6), training=training)
    assert {row.provider for row in explanation.rows} <= {"pytorch"}
    assert not any(row.sizes for row in explanation.rows)
    assert explanation.step.launches_after


@torch.library.custom_op("explaining::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("layer", ["Dynamo", "AOTAutograd"])
@pytest.mark.parametrize("text", ["", "\n \n", "no such layer\nand more", "Because:\n- why"])
def test_a_reason_is_never_empty(text: str, layer: str) -> None:
    """Each of the two layers calls the operator on tensors without values once."""
    calls: list[Tensor] = []

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > (layer == "AOTAutograd"):
            raise AssertionError(text)
        return torch.empty_like(x)

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.explaining.twice(x)

    reason = "no such layer" if text[:2] == "no" and layer != "Dynamo" else r".*\w"
    with pytest.raises(ConfpredError, match=f"Failing cannot be captured: {reason}"):
        confpred.explain(Failing(), torch.rand(2, 4))


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=8), *more).eval()


def image(size: int = 56) -> Tensor:
    return torch.rand(8, 64, size, size)


def test_the_device_and_the_mode_are_those_of_machine_and_model() -> None:
    model = layers()
    told = confpred.explain(model, image())
    assert (told.device, told.training) == ("h100", False)
    assert told.remarks[0] == (
        "An H100 is assumed, as this machine has no GPU: device= names another one."
    )
    trained = confpred.explain(model.train(), image(), "h100")
    assert trained.training
    assert {"fprop", "wgrad"} <= {row.direction for row in trained.rows}
    assert "step of training on h100" in str(trained)
    assert not confpred.explain(model, image(), "h100", training=False).training
    assert not any("assumed" in remark for remark in trained.remarks)


def test_a_poor_answer_offers_half_precision_and_channels_last() -> None:
    told = confpred.explain(layers(), image(), "h100")
    assert told.step.gain < 1.1
    assert told.step.convolution_share > 0.9
    (remark,) = told.remarks
    assert remark.startswith("With model.half() and model.to(memory_format=torch.channels_last)")
    half = layers().half().to(memory_format=torch.channels_last)
    x = image().half().to(memory_format=torch.channels_last)
    good = confpred.explain(half, x, "h100")
    assert good.remarks == ()
    assert f"{good.step.ms_before:.3f} -> {good.step.ms_after:.3f} ms" in remark


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("training", [False, True])
def test_every_layer_that_takes_time_is_a_row(rank: int, training: bool) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    model = nn.Sequential(kind(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    x = torch.rand(4, 8, *[12] * rank)
    model(x)
    told = confpred.explain(model, x, "h100", training=training)
    rows = {row.direction: row for row in told.rows}
    assert rows["fprop"].sizes == tuple(x.shape)
    assert rows["fprop"].reason == "no legal kernel, or none within limits"
    assert {"aten.relu", "aten.addmm"} <= rows.keys()
    assert ("wgrad" in rows) == training
    total = sum(len(row.layers) * row.expected_ms for row in told.rows)
    assert total == pytest.approx(told.step.ms_after)
    assert told.step.unpredicted == 1 + training


def test_a_product_of_a_matrix_with_itself_takes_time() -> None:
    (row,) = confpred.explain(Around(lambda m, x: x @ x), torch.rand(2048, 2048), "h100").rows
    assert row.expected_ms > 0.02  # its operations, not its bytes


def test_layers_have_the_names_that_their_modules_have() -> None:
    own = {name: layers() for name in ("model", "copy", "myself")}
    model = Around(lambda m, x: m.myself(m.copy(m.model(x))), **own)
    rows = confpred.explain(model, image(), "h100").rows
    assert {n for row in rows if row.sizes for n in row.layers} == {f"{name}.0" for name in own}


def test_channels_first_layers_take_time() -> None:
    told = confpred.explain(layers(nn.Conv2d(64, 128, 1)), image(), "h100")
    first, second = (row for row in told.rows if row.sizes)
    assert (first.reason, first.sizes, first.is_estimate) == (
        "channels first", (8, 64, 56, 56), True
    )  # fmt: skip
    assert min(first.expected_ms, second.expected_ms) > 0.002
    assert "~0.0" in str(told)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum().item() > 0:
            x = x * 2
        return self.last(x)


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_that_reads_values_is_explained_in_parts(training: bool) -> None:
    x = torch.rand(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    told = confpred.explain(Counted().train(training), x, "h100")
    assert told.step.parts == 2
    assert {"first", "last"} <= {name for row in told.rows for name in row.layers}


@pytest.mark.parametrize("call", [confpred.explain, confpred.optimize])
def test_wrong_channels_are_named_in_a_line(call) -> None:
    with pytest.raises(ConfpredError) as caught:
        call(layers(), torch.rand(2, 3, 8, 8))
    text = str(caught.value)
    assert text.endswith("to have 64 channels, but got 3 channels instead")
    assert "\n" not in text


def test_reasons_are_whole() -> None:
    model = layers(nn.ConvTranspose2d(64, 8, 2), nn.Conv2d(8, 2, 1, groups=2))
    told = str(confpred.explain(model.half(), image().half(), "a100"))
    assert all(len(line) <= 120 for line in told.splitlines())
    assert "…" not in told
    for words in ("no model for this device", "no legal kernel"):
        assert words in told


def test_a_transferred_choice_names_the_device_that_was_measured() -> None:
    model = layers().half().to(memory_format=torch.channels_last)
    x = image().half().to(memory_format=torch.channels_last)
    near, other = (confpred.explain(model, x, device) for device in ("h100-pcie", "a100"))
    (row,) = (row for row in near.rows if row.direction == "fprop")
    assert (row.provider, row.reason) == ("grouped_fprop", "transferred from h100")
    assert near.remarks == ()
    assert {row.provider for row in other.rows if row.direction == "fprop"} == {"pytorch"}


class Normed(nn.Module):
    """Channels-first images between norms of groups."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Conv2d(c, 32, 3, padding=1) for c in (3, 32, 32))
        self.body = nn.Sequential(*(
            layer for conv in blocks for layer in (conv, nn.GroupNorm(8, 32), nn.SiLU())
        ))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("device", ["h100", "a100"])
def test_more_launches_and_a_loss_are_explained(device: str) -> None:
    x = torch.rand(1, 3, 32, 32).half()
    told = confpred.explain(Normed().eval().half(), x, device)
    assert told.step.launches_after > told.step.launches_before
    assert told.step.added["aten.clone"] >= 3
    text = " ".join(told.remarks)
    assert "Rewriting adds " in text
    assert "channels last" in text
    assert ("it gets slower" in text) == (told.step.gain < 0.995)
    assert ("no model of the a100" in text) == (device == "a100")


def test_what_cudnn_brings_is_said_where_it_is_missing(monkeypatch) -> None:
    """As if its front end were missing, and as if it were not."""
    model = nn.Sequential(nn.Conv2d(64, 64, 1)).half().eval().to(memory_format=torch.channels_last)
    x = image().half().contiguous(memory_format=torch.channels_last)
    for missing in (True, False):
        monkeypatch.setattr(plans, "is_missing", lambda missing=missing: missing)  # or not, here
        said = [r for r in confpred.explain(model, x, "h100").remarks if "cuDNN's plans" in r]
        assert len(said) == missing
        assert all("pip install" in each for each in said)


def test_plans_of_any_rank_are_cudnns_too(monkeypatch) -> None:
    def choose(problems, *_):
        plan = Candidate("cudnn_nd", 3)
        return [Choice(p, "h100", "predicted", plan, 1.0, pytorch_ms=2.0) for p in problems]

    monkeypatch.setattr(choosing, "choose_many", choose)  # no shipped model has these plans
    monkeypatch.setattr(plans, "is_missing", lambda: True)  # it may be installed here
    explanation = confpred.explain(
        nn.Conv3d(8, 8, 3).half().eval(), torch.rand(1, 8, 9, 9, 9).half()
    )
    assert isinstance(explanation.rows[0].problem, ConvNd)
    assert any("1.000 ms of the gain are of cuDNN's plans" in text for text in explanation.remarks)


def test_out_of_distribution_is_said() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2)).half().eval()
    x = torch.rand(1, 2, 3, 3).half().contiguous(memory_format=torch.channels_last)
    (row, *_) = confpred.explain(model, x, "h100").rows
    assert row.provider == "pytorch" or "out of distribution" in row.reason


# One process captures any number of networks; Dynamo keeps few graphs for each code object.


def test_each_of_many_networks_is_explained() -> None:
    images = torch.randn(2, 8, 9, 9, dtype=torch.half)
    for channels in range(8, 88, 8):
        model = torch.nn.Sequential(torch.nn.Conv2d(8, channels, 3), torch.nn.ReLU()).half().eval()
        told = confpred.explain(model, images, device="h100")
        assert (told.step.parts, len([row for row in told.rows if row.sizes])) == (1, 1)


def test_layers_are_named_as_the_network_names_them() -> None:
    """Dynamo writes some names as an expression, such as ``getattr(L['m'], '1x')``."""

    def block(**more: nn.Module) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            for name in dict(m.named_children()):
                x = getattr(m, name)(x)
            return x

        return Around(forward, **more)

    convs = iter([nn.Conv2d(8, 8, 3, groups=8) for _ in range(8)])
    layers = {"it's": next(convs), '"': next(convs), "list": nn.Sequential(next(convs))}
    inner = block(**{"2y": next(convs), "_modules_": next(convs), **layers})
    model = block(**{"1x": inner, "a-b": next(convs), "0": next(convs), "map": next(convs)})
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    rows = confpred.explain(model, torch.rand(2, 8, 40, 40)).rows
    assert {name for row in rows for name in row.layers} == names

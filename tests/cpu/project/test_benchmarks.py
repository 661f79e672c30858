"""The benchmarks: what they ask for exists, and what they record is summed up."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import synthetic

from benchmarks import tables
from benchmarks.host import predict_latency
from benchmarks.kernels import conv_vs_cudnn, in_situ
from benchmarks.model import partitions, transfer
from benchmarks.model import transfer_holdout as elsewhere
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import all_families
from confpred.model.features import pools
from confpred.problem.conv2d import DIRECTIONS, Problem
from confpred.problem.device import get_device
from confpred.training.dataset import read_dataset
from confpred.training.holdout import read_holdout


def test_latency_is_of_layers_of_every_kind_and_direction():
    assert {kind.partition(", ")[2] for kind in predict_latency.KINDS} == set(DIRECTIONS)
    for kind in predict_latency.KINDS:
        family, h100 = all_families()[kind.replace(", ", "_")], get_device("h100")
        found = list(islice(predict_latency.random_problems(kind, seed=0), 20))
        assert {p.direction for p in found} == {kind.partition(", ")[2]}
        assert {p.group_width == 1 for p in found} == {kind.startswith("depthwise")}
        assert sum(family.legal(p, h100).any() for p in found) > 10


def _times(cudnn_ms: float, ours_ms: float) -> dict[str, float]:
    return {
        "floor_ms": 0.5,
        "cudnn_ms": cudnn_ms,
        "ours_ms": ours_ms,
        "ours_again_ms": ours_ms * 1.01,
        "difference": 1e-4,
    }


def test_every_network_has_problems_of_every_direction():
    problems = conv_vs_cudnn.problems()
    for name in conv_vs_cudnn.NETWORKS:
        of_network = {p.direction for p, networks in problems.items() if name in networks}
        assert of_network == set(DIRECTIONS), name
    assert len({p.layer() for p in problems}) > 100


def test_a_held_out_model_leaves_all_the_networks_out():
    words = conv_vs_cudnn.exclusions().split()
    assert words[1::2] == list(conv_vs_cudnn.NETWORKS)


def test_the_smaller_of_the_two_ratios_counts():
    row = {"problem": "n=64 c=8 h=9 w=9 k=8 r=3 s=3 groups=8", "family": "any"}
    times = {"heuristics": _times(3.0, 1.0), "benchmark": _times(1.8, 0.9)}
    found = conv_vs_cudnn.joined(row, times)
    assert found["speedup"] == 2.0
    assert found["floor_share"] == 0.5
    assert found["noise"] == pytest.approx(0.01)


def test_pytorchs_operator_is_as_fast_as_cudnns_best():
    row = {"problem": "n=64 c=8 h=9 w=9 k=8 r=3 s=3 groups=8", "family": None}
    times = {
        mode: {"floor_ms": 0.5, "cudnn_ms": ms}
        for mode, ms in (("heuristics", 3.0), ("benchmark", 2.0))
    }
    found = conv_vs_cudnn.joined(row, times)
    assert (found["ours_ms"], found["speedup"], found["floor_share"]) == (2.0, 1.0, 0.25)


def test_the_summary_is_by_kind_and_direction():
    times = {"heuristics": _times(4.0, 1.0), "benchmark": _times(4.0, 1.0)}
    lost = {"heuristics": _times(0.9, 1.0), "benchmark": _times(0.9, 1.0)}
    rows = [
        ("n=64 c=8 h=9 w=9 k=8 r=3 s=3 groups=8", times),
        ("n=32 c=8 h=9 w=9 k=8 r=3 s=3 groups=8", times),
        ("n=64 c=8 h=9 w=9 k=8 r=3 s=3 groups=2 direction=wgrad", lost),
    ]
    layers = [conv_vs_cudnn.joined({"problem": p, "family": "any"}, t) for p, t in rows]
    depthwise, grouped = conv_vs_cudnn.summary(layers)
    assert (depthwise["kind"], depthwise["direction"]) == ("depthwise", "fprop")
    assert depthwise["speedup"] == pytest.approx(4.0)
    assert (depthwise["problems"], depthwise["slower"]) == (2, 0)
    assert (grouped["kind"], grouped["direction"], grouped["slower"]) == ("grouped", "wgrad", 1)


def test_a_run_goes_on_only_with_its_like(repository):
    recorded = json.loads((repository / "benchmarks/results/h100/conv_vs_cudnn.json").read_text())
    assert conv_vs_cudnn.earlier_layers(recorded, recorded) == recorded["layers"]
    with pytest.raises(SystemExit, match="is of driver"):
        conv_vs_cudnn.earlier_layers(recorded, recorded | {"driver": "1.0"})


def test_the_layers_in_situ_are_the_networks_own(repository):
    networks = json.loads((repository / "datasets" / "networks.json").read_text())["networks"]
    for name, text in in_situ.LAYERS:
        problem = Problem.parse(text)
        fields = [{k: v for k, v in x.items() if k != "count"} for x in networks[name]]
        assert problem in [Problem.from_json(x | {"n": problem.n}) for x in fields], text
        assert problem.q == problem.w


def test_agreement_of_rankings():
    assert in_situ.agreement([1, 2, 3], [2, 3, 9]) == pytest.approx((1, 1))
    assert in_situ.agreement([1, 2, 3], [9, 3, 2]) == pytest.approx((-1, -1))


def test_the_spread_has_the_fastest_and_the_predicted():
    times = {("any", row): 1.0 + 0.1 * row for row in range(40)}
    chosen = in_situ.spread(times, ("any", 30))
    assert ("any", 0) in chosen
    assert ("any", 30) in chosen
    assert len(chosen) == in_situ.CHOSEN + 1
    assert all(times[c] <= in_situ.RANGE for c in chosen if c != ("any", 30))


def test_a_share_of_layers_holds_the_smaller_ones(measurements):
    dataset = read_dataset([measurements])
    (pool,) = pools([all_families()["grouped_fprop"]])
    examples = transfer.examples_of(dataset, {"grouped_fprop": pool})
    assert len(examples) == len(dataset.timings)
    shares = [transfer.drawn(examples, share, seed=0) for share in (0.0, 0.2, 0.6, 1.0)]
    assert [*map(len, shares)] == sorted({*map(len, shares)})
    assert (shares[0], shares[3]) == ([], examples)
    for fewer, more in pairwise(shares):
        assert {id(e) for e in fewer} <= {id(e) for e in more}


def test_a_whole_model_is_judged_elsewhere(measurements, model_folder, tmp_path):
    giver = read_dataset([measurements])
    asker = replace(giver, device=get_device("h200"), others=(giver,))
    assert elsewhere.with_share(asker, 0.0, 0) is giver
    half, whole = (elsewhere.with_share(asker, share, 0) for share in (0.5, 1.0))
    assert 0 < len(half.timings) < len(whole.timings) == len(asker.timings)
    assert {t.problem for t in half.timings} >= half.pytorch_ms.keys()
    assert half.others == asker.others

    path = synthetic.write_holdout(tmp_path / "held.parquet", "net0")
    held = read_holdout(read_dataset([path]), [path])
    learned: list[object] = []

    def learn(known: object, out: Path) -> None:
        learned.append(known)
        shutil.copytree(model_folder, out)

    here = replace(asker, device=giver.device)
    rows = [elsewhere.judged(here, held, share, 0, learn) for share in (0.0, 1.0)]
    assert learned[0] is giver
    assert rows[0]["ours"] == rows[1]["ours"]
    assert rows[0]["ours"]["geomean"] >= 1
    assert rows[1]["rows"] == sum(len(t.rows) for t in giver.timings)
    _, made = tables.TABLES["transfer-holdout"]
    assert "| H100 | H100 | 0% |" in made({"rows": rows})


def test_what_transfers_to_a_part_of_a_gpu_is_summed_up():
    best, second, third = (Candidate("grouped_fprop", row) for row in range(3))
    times = {best: 1.0, second: 1.5, PYTORCH_OPERATOR: 1.2, third: 3.0}
    answer = partitions.Answer(times, [second, PYTORCH_OPERATOR, third, best], 0.75, 1.2)
    assert answer.regrets() == {
        "pytorch": 1.2, "first": 1.5, "tuned": 1.0, "order": 1.5, "order, 8 measured": 1.0,
    }  # fmt: skip
    found = partitions.summary([answer, replace(answer, times={best: 1.0})])
    assert found["problems"] == 1
    assert found["first slower than pytorch"] == 1.0
    faster = replace(answer, times=times | {PYTORCH_OPERATOR: 1.48})  # by less than noise
    assert partitions.summary([answer, faster])["first slower than pytorch"] == 0.5
    assert found["order"] == {"geomean": pytest.approx(1.5), "p95": 1.5, "worst": 1.5}
    assert found["time"] == {"median_ratio": pytest.approx(2.0), "spread": 1.0}
    assert found["bound"] == {"problems": 1, "held": 0.0}
    assert len(partitions.layers(60, seed=0).entries) == 60
    _, made = tables.TABLES["partitions"]
    part = {"sm_count": 32} | found
    assert "| 32 | 1.200 | 1.500, 1.500, 1.500 | 1.000, 1.000 | 2.00 | 0% |" in made(
        {"parts": {"a": part}}
    )

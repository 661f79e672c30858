"""``confpred kernel`` on a GPU: results are compared, and a layer is timed."""

from __future__ import annotations

import re

import pytest
from command_line import worked

LAYERS = {
    "grouped_fprop": "n=64 c=256 k=256 h=56 w=56 r=3 s=3 padding=1 groups=32",
    "depthwise_wgrad": "n=64 c=96 k=96 h=56 w=56 r=3 s=3 padding=1 groups=96 direction=wgrad",
    "anywidth_fprop": "n=16 c=96 k=96 h=28 w=28 r=3 s=3 padding=1 groups=4",
}


@pytest.mark.parametrize("name", LAYERS)
def test_results_are_compared(name: str) -> None:
    done = worked("kernel", name, "check")
    found = re.search(r"(\d+) results compared with the reference", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 8


@pytest.mark.parametrize("lines", [(), ("--lineinfo",)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_timed(name: str, lines: tuple[str, ...]) -> None:
    facts = dict(
        line.split(maxsplit=1)
        for line in worked("kernel", name, "time", "--layer", LAYERS[name], *lines)
        .stdout.strip()
        .splitlines()
    )
    assert facts["family"].startswith(f"{name} on NVIDIA ")
    time_ms, floor_ms = (float(facts[fact].split()[0]) for fact in ("time", "floor"))
    assert 0 < floor_ms < 1.1 * time_ms
    share = int(facts["share"].removesuffix("% of the floor")) / 100
    half = 0.00005  # of the last digit that is printed
    assert (floor_ms - half) / (time_ms + half) - 0.005 <= share
    assert share <= (floor_ms + half) / (time_ms - half) + 0.005

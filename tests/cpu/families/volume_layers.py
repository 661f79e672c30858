"""Layers of volumes that confpred's families compute, depthwise and dense, and some they do not."""

from __future__ import annotations

import numpy as np
from layers import DENSE_VOLUMES, H100, VOLUMES

from confpred.families.protocol import Family
from confpred.problem.conv import ConvNd
from confpred.problem.device import Device

FAMILIES = {**VOLUMES, **DENSE_VOLUMES}
#: Layers of networks, and some that are unlike these: what differs from the layer of `parsed`.
DEPTHWISE = (
    "d=8 h=56 w=56 c=54 k=54 groups=54 n=8",
    "d=16 h=112 w=112 c=64 k=64 groups=64 stride=1x2x2",
    "d=4 h=7 w=7 c=432 k=432 groups=432 dtype=bfloat16",
    "t=5 r=5 s=5 padding=2 dtype=float32",
    "t=7 r=7 s=7 padding=3",
    "t=7 r=7 s=7 padding=6 dilation=2 dtype=float32",
    "t=3 r=1 s=1 padding=1x0x0",
    "t=1 r=7 s=7 padding=0x3x3 stride=2",
    "t=1 r=1 s=1 padding=0 stride=2",
    "c=27 k=27 groups=27",
    "c=1 k=1 groups=1 padding=20",
    "cut=3 padding=1x1x3",
    "d=1 h=1 w=1",
)
DENSE = (
    "c=16 k=16 d=96 h=96 w=96",
    "c=8 k=8 d=128 h=128 w=128 dtype=bfloat16",
    "c=24 k=64 stride=2",
    "c=24 k=48 stride=1x2x2",
    "t=2 r=2 s=2 stride=2 padding=0 c=64 k=24",
    "t=4 r=4 s=4 stride=2 c=24 k=64",
    "t=5 r=5 s=5 padding=2 c=16 k=16",
    "t=3 r=1 s=1 padding=1x0x0 stride=2x1x1",
    "t=1 dilation=2x1x1 padding=0x1x1",
    "cut=3",
    "d=3 h=5 w=7 padding=4",
    "d=1 h=1 w=1",
)
#: Layers that no family has a config for.
_NO_VOLUMES = (
    "layout=channels_first", "stride=3", "t=8", "s=8", "rank=2 d=1 t=1 padding=0",
    "rank=1 d=1 t=1 h=1 r=1 padding=0",
)  # fmt: skip
NOT_DEPTHWISE = (
    *_NO_VOLUMES, "groups=12", "stride=1x1x3", "dilation=3x1x1", "d=60000 h=1000",
    "n=65536 d=1 t=1 padding=0x1x1",
)  # fmt: skip
NOT_DENSE = (
    *_NO_VOLUMES, "dtype=float32", "groups=2", "c=36", "k=36", "dilation=1x1x2", "c=40 k=40",
    "t=7 r=7 s=7 padding=3", "n=1 c=8 k=8 d=3 h=46341 w=46341",
)  # fmt: skip


def parsed(family: Family, words: str) -> ConvNd:
    """Return a layer in the family's direction, with other `words`."""
    kind = "d=48 h=48 w=48" if family.name in DENSE_VOLUMES else "d=8 h=14 w=14 groups=24"
    layer = f"rank=3 n=2 c=24 {kind} k=24 t=3 r=3 s=3 padding=1"
    given = f"{layer} direction={family.name.rpartition('_')[2]} {words}"
    fields = dict(word.split("=") for word in given.split())
    return ConvNd.parse(" ".join(f"{name}={value}" for name, value in fields.items()))


def legal_rows(family: Family, problem: ConvNd, device: Device = H100) -> list[int]:
    return np.flatnonzero(family.legal(problem, device)).tolist()

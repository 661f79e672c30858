"""The plans that cuDNN has offered so far, which `datasets/cudnn_plans.py` extends: ``plans.csv``
for two-dimensional layers, and ``plans_nd.csv`` for those of any rank.

A plan's number is its line in its file, so lines are only ever added. Beside each plan stands for
which kinds of problems cuDNN has offered it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import ABSENT, Mask
from confpred.families.table import config_table
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem

# Engines and knobs. cuDNN's front end names a plan by its engine and the value of each knob, both
# by number: ``eng22_k2=5_k13=1``. The numbers of knobs are those of ``cudnnBackendKnobType_t`` in
# ``cudnn_graph.h`` (cuDNN 9); knobs that are called deprecated there still occur. An engine's
# number may change its meaning with every release.

ENGINE = "engine"
#: By number.
KNOBS = (
    "split_k", "swizzle", "tile_size", "use_tex", "edge", "kblock", "ldga", "ldgb", "chunk_k",
    "split_h", "wino_tile", "multiply", "split_k_buf", "tilek", "stages", "reduction_mode",
    "cta_split_k_mode", "split_k_slc", "idx_mode", "sliced", "split_rs", "singlebuffer", "ldgc",
    "specfilt", "kernel_cfg", "workspace", "tile_cga", "tile_cga_m", "tile_cga_n", "block_size",
    "occupancy", "array_size_per_thread", "num_c_per_block", "split_cols", "tile_rows",
    "tile_cols", "load_size", "cta_count", "stream_k", "split_p_slc", "tile_m", "tile_n",
    "warp_spec_cfg", "swap_ab",
)  # fmt: skip
#: How many slices a sum is split into. It follows from the problem and the other knobs in all but a
#: few of the plans that cuDNN offers, and takes a hundred values; so a config leaves it to cuDNN.
_SLICES = "split_k_slc"
_NAME = re.compile(r"eng(\d+)((?:_k\d+=-?\d+)*)")
_KNOB = re.compile(r"_k(\d+)=(-?\d+)")

FILE, FILE_ND = (Path(__file__).with_name(name) for name in ("plans.csv", "plans_nd.csv"))
RELEASE = "release"
#: Properties of a whole plan: whether it computes on tensor cores (TF32, where the problem is in
#: float32), and whether it gives the same bits each time.
NOTES = ("tensor_core", "repeatable")
KINDS = "kinds"
COLUMNS = (RELEASE, ENGINE, *KNOBS, *NOTES, KINDS)


@dataclass(frozen=True, slots=True)
class PlanTable:
    """All plans.

    Attributes:
        configs: release, engine and knobs of each, ``ABSENT`` where it lacks the knob.
        notes: each of ``NOTES`` as a mask over `configs`.
        kinds: for each kind of problem, the mask of the plans that cuDNN has offered for it.
    """

    configs: NDArray[np.void]
    notes: Mapping[str, Mask]
    kinds: Mapping[str, Mask]


def kind_of(problem: Problem | ConvNd) -> str:
    """Return the facts apart from sizes that decide which plans there are, for example
    ``fprop float16 dense window stride bias relu``, or of a `ConvNd`
    ``fprop float16 dense 3d window channels_last stride bias relu``."""
    p = problem
    facts = {
        "cut": isinstance(p, ConvNd) and p.cut > 0,
        "stride": max(p.stride) > 1,
        "dilation": max(p.dilation) > 1,
        "bias": p.bias,
        "residual": p.residual,
        p.activation: p.activation != "none",
    }
    words = [p.direction, p.dtype, p.grouping, "1x1" if p.taps == 1 else "window"]
    words += [p.layout] if isinstance(p, ConvNd) else []
    return " ".join([*words, *(name for name, has in facts.items() if has)])


def release_of(version: int) -> int:
    """Return the number of a cuDNN version in ``plans.csv``: 919 for 91900."""
    major, minor_patch = divmod(version, 10_000)
    return major * 100 + minor_patch // 100


def release_text(release: int) -> str:
    """Return ``9.19`` for 919."""
    return f"{release // 100}.{release % 100}"


def read_lines(file: Path) -> list[dict[str, str]]:
    """Return the lines by column name."""
    with open(file, newline="", encoding="ascii") as lines:
        names, *rows = csv.reader(lines)  # a third of the time of `csv.DictReader`
    return [dict(zip(names, row, strict=True)) for row in rows]


def table_of(lines: Iterable[Mapping[str, str]]) -> PlanTable:
    """Return the table that these lines hold."""
    lines = list(lines)
    fields = (RELEASE, ENGINE, *KNOBS)
    configs = config_table(fields, (map(_number, row) for row in map(itemgetter(*fields), lines)))
    notes = {name: np.array([line[name] == "1" for line in lines], np.bool_) for name in NOTES}
    alike: dict[str, list[int]] = {}  # many plans are offered for the same kinds
    for row, line in enumerate(lines):
        alike.setdefault(line[KINDS], []).append(row)
    kinds: dict[str, Mask] = {}
    for text, rows in alike.items():
        for kind in text.split("|"):
            if kind not in kinds:
                kinds[kind] = np.zeros(len(lines), np.bool_)
            kinds[kind][rows] = True
    for array in (*notes.values(), *kinds.values()):
        array.setflags(write=False)
    return PlanTable(configs, MappingProxyType(notes), MappingProxyType(kinds))


@cache
def _number(text: str) -> int:
    return int(text or ABSENT)


@cache
def table() -> PlanTable:
    """Return the contents of ``plans.csv``."""
    return table_of(read_lines(FILE))


@cache
def table_nd() -> PlanTable:
    """Return the contents of ``plans_nd.csv``."""
    return table_of(read_lines(FILE_ND))


def config_of(name: str) -> dict[str, int] | None:
    """Return engine and knobs of the plan with the front end's name `name`; None for a knob that is
    newer than this module, or a name of another form."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    config = {ENGINE: int(match[1])}
    for number, value in _KNOB.findall(match[2]):
        if int(number) >= len(KNOBS):
            return None
        config[KNOBS[int(number)]] = int(value)
    config.pop(_SLICES, None)
    return config
